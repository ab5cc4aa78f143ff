"""The kernels on one GPU against what cannot be beaten: `python -m benchmarks.kernels [PART ...] [--peers DIR]` (after `make test-gpu`).

Floors are bytes over the copy rate or operations over the bf16 matrix rate, both measured in the same run; times are medians of replayed
graphs with a cold L2 (kernels under 30 us: back to back and warm). Peers are timed where they can be imported: flash-linear-attention
(`fla`), from --peers DIR or installed. Shapes are Kimi K3's: 96 KDA heads (12 on a TP8 shard), 896 experts (112 on an EP8, 14 on an EP64
rank). A target is a ratio to the floor, or the time of the best kernel of others seen on the same kind of machine (docs/log.md).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.report import Row, publish
from kernels.attn_res_norm import attn_res_norm
from kernels.experts import PackedExperts, packed_experts
from kernels.kda_prefill import kda_prefill
from kernels.kda_step import kda_step
from kernels.layers import copy_layers
from kernels.linear import linear
from kernels.mla import mla_prefill_expanded
from kernels.testing import time_graph

WIDTH, HIDDEN, LATENT, INNER, EXPERTS, TOP_K = 128, 7168, 3584, 3072, 896, 16
EXPERT_BYTES = 17_547_264
SHORT_MS = 0.03


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured: bytes read and written by a copy, and bf16 matrix operations, per millisecond."""

    copy: float
    matmul: float

    def floor(self, moved: float, operations: float = 0) -> float:
        return max(moved / self.copy, operations / self.matmul)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def measure_rates() -> Rates:
    source = random(1 << 29, dtype=torch.float32)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / time_events(lambda: target.copy_(source))
    a, b = random(8192, 8192), random(8192, 8192)
    return Rates(copy, 2 * 8192**3 / time_events(lambda: a @ b))


def time_events(run: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def time(run: Callable[[], object]) -> float:
    cold = time_graph(run, repeats=9)
    return cold if cold > SHORT_MS else time_graph(run, inner=20, flush=False)


def prefill(rates: Rates, peers: bool) -> Iterator[Row]:
    for name, lengths, heads, target in (
        ("KDA prefill 8192, 96 heads", [8192], 96, 0.88),
        ("KDA prefill ragged 8192, 96 heads", [1300, 547, 2048, 963, 271, 3063], 96, 0.82),
        ("KDA prefill 65536, 12 heads", [65536], 12, 1.6),
    ):
        tokens, n = sum(lengths), len(lengths)
        q, k, v = random(tokens, 3, heads, WIDTH).unbind(1)
        f, b = random(tokens, heads * WIDTH), random(tokens, heads)
        a_log, dt_bias = random(heads, dtype=torch.float32), random(heads * WIDTH, dtype=torch.float32)
        state, slots = random(n, heads, WIDTH, WIDTH, dtype=torch.float32), torch.arange(n, device="cuda")
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
        ours = time(
            lambda q=q, k=k, v=v, f=f, b=b, a=a_log, d=dt_bias, s=state, i=slots, e=ends: kda_prefill(q, k, v, f, b, a, d, s, i, i, e, -5.0)
        )
        others = {"fla": time_fla_prefill(q, k, v, b, state, ends)} if peers else {}
        yield Row(work=name, ours=ours, unit="ms", floor=rates.floor(5 * q.numel() * 2 + 2 * state.nbytes), target=target, peers=others)


def time_fla_prefill(q: Tensor, k: Tensor, v: Tensor, b: Tensor, state: Tensor, ends: Tensor) -> float:
    """flash-linear-attention's chunked kernel; its log-decays are given, ours are computed."""
    from fla.ops.kda import chunk_kda

    q, k, v = (x[None].contiguous() for x in (q, k, v))
    g, beta = -5 * torch.rand(q.shape, device="cuda"), torch.sigmoid(b.float())[None].bfloat16()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": ends}
    with torch.no_grad():
        return time_graph(lambda: chunk_kda(q, k, v, g, beta, **options), repeats=5)


def decode(rates: Rates, peers: bool) -> Iterator[Row]:
    for sequences, heads, target in ((64, 96, 1.1), (256, 96, 1.1), (1, 12, None), (32, 12, None)):
        c = heads * WIDTH
        fp32 = torch.float32
        state, conv = random(sequences, heads, WIDTH, WIDTH, dtype=fp32), random(sequences, 3, 3 * c)
        slots = torch.arange(sequences, device="cuda")
        rows = (random(sequences, 3 * c), random(sequences, c), random(sequences, heads), random(sequences, c))
        weights = (random(3 * c, 1, 4, dtype=fp32), random(heads, dtype=fp32), random(c, dtype=fp32), random(WIDTH, dtype=fp32))
        ours = time(lambda r=rows, w=weights, co=conv, s=state, i=slots: kda_step(*r, *w, co, s, i, i[:, None].contiguous(), -5.0, 1e-5))
        floor = rates.floor(2 * state.nbytes)
        goal = target * floor if target else {1: 0.005, 32: 0.016}[sequences]
        others = {"fla": time_fla_decode(rows[0], rows[2], state)} if peers else {}
        yield Row(work=f"KDA decode, {heads} heads, batch {sequences}", ours=ours, unit="ms", floor=floor, target=goal, peers=others)


def time_fla_decode(qkv: Tensor, b: Tensor, state: Tensor) -> float:
    """flash-linear-attention's recurrent kernel alone: no convolution, no gates, no output norm."""
    from fla.ops.kda import fused_recurrent_kda

    n, heads = b.shape
    q, k, v = (x.contiguous() for x in qkv.view(n, 1, 3, heads, WIDTH).unbind(2))
    g, beta = -5 * torch.rand(q.shape, device="cuda"), torch.sigmoid(b.float())[:, None].bfloat16()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.no_grad():
        return time_graph(
            lambda: fused_recurrent_kda(q, k, v, g, beta, **options), inner=1 if n * heads > 1000 else 20, flush=n * heads > 1000
        )


def random_experts(experts: int, inputs: int, outputs: int) -> PackedExperts:
    codes = torch.randint(0, 256, (experts, inputs // 64, outputs, 32), device="cuda", dtype=torch.uint8).view(torch.int16)
    scales = torch.randint(118 + 126, 122 + 126, (experts, inputs // 128, outputs, 4), device="cuda", dtype=torch.uint8)
    return PackedExperts(codes, scales.view(torch.int32)[..., 0])


def experts(rates: Rates, _peers: bool) -> Iterator[Row]:
    w13, w2 = random_experts(EXPERTS, LATENT, 2 * INNER), random_experts(EXPERTS, INNER, LATENT)
    for name, tokens, local, total, target in (
        ("experts, 896, 64 tokens", 64, 896, 896, 1.18),
        ("experts, 896, 1024 tokens", 1024, 896, 896, 1.4),
        ("experts, 896, 4096 tokens", 4096, 896, 896, 1.4),
        ("experts, 896, 8192 tokens", 8192, 896, 896, None),
        ("experts, 112 of 112 (EP8 rank), 64 tokens", 64, 112, 112, 1.4),
        ("experts, 14 of 896 (EP64 rank), 4096 tokens", 4096, 14, 896, 1.4),
    ):
        own13, own2 = (PackedExperts(w.codes[:local], w.scales[:local]) for w in (w13, w2))
        x = random(tokens, LATENT)
        ids = torch.rand(tokens, total, device="cuda").topk(TOP_K).indices.int()
        weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
        mine = ids[ids < local]
        moved = mine.unique().numel() * EXPERT_BYTES + 2 * x.nbytes + x.nbytes
        floor = rates.floor(moved, mine.numel() * 2 * 3 * LATENT * INNER)
        ours = time(lambda x=x, i=ids, w=weights, a=own13, b=own2, n=total: packed_experts(x, i, w, a, b, 0, n, 4.0, 25.0))
        yield Row(work=name, ours=ours, unit="ms", floor=floor, target=target * floor if target else 19.0)


def attention(rates: Rates, _peers: bool) -> Iterator[Row]:
    from kernels.mla_decode_triton import launch as mla_decode

    for sequences, length, heads, target in ((64, 1024, 96, 0.049), (1, 131072, 96, None), (64, 131072, 96, None), (64, 1024, 12, None)):
        pages = -(-length // 64)
        latents = random(sequences * pages, 64, 576)
        tables = torch.randperm(sequences * pages, device="cuda").view(sequences, pages)
        lengths, query = torch.full((sequences,), length, device="cuda"), random(sequences, heads, 576)
        floor = rates.floor(latents.nbytes, sequences * length * heads * 2 * (576 + 512))
        ours = time(lambda q=query, c=latents, t=tables, n=lengths: mla_decode(q, c, t, n, 512, 192**-0.5))
        work = f"MLA decode, {heads} heads, batch {sequences}, context {length}"
        yield Row(work=work, ours=ours, unit="ms", floor=floor, target=target or 1.3 * floor)


def attention_prefill(rates: Rates, _peers: bool) -> Iterator[Row]:
    """Causal, 8192 tokens, keys and values expanded. Peer: cuDNN through torch, whose keys must be laid out whole first (not timed)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tokens, heads, scale = 8192, 96, 192**-0.5
    query, expanded, shared = random(tokens, heads, 192), random(tokens, heads, 256), random(tokens, 64)
    ends = torch.tensor([0, tokens], device="cuda")
    floor = rates.floor(query.nbytes + expanded.nbytes, tokens * tokens * heads * (192 + 128))
    ours = time(lambda: mla_prefill_expanded(query, expanded, shared, ends, ends, 128, scale))
    key = torch.cat((expanded[..., :128], shared[:, None].expand(-1, heads, -1)), -1)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, expanded[..., 128:]))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = time(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
    yield Row(work="MLA prefill 8192, 96 heads", ours=ours, unit="ms", floor=floor, target=1.3 * 2.75, peers={"cuDNN": theirs})


def between(rates: Rates, _peers: bool) -> Iterator[Row]:
    from kernels.route_triton import launch as route
    from kernels.short_conv_triton import launch as short_conv

    for tokens in (64, 8192):
        blocks, run, added = random(8, tokens, HIDDEN), random(tokens, HIDDEN), random(tokens, HIDDEN)
        weights = (random(HIDDEN), random(1, HIDDEN), random(HIDDEN))
        ours = time(lambda b=blocks, r=run, a=added, w=weights: attn_res_norm(b, r, a, *w, 1e-5))
        floor = rates.floor(blocks.nbytes + 4 * run.nbytes)
        yield Row(work=f"attention residual, 9 sources, {tokens} tokens", ours=ours, unit="ms", floor=floor, target=1.3 * floor)
        logits, bias = random(tokens, EXPERTS, dtype=torch.float32), random(EXPERTS, dtype=torch.float32)
        floor = rates.floor(logits.nbytes)
        ours = time(lambda x=logits, b=bias: route(x, b, TOP_K, True, 1.0))
        yield Row(work=f"top 16 of 896, {tokens} tokens", ours=ours, unit="ms", floor=floor, target=1.5 * floor)
    x, taps, state = random(8192, 3 * 96 * WIDTH), random(3 * 96 * WIDTH, 1, 4, dtype=torch.float32), random(2, 3, 3 * 96 * WIDTH)
    slot, ends = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([0, 8192], device="cuda")
    floor = rates.floor(2 * x.nbytes)
    yield Row(
        work="short conv, 8192 tokens",
        ours=time(lambda: short_conv(x, taps, state, slot, slot, ends)),
        unit="ms",
        floor=floor,
        target=1.5 * floor,
    )
    pool = random(69, 3, 96, WIDTH, WIDTH, dtype=torch.float32)
    bundle = torch.empty(69, 96, WIDTH, WIDTH, device="cuda")
    floor = rates.floor(2 * bundle.nbytes)
    slot = pool[:, 1]
    for work, source, target in (("export", slot, bundle), ("import", bundle, slot)):
        ours = time(lambda a=source, b=target: copy_layers(a, b))
        theirs = time(lambda a=source, b=target: b.copy_(a))
        yield Row(work=f"{work} of one state, 69 layers", ours=ours, unit="ms", floor=floor, target=floor / 0.9, peers={"torch": theirs})


def one_row(rates: Rates, _peers: bool) -> Iterator[Row]:
    """The products of one decoded token, each over weights that are not in the L2."""
    for name, outputs, inputs in (
        ("KDA in", 49_376, HIDDEN),
        ("KDA out", HIDDEN, 12_288),
        ("latent down", LATENT, HIDDEN),
        ("dense up", 67_584, HIDDEN),
    ):
        weights = [random(outputs, inputs) for _ in range(4)]
        x, floor = random(1, inputs), rates.floor(weights[0].nbytes)
        ours = time(lambda x=x, w=weights: [linear(x, m) for m in w]) / 4
        theirs = time(lambda x=x, w=weights: [torch.nn.functional.linear(x, m) for m in w]) / 4
        yield Row(work=f"one row, {name}", ours=ours, unit="ms", floor=floor, target=theirs, peers={"cuBLAS": theirs})


PARTS: dict[str, Callable[[Rates, bool], Iterator[Row]]] = {
    "prefill": prefill,
    "decode": decode,
    "experts": experts,
    "attention": attention,
    "attention-prefill": attention_prefill,
    "between": between,
    "one-row": one_row,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all")
    parser.add_argument("--peers", help="a directory that holds fla")
    arguments = parser.parse_args()
    if arguments.peers:
        sys.path.insert(0, arguments.peers)
    try:
        import fla.ops.kda  # noqa: F401

        peers = True
    except ImportError:
        peers = False
    torch.manual_seed(0)
    rates = measure_rates()
    rows: list[Row] = []
    for part in arguments.parts or PARTS:
        for row in PARTS[part](rates, peers):
            print(f"{row.work}: {row.ours:.4g} ms, floor {row.floor:.4g}", flush=True)
            rows.append(row)
            torch.cuda.empty_cache()
    notes = f"copy {rates.copy / 1e9:.2f} TB/s (read + written), bf16 8192^3 {rates.matmul / 1e9:.0f} TFLOP/s"
    publish("-".join(("kernels", *arguments.parts)), rows, packages=("torch", "triton", "fla-core"), notes=notes)


if __name__ == "__main__":
    main()
