"""MLA prefill with expanded keys and values, against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.mla import mla_prefill_expanded
from kernels.testing import fenced, relative_error

NAN, HUGE = float("nan"), 1e30


def error(
    generator: torch.Generator, runs: list[tuple[int, int]], heads: int, nope: int, rest: int, dtype: torch.dtype, beyond: float
) -> float:
    """`runs`: (new tokens, positions with them) of each sequence. What lies around the inputs is `beyond`."""
    device = generator.device

    def random(*shape: int) -> torch.Tensor:
        return fenced(torch.randn(*shape, generator=generator, device=device).to(dtype), beyond=beyond)

    queries = torch.tensor([0, *(n for n, _ in runs)], device=device).cumsum(0)
    keys = torch.tensor([0, *(n for _, n in runs)], device=device).cumsum(0)
    tokens, positions = int(queries[-1]), int(keys[-1])
    query, expanded = random(tokens, heads, nope + rest), random(positions, heads, 2 * nope)
    shared = random(positions, rest + 16)[:, :rest]  # rows apart, as in the latents
    given = (queries, keys, nope, 0.1)
    result = mla_prefill_expanded(query, expanded, shared, *given, backend="triton")
    assert torch.equal(result, mla_prefill_expanded(query, expanded, shared, *given, backend="triton"))
    return relative_error(result, mla_prefill_expanded(query.double(), expanded.double(), shared.double(), *given, backend="torch"))


@pytest.mark.parametrize("beyond", [NAN, HUGE])
def test_small(generator: torch.Generator, beyond: float) -> None:
    runs = [(1, 1), (5, 9), (0, 3), (130, 200), (64, 64), (0, 0)]
    assert error(generator, runs, heads=2, nope=32, rest=16, dtype=torch.float32, beyond=beyond) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [NAN, HUGE])
@pytest.mark.parametrize("heads", [12, 96])
def test_k3(generator: torch.Generator, heads: int, beyond: float) -> None:
    runs = [(1, 1), (63, 63), (64, 1000), (0, 77), (65, 4161), (1000, 1000), (129, 130)]
    assert error(generator, runs, heads, 128, 64, torch.bfloat16, beyond) < 4e-3
