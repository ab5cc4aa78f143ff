from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.experts import pack_experts, packed_experts
from kernels.moe import grouped_experts
from kernels.testing import fenced, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for overflow inside sigmoid


def inputs(
    generator: torch.Generator, tokens: int, top_k: int, total: int, local: int, width: int, inner: int, dtype: torch.dtype
) -> dict[str, Any]:
    device = generator.device

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=torch.uint8)

    scores = torch.rand(tokens, total, generator=generator, device=device)
    ids = scores.topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator, device=device)
    return {
        "x": fenced(torch.randn(tokens, width, generator=generator, device=device).to(dtype)),
        "ids": ids,
        "weights": weights / weights.sum(1, keepdim=True),
        "w13_packed": random_bytes(0, 256, local, 2 * inner, width // 2),
        "w13_scale": random_bytes(118, 123, local, 2 * inner, width // 32),
        "w2_packed": random_bytes(0, 256, local, width, inner // 2),
        "w2_scale": random_bytes(118, 123, local, width, inner // 32),
        "first_expert": total - local,
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def run(args: dict[str, Any], total: int, **options: Any) -> Tensor:
    from kernels.experts_triton import launch

    w13, w2 = pack_experts(args["w13_packed"], args["w13_scale"], True), pack_experts(args["w2_packed"], args["w2_scale"], False)
    plain = (args["x"], args["ids"], args["weights"], w13, w2, args["first_expert"], total, args["beta"], args["linear_beta"])
    return launch(*plain, **options) if options else packed_experts(*plain)


def exact(args: dict[str, Any]) -> Tensor:
    return grouped_experts(**{**args, "x": args["x"].double()})


@pytest.mark.parametrize(("tokens", "top_k", "total", "local"), [(5, 2, 4, 4), (19, 3, 6, 4), (1, 1, 3, 2)])
def test_equals_reference(generator: torch.Generator, tokens: int, top_k: int, total: int, local: int) -> None:
    from kernels.experts_triton import Tile

    args = inputs(generator, tokens, top_k, total, local, width=128, inner=128, dtype=torch.float32)
    assert relative_error(run(args, total, tile=Tile(16, 16 if tokens > 16 else 0, (128, 2, 4), (128, 2, 4))), exact(args)) < 4e-6


def test_without_a_limit_and_with_more_pairs_than_a_tile(generator: torch.Generator) -> None:
    from kernels.experts_triton import Tile

    args = {**inputs(generator, 21, 2, 3, 3, width=128, inner=128, dtype=torch.float32), "linear_beta": None}
    assert relative_error(run(args, 3, tile=Tile(16, 0, (64, 2, 4), (128, 2, 4))), exact(args)) < 4e-6


def test_nobody_chose_a_local_expert(generator: torch.Generator) -> None:
    args = inputs(generator, 3, 1, 4, 2, width=128, inner=128, dtype=torch.float32)
    args["ids"].fill_(0)
    assert torch.equal(run(args, 4), torch.zeros(3, 128, device=generator.device))


def test_no_tokens(generator: torch.Generator) -> None:
    assert run(inputs(generator, 0, 1, 4, 2, width=128, inner=128, dtype=torch.float32), 4).shape == (0, 128)


def test_refuses_scales_out_of_range(generator: torch.Generator) -> None:
    args = inputs(generator, 1, 1, 1, 1, width=128, inner=128, dtype=torch.float32)
    args["w13_scale"][0, 3, 1] = 129
    with pytest.raises(ValueError, match="scale: byte 129, expected at most 128"):
        pack_experts(args["w13_packed"], args["w13_scale"], True)


def test_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    args = inputs(generator, 2, 1, 2, 2, width=128, inner=128, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x: shape \[2, 64\], expected \[\*, 128\]"):
        run({**args, "x": args["x"][:, :64]}, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 200, 700])
def test_k3_shapes(generator: torch.Generator, tokens: int) -> None:
    args = inputs(generator, tokens, 16, 64, 48, width=3584, inner=3072, dtype=torch.bfloat16)
    result = run(args, 64)
    assert relative_error(result, exact(args)) < 6e-3
    assert torch.equal(result, run(args, 64))


@pytest.mark.gpu
def test_portable_expansion_is_bit_equal(generator: torch.Generator) -> None:
    args = inputs(generator, 40, 4, 8, 8, width=128, inner=128, dtype=torch.bfloat16)
    assert torch.equal(run(args, 8, ptx=True), run(args, 8, ptx=False))
