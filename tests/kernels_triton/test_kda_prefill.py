from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.kda_prefill import kda_prefill
from kernels.testing import fenced, poisoned, relative_error

# Overflow is part of the arithmetic (sigmoid of huge arguments, products above the diagonal that are masked); numpy warns, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def inputs(generator: torch.Generator, lengths: list[int], heads: int, width: int, dtype: torch.dtype, slots: int = 0) -> dict[str, Any]:
    """Fresh random inputs; q, k, v are slices of one wide tensor as the conv leaves them."""
    device, tokens, sequences = generator.device, sum(lengths), len(lengths)
    slots = slots or 2 * sequences + 1

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return fenced(torch.randn(*shape, generator=generator, device=device).to(dtype))

    qkv = random(tokens, 3, heads, width, dtype=dtype)
    order = torch.randperm(slots, generator=generator, device=device)
    return {
        "q": qkv[:, 0],
        "k": qkv[:, 1],
        "v": qkv[:, 2],
        "f": random(tokens, heads * width, dtype=dtype),
        "b": random(tokens, heads, dtype=dtype),
        "a_log": random(heads),
        "dt_bias": random(heads * width),
        "state": random(slots, heads, width, width),
        "read_slots": order[:sequences].clone(),
        "write_slots": order[sequences : 2 * sequences].clone(),
        "cu_seqlens": torch.tensor([0, *accumulate(lengths)], device=device),
        "lower_bound": -5.0,
    }


def run(args: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """o and the state pool; the given pool stays as it was."""
    own = {**args, "state": args["state"].clone()}
    return kda_prefill(**own, **options), own["state"]


def exact(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The reference in fp32 on the same values."""
    return run({k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in args.items()}, backend="torch")


@pytest.mark.parametrize("lengths", [[1], [31], [32], [33], [70, 0, 1, 64]])
@pytest.mark.parametrize("segment", [0, 32])
def test_equals_reference(generator: torch.Generator, lengths: list[int], segment: int) -> None:
    args = inputs(generator, lengths, heads=2, width=16, dtype=torch.float32)
    args["read_slots"][0] = -1
    (o, state), (o_ref, state_ref) = run(args, segment=segment, backend="triton"), exact(args)
    assert relative_error(o, o_ref) < 1e-5
    assert relative_error(state, state_ref) < 1e-5


def test_in_place_and_empty_sequences_keep_their_state_bit_exactly(generator: torch.Generator) -> None:
    args = inputs(generator, [0, 40, 0], heads=1, width=16, dtype=torch.float32)
    args["write_slots"] = args["read_slots"].clone()
    state = run(args, segment=0, backend="triton")[1]
    empty = args["read_slots"][[0, 2]]
    assert torch.equal(state[empty], args["state"][empty])
    assert relative_error(state, exact(args)[1]) < 1e-5


@pytest.mark.parametrize("f", [-1e4, 1e4])
def test_extreme_gates_and_equal_keys(generator: torch.Generator, f: float) -> None:
    """g -> 0 with the same key 64 times: the triangular system at its worst. g -> -5: exponents at their largest."""
    args = inputs(generator, [64], heads=1, width=16, dtype=torch.float32)
    args["f"].fill_(f)
    args["k"].copy_(args["k"][:1].expand_as(args["k"]).clone())
    args["b"].fill_(20.0)
    (o, state), (o_ref, state_ref) = run(args, backend="triton"), exact(args)
    assert relative_error(o, o_ref) < 1e-4
    assert relative_error(state, state_ref) < 1e-4


@pytest.mark.gpu  # the interpreter multiplies bf16 as if they were integers
def test_bf16_error_is_the_rounding_of_its_products(generator: torch.Generator) -> None:
    args = inputs(generator, [90], heads=1, width=16, dtype=torch.bfloat16)
    (o, state), (o_ref, state_ref) = run(args, backend="triton"), exact(args)
    assert relative_error(o, o_ref) < 6e-3
    assert relative_error(state, state_ref) < 6e-3


def test_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    args = inputs(generator, [5], heads=2, width=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="lower_bound: -6"):
        kda_prefill(**{**args, "lower_bound": -6.0}, backend="triton")
    with pytest.raises(ValueError, match="segment: 40 tokens"):
        kda_prefill(**args, segment=40, backend="triton")
    with pytest.raises(ValueError, match=r"b: shape \[5, 2\], expected \[5, 3\]|b: shape \[5, 1\], expected \[5, 2\]"):
        kda_prefill(**{**args, "b": args["b"][:, :1]}, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "heads"), [([0, 1, 63, 64, 65, 1000], 96), ([1300, 547, 2048, 963], 96), ([5000], 12)])
@pytest.mark.parametrize("segment", [0, 512])
def test_k3_shapes(generator: torch.Generator, lengths: list[int], heads: int, segment: int) -> None:
    args = inputs(generator, lengths, heads, 128, torch.bfloat16)
    (o, state), (o_ref, state_ref) = run(args, segment=segment, backend="triton"), exact(args)
    assert relative_error(o, o_ref) < 5e-3
    assert relative_error(state, state_ref) < 4e-3
    again = run(args, segment=segment, backend="triton")
    assert torch.equal(o, again[0])
    assert torch.equal(state, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("f", [-1e4, 1e4])
def test_k3_shapes_extreme_gates(generator: torch.Generator, f: float) -> None:
    args = inputs(generator, [200], 4, 128, torch.bfloat16)
    args["f"].fill_(f)
    args["k"].copy_(args["k"][:1].expand_as(args["k"]).clone())
    (o, state), (o_ref, state_ref) = run(args, backend="triton"), exact(args)
    assert relative_error(o, o_ref) < 2e-2
    assert relative_error(state, state_ref) < 2e-2


def test_poison_shows() -> None:
    assert relative_error(poisoned(3, dtype=torch.float32, device="cpu"), torch.ones(3)) == float("inf")
