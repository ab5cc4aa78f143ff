"""The smaller kernels: attention residual with norm, routing, short convolution, MLA decode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import mla, moe, norms, short_conv
from kernels.attn_res_norm import attn_res_norm
from kernels.layers import copy_layers
from kernels.linear import linear
from kernels.testing import fenced, poisoned, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities that are masked
NAN, HUGE = float("nan"), 1e30


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, beyond: float = NAN) -> Tensor:
    return fenced(torch.randn(*shape, generator=generator, device=generator.device).to(dtype), beyond=beyond)


def check_attn_res(generator: torch.Generator, sources: int, tokens: int, width: int, add: bool, dtype: torch.dtype, limit: float) -> None:
    blocks, run = random(generator, sources, tokens, width, dtype=dtype), random(generator, tokens, width, dtype=dtype)
    added = random(generator, tokens, width, dtype=dtype) if add else None
    norm, query, out_norm = random(generator, width), random(generator, 1, width), random(generator, width)
    sums = [run.clone(), run.clone()]
    kernel = attn_res_norm(blocks, sums[0], added, norm, query, out_norm, 1e-5, backend="triton")
    assert relative_error(kernel, attn_res_norm(blocks, sums[1], added, norm, query, out_norm, 1e-5, backend="torch")) < limit
    assert torch.equal(*sums)


@pytest.mark.parametrize(("sources", "add"), [(0, True), (1, False), (3, True)])
def test_attn_res_norm(generator: torch.Generator, sources: int, add: bool) -> None:
    check_attn_res(generator, sources, tokens=3, width=48, add=add, dtype=torch.float32, limit=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 65])
def test_attn_res_norm_k3(generator: torch.Generator, tokens: int) -> None:
    check_attn_res(generator, 8, tokens, 7168, True, torch.bfloat16, 4e-3)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(3, 24, 4), (1, 16, 1), pytest.param(300, 896, 16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("renormalise", "beyond"), [(True, NAN), (False, HUGE)])
def test_route(generator: torch.Generator, tokens: int, experts: int, top_k: int, renormalise: bool, beyond: float) -> None:
    from kernels.route_triton import launch as route

    logits, bias = random(generator, tokens, experts, beyond=beyond), random(generator, experts, beyond=beyond)
    ids, weights = route(logits, bias, top_k, renormalise, 2.5)
    ids_ref, weights_ref = moe.route(logits, bias, top_k, renormalise, 2.5)
    assert torch.equal(ids, ids_ref)
    assert relative_error(weights, weights_ref) < 2e-6


@pytest.mark.parametrize(
    ("lengths", "channels"), [([1, 2, 3, 20], 20), ([17, 1], 8), pytest.param([1, 63, 0, 1000], 4608, marks=pytest.mark.gpu)]
)
def test_short_conv(generator: torch.Generator, lengths: list[int], channels: int) -> None:
    from kernels import short_conv_triton

    device, sequences = generator.device, len(lengths)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    x = random(generator, sum(lengths), channels + 5)[:, :channels]
    weight, state = random(generator, channels, 1, 4), random(generator, 2 * sequences, 3, channels)
    read, write = torch.arange(sequences, device=device) - 1, torch.arange(sequences, device=device) + sequences
    states = [state.clone(), state.clone()]
    y = short_conv_triton.launch(x, weight, states[0], read, write, ends)
    assert relative_error(y, short_conv.short_conv(x, weight, states[1], read, write, ends)) < 2e-6
    assert torch.equal(*states)


def check_mla(
    generator: torch.Generator, lengths: list[int], heads: int, value: int, rest: int, page: int, dtype: torch.dtype, beyond: float
) -> float:
    """`beyond` fills what no token has written: the rest of last pages, pages of nobody, what lies around the queries."""
    device = generator.device
    widest = max(1, *(-(-n // page) for n in lengths))
    latents = torch.full((len(lengths) * widest + 1, page, value + rest), beyond, dtype=dtype, device=device)
    order = torch.randperm(len(lengths) * widest, generator=generator, device=device) + 1
    tables = order.view(len(lengths), widest)
    for i, n in enumerate(lengths):
        for s in range(0, n, page):
            rows = min(page, n - s)
            latents[tables[i, s // page], :rows] = random(generator, rows, value + rest, dtype=dtype)
    from kernels.mla_decode_triton import launch as mla_decode

    query, at = random(generator, len(lengths), heads, value + rest, dtype=dtype, beyond=beyond), torch.tensor(lengths, device=device)
    result = mla_decode(query, latents, tables, at, value, 0.1)
    assert torch.equal(result, mla_decode(query, latents, tables, at, value, 0.1))
    assert relative_error(mla_decode(query, latents, tables, at, value, 0.1, splits=3), result) < 4e-3
    some = at > 0  # nothing to attend: the reference has no answer, the kernel says zeros
    assert not result[~some].any()
    return relative_error(result[some], mla.mla_decode(query[some].float(), latents.float(), tables[some], at[some], value, 0.1))


@pytest.mark.parametrize("beyond", [NAN, HUGE])
def test_mla_decode(generator: torch.Generator, beyond: float) -> None:
    assert check_mla(generator, [5, 0, 40, 1], heads=3, value=32, rest=16, page=16, dtype=torch.float32, beyond=beyond) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [NAN, HUGE])
@pytest.mark.parametrize("heads", [12, 96])
def test_mla_decode_k3(generator: torch.Generator, heads: int, beyond: float) -> None:
    assert check_mla(generator, [1, 0, 63, 64, 65, 1000, 4097], heads, 512, 64, 64, torch.bfloat16, beyond) < 4e-3


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "limit"),
    [(3, 48, torch.float32, 2e-6), pytest.param(65, 3584, torch.bfloat16, 4e-3, marks=pytest.mark.gpu)],
)
def test_rows(generator: torch.Generator, tokens: int, width: int, dtype: torch.dtype, limit: float) -> None:
    x, y = random(generator, tokens, 2 * width, dtype=dtype).chunk(2, -1)
    weight = random(generator, width)
    calls = (
        lambda backend: norms.rms_norm(x, weight, 1e-5, backend),
        lambda backend: norms.sigmoid_gate(x, 20 * y, backend),
        lambda backend: moe.situ(20 * x, y, 4.0, 25.0, backend),
        lambda backend: moe.situ(x, y, 4.0, None, backend),
    )
    for call in calls:
        assert relative_error(call("triton"), call("torch")) < limit


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "dtype", "limit"),
    [(3, 5, 16, torch.float32, 2e-6), pytest.param(65, 96, 128, torch.bfloat16, 4e-3, marks=pytest.mark.gpu)],
)
def test_gated_heads(generator: torch.Generator, tokens: int, heads: int, width: int, dtype: torch.dtype, limit: float) -> None:
    x, weight = random(generator, tokens, heads, width, dtype=dtype), random(generator, width)
    gate = random(generator, tokens, heads * width + 8, dtype=dtype)[:, 8:].unflatten(1, (heads, width))
    results = [norms.gated_rms_norm(x, gate, weight, 1e-5, backend) for backend in ("triton", "torch")]
    assert relative_error(*results) < limit


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "limit"),
    [(7, 48, torch.float32, 2e-6), pytest.param(3584, 7168, torch.bfloat16, 4e-3, marks=pytest.mark.gpu)],
)
def test_one_row(generator: torch.Generator, outputs: int, inputs: int, dtype: torch.dtype, limit: float) -> None:
    x, weight = random(generator, 1, inputs, dtype=dtype), random(generator, outputs, inputs, dtype=dtype)
    assert relative_error(linear(x, weight, "triton"), x.double() @ weight.double().T) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_layers(generator: torch.Generator, dtype: torch.dtype) -> None:
    pool = torch.randn(3, 4, 5, 7, generator=generator, device=generator.device).to(dtype)
    before, out = pool.clone(), poisoned(3, 5, 7, dtype=dtype, device=generator.device)
    copy_layers(pool[:, 1], out, "triton")
    assert torch.equal(out, before[:, 1])
    copy_layers(out, pool[:, 3], "triton")
    copy_layers(pool[:, 2], pool[:, 0], "triton")
    assert torch.equal(pool, before[:, [2, 1, 2, 1]])
    with pytest.raises(ValueError, match="contiguous layers"):
        copy_layers(pool[:, 1].transpose(1, 2), out.transpose(1, 2), "triton")
