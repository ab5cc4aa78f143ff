from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.kda_step import kda_step
from kernels.testing import fenced, poisoned, relative_error

# Overflow is part of the arithmetic (sigmoid of huge arguments, products above the diagonal that are masked); numpy warns, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def inputs(
    generator: torch.Generator, sequences: int, steps: int, heads: int, width: int, slots: int, dtype: torch.dtype, extra: int = 0
) -> dict[str, Any]:
    """Fresh random inputs; rows carry `extra` further columns, as slices of a wider projection do."""
    device = generator.device

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def rows(columns: int) -> Tensor:
        wide = poisoned(sequences * steps, columns + extra, dtype=dtype, device=device)
        wide[:, :columns] = random(sequences * steps, columns, dtype=dtype)
        return wide[:, :columns]

    c = heads * width
    order = torch.randperm(slots, generator=generator, device=device)
    return {
        "qkv": rows(3 * c),
        "f": rows(c),
        "b": rows(heads),
        "gate": rows(c),
        "conv_weight": fenced(random(3 * c, 1, 4)),
        "a_log": fenced(random(heads)),
        "dt_bias": fenced(random(c)),
        "norm_weight": fenced(random(width)),
        "conv_state": random(slots, 3, 3 * c, dtype=dtype),
        "state": random(slots, heads, width, width),
        "read_slots": order[:sequences].clone(),
        "write_slots": order[: sequences * steps].view(steps, sequences).T.contiguous(),
        "lower_bound": -5.0,
        "eps": 1e-5,
    }


def both(args: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(kernel's, reference's in the same precision) y, state, conv_state."""
    results = []
    for backend in ("triton", "torch"):
        own = {**args, "state": fenced(args["state"]), "conv_state": fenced(args["conv_state"])}
        y = kda_step(**own, backend=backend)
        results.append([y, own["state"], own["conv_state"]])
    return results[0], results[1]


@pytest.mark.parametrize(("sequences", "steps", "heads", "width"), [(1, 1, 2, 16), (3, 1, 2, 32), (2, 3, 1, 16)])
def test_equals_reference(generator: torch.Generator, sequences: int, steps: int, heads: int, width: int) -> None:
    args = inputs(generator, sequences, steps, heads, width, slots=sequences * steps + 2, dtype=torch.float32, extra=16)
    kernel, reference = both(args)
    for name, a, b in zip(("y", "state", "conv_state"), kernel, reference, strict=True):
        assert relative_error(a, b) < 2e-6, name


def test_fresh_sequences_unkept_tokens_and_other_slots(generator: torch.Generator) -> None:
    args = inputs(generator, 2, 2, 2, 16, slots=6, dtype=torch.bfloat16)
    args["read_slots"][0] = -1
    args["write_slots"][1, 0] = -1
    untouched = [s for s in range(6) if s not in args["write_slots"].flatten().tolist()]
    before = args["state"][untouched].clone()
    kernel, reference = both(args)
    assert relative_error(kernel[0], reference[0]) < 8e-3  # both round y to bf16 once
    assert relative_error(kernel[1], reference[1]) < 2e-6
    assert torch.equal(kernel[2], reference[2])
    assert torch.equal(kernel[1][untouched], before)


@pytest.mark.parametrize("f", [-1e4, 1e4])
def test_extreme_gates(generator: torch.Generator, f: float) -> None:
    """g -> 0 keeps the state, g -> -5 all but clears it."""
    args = inputs(generator, 2, 1, 1, 16, slots=4, dtype=torch.float32)
    args["f"].fill_(f)
    kernel, reference = both(args)
    assert relative_error(kernel[0], reference[0]) < 2e-6
    assert relative_error(kernel[1], reference[1]) < 2e-6


def test_no_sequences(generator: torch.Generator) -> None:
    args = inputs(generator, 0, 1, 2, 16, slots=2, dtype=torch.float32)
    assert kda_step(**args, backend="triton").shape == (0, 32)


def test_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    args = inputs(generator, 1, 1, 2, 16, slots=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"gate: shape \[1, 31\], expected \[1, 32\]"):
        kda_step(**{**args, "gate": args["gate"][:, :31]})
    with pytest.raises(ValueError, match="float64, expected"):
        kda_step(**{**args, "state": args["state"].double()})
    with pytest.raises(ValueError, match="backend: 'cuda'"):
        kda_step(**args, backend="cuda")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(("sequences", "steps", "heads"), [(1, 1, 12), (33, 1, 96), (8, 4, 12)])
def test_k3_shapes(generator: torch.Generator, sequences: int, steps: int, heads: int) -> None:
    args = inputs(generator, sequences, steps, heads, 128, slots=sequences * steps + 3, dtype=torch.bfloat16, extra=128)
    kernel, reference = both(args)
    again, _ = both(args)
    assert relative_error(kernel[0], reference[0]) < 4e-3
    assert relative_error(kernel[1], reference[1]) < 2e-6
    assert all(torch.equal(a, b) for a, b in zip(kernel, again, strict=True))
