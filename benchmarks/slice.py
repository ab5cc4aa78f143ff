"""A few full-width layers of K3 on one GPU, as a shard runs them: decode as replayed graphs, prefill and resume as steps.

    python -m benchmarks.slice                       # 4 layers, 896 experts: 54 GiB of random weights, made in place
    python -m benchmarks.slice --experts 112         # the experts of one EP8 rank

Layers 0 … 3 of the released model: KDA + dense feed-forward, twice KDA + MoE, MLA + MoE. Floor: bytes over the measured copy rate or
operations over the measured bf16 rate, whichever is longer. Peers: vLLM 0.33 on the same slice and kind of GPU, as recorded in its own run
(docs/log.md says how); not measured beside ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.kernels import Rates, measure_rates
from benchmarks.report import Row, publish
from kernels.testing import time_graph
from model.batch import Batch, Segment, build_batch
from model.config import ModelConfig
from model.kda import KDA
from model.kimi_k3 import KimiK3, Layer
from model.moe import LatentMoE
from model.parallel import Mesh
from model.released import K3
from model.state import StatePools

PAGE = 64
EXPERT_BYTES = 17_547_264
DECODE = {1: 1.94, 16: 6.10, 64: 13.80, 256: 24.73}  # batch → vLLM's graph of four layers, ms
DECODE_112 = {1: 1.95, 16: 3.79, 64: 4.89, 256: 10.26}
PREFILL = {1024: 45.1, 4096: 117.0, 8192: 215.4}  # tokens → vLLM's wall to the first token, ms
PREFILL_112 = {1024: 29.4, 4096: 96.8, 8192: 192.4}
RESUME = {128: 32.6, 384: 60.0}  # new tokens behind 32,640 cached ones
CACHED = 32_640
VLLM = "vLLM (recorded)"


def build(experts: int, layers: int) -> KimiK3:
    """Random weights of the sizes that trained ones have, on the GPU; routing spreads like that of real traffic."""
    kda = tuple(layer for layer in K3.kda_layers if layer < layers)
    config = dataclasses.replace(K3, num_layers=layers, kda_layers=kda, num_experts=experts)
    model = KimiK3(config, Mesh.single(), torch.bfloat16)
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        value = _draw(name, parameter)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
    for module in model.modules():
        if isinstance(module, LatentMoE):
            module.pack()
    return model.eval()


def _draw(name: str, like: Tensor) -> Tensor:
    if like.dtype == torch.uint8:
        low, high = (118, 122) if name.endswith("scale") else (0, 256)
        return torch.randint(low, high, like.shape, dtype=torch.uint8, device="cuda")
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(like.shape, dtype=like.dtype, device="cuda")
    noise = torch.randn(like.shape, dtype=like.dtype, device="cuda")
    if name.endswith("dt_bias"):
        return noise * 1.5 - 3
    if name.endswith("conv1d.weight"):
        return noise * 0.4 + 0.3
    if "norm" in name:
        return torch.ones_like(noise)
    return noise if "embed_tokens" in name or name.endswith("A_log") else noise * like.shape[-1] ** -0.5


def pools_for(config: ModelConfig, sequences: int, tokens: int) -> StatePools:
    pools = StatePools.allocate(
        config,
        tp_size=1,
        page_size=PAGE,
        num_pages=sequences * -(-tokens // PAGE),
        num_slots=sequences,
        device="cuda",
        dtype=torch.bfloat16,
    )
    pools.latents.normal_()
    pools.kda.normal_().mul_(0.1)
    pools.conv.normal_()
    return pools


def batch_of(sequences: int, context: int, new: int, *, logits: bool = False) -> Batch:
    """Each sequence has `context` tokens and gets `new` more."""
    pages = -(-(context + new) // PAGE)
    order = torch.randperm(sequences * pages).view(sequences, pages).tolist()
    segments = [
        Segment(
            tokens=torch.randint(0, K3.vocab_size, (new,)).tolist(),
            start=context,
            slot=i,
            pages=order[i],
            logits=range(new - 1, new) if logits else range(0),
        )
        for i in range(sequences)
    ]
    return build_batch(segments, [sequences * new], PAGE, "cuda")


def weights_of(model: nn.Module, experts_hit: int) -> tuple[float, float]:
    """Bytes read once, values that every token is multiplied with: without embedding and head; of the experts those that were hit."""
    elsewhere = ("embed_tokens", "lm_head")
    dense = [p for name, p in model.named_parameters() if not name.startswith(elsewhere) and not name.endswith(("codes", "scales"))]
    return sum(p.nbytes for p in dense) + experts_hit * EXPERT_BYTES, float(sum(p.numel() for p in dense if p.ndim == 2))


def routed(model: KimiK3, batch: Batch, pools: StatePools) -> int:
    """Distinct experts that this batch hits, summed over the layers."""
    seen: list[int] = []
    gates = [m.gate for m in model.modules() if isinstance(m, LatentMoE)]
    hooks = [gate.register_forward_hook(lambda _m, _i, out: seen.append(out[0].unique().numel())) for gate in gates]
    model(batch, pools)
    for hook in hooks:
        hook.remove()
    return sum(seen)


def decode(model: KimiK3, rates: Rates, context: int, peers: dict[int, float]) -> Iterator[Row]:
    for sequences in DECODE:
        pools, batch = pools_for(model.config, sequences, context + 1), batch_of(sequences, context, 1)
        hit = routed(model, batch, pools)
        moved, _ = weights_of(model, hit)
        latents = sequences * context * model.config.latent_dim * 2 * len(model.config.mla_layers)
        floor = rates.floor(moved + 2 * pools.kda.nbytes + latents)
        ours = time_graph(lambda b=batch, p=pools: model(b, p), flush=False)
        print(f"batch {sequences}: {hit} experts hit, {ours:.3f} ms, floor {floor:.3f}", flush=True)
        yield Row(
            work=f"decode, batch {sequences}, context {context}",
            ours=ours,
            unit="ms",
            floor=floor,
            target=0.85 * peers[sequences] if sequences > 1 else peers[sequences],
            peers={VLLM: peers[sequences]} if context == 1024 else {},
        )


def parts(model: KimiK3, sequences: int, context: int) -> Iterator[Row]:
    """One decode step by sub-layer, each a graph of its own."""
    pools, batch = pools_for(model.config, sequences, context + 1), batch_of(sequences, context, 1)
    x = torch.randn(sequences, K3.hidden_size, device="cuda").bfloat16()
    works: dict[str, Callable[[], object]] = {}
    for layer in model.layers:
        assert isinstance(layer, Layer)
        kind = "KDA" if isinstance(layer.self_attn, KDA) else "MLA"
        works.setdefault(f"{kind} attention", lambda at=layer: at.attend(x, batch, pools))
        works.setdefault("MoE" if hasattr(layer, "block_sparse_moe") else "dense FFN", lambda at=layer: at.feed_forward(x, batch))
    for name, work in works.items():
        yield Row(work=f"{name}, batch {sequences}", ours=time_graph(work), unit="ms")


def prefill(model: KimiK3, rates: Rates, peers: dict[int, float]) -> Iterator[Row]:
    """Steps from the host: batch built, layers and head run, the token there."""
    for tokens in PREFILL:
        pools = pools_for(model.config, 1, tokens)
        hit = routed(model, batch_of(1, 0, tokens), pools)
        moved, dense = weights_of(model, hit)
        c = model.config
        routed_values = len(c.moe_layers) * c.num_experts_per_token * 3 * c.routed_expert_hidden_size * c.moe_intermediate_size
        attention = len(c.mla_layers) * tokens * c.mla_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
        floor = rates.floor(moved, tokens * (2 * (dense + routed_values) + attention))
        ours = _wall(lambda n=tokens, p=pools: model(batch_of(1, 0, n, logits=True), p))
        print(f"prefill {tokens}: {ours:.1f} ms, floor {floor:.1f}", flush=True)
        yield Row(work=f"prefill {tokens}", ours=ours, unit="ms", floor=floor, target=0.65 * peers[tokens], peers={VLLM: peers[tokens]})


def resume(model: KimiK3) -> Iterator[Row]:
    """New tokens behind a long history whose state is there."""
    pools = pools_for(model.config, 1, CACHED + max(RESUME))
    for new, theirs in RESUME.items():
        ours = _wall(lambda n=new: model(batch_of(1, CACHED, n, logits=True), pools))
        yield Row(work=f"{new} tokens behind {CACHED}", ours=ours, unit="ms", target=theirs, peers={VLLM: theirs})


def _wall(step: Callable[[], Tensor], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step().argmax(-1).cpu()
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times[2:])[len(times[2:]) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    rates = measure_rates()
    few = args.experts != K3.num_experts
    with torch.inference_mode():
        model = build(args.experts, args.layers)
        torch.cuda.empty_cache()
        rows = [*decode(model, rates, 1024, DECODE_112 if few else DECODE), *parts(model, 64, 1024)]
        rows += prefill(model, rates, PREFILL_112 if few else PREFILL)
        rows += [] if few else resume(model)
    publish(
        f"slice-{args.experts}" if few else "slice",
        rows,
        packages=("torch", "triton"),
        notes=f"{args.layers} layers, {args.experts} experts; copy {rates.copy / 1e9:.2f} TB/s, bf16 {rates.matmul / 1e9:.0f} TFLOP/s",
    )


if __name__ == "__main__":
    main()
