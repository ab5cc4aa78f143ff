"""The short convolution against sums written out, across cuts and slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.short_conv import short_conv


def by_hand(x: Tensor, weight: Tensor, past: Tensor) -> Tensor:
    """silu of the sum over taps; the last tap is the current token."""
    width = weight.shape[-1]
    everything = torch.cat((past, x))
    out = torch.stack([sum(weight[:, 0, n] * everything[t + n] for n in range(width)) for t in range(len(x))])
    return out * torch.sigmoid(out)


@pytest.mark.parametrize("width", [2, 4, 5])
def test_ragged_over_slots(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, channels = [1, 7, 2, 3], 10
    x = torch.randn(sum(lengths), channels, generator=generator)
    weight = torch.randn(channels, 1, width, generator=generator)
    state = torch.full((8, width - 1, channels), float("nan"))
    state[:3] = torch.randn(3, width - 1, channels, generator=generator)
    before = state.clone()
    bounds = torch.tensor([0, 1, 8, 10, 13])
    reads, writes = torch.tensor([0, 1, -1, 2]), torch.tensor([0, 5, 4, 1])
    found = short_conv(x, weight, state, reads, writes, bounds)
    for i, n in enumerate(lengths):
        part = x[bounds[i] : bounds[i] + n]
        past = before[reads[i]] if reads[i] >= 0 else torch.zeros(width - 1, channels)
        torch.testing.assert_close(found[bounds[i] : bounds[i] + n], by_hand(part, weight, past))
        assert torch.equal(state[writes[i]], torch.cat((past, part))[-(width - 1) :])
    assert torch.equal(state[2], before[2])
    assert state[3].isnan().all()


def test_one_token_each() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 10, generator=generator), torch.randn(10, 1, 4, generator=generator)
    state = torch.randn(5, 3, 10, generator=generator)
    before = state.clone()
    found = short_conv(x, weight, state, torch.tensor([4, -1, 0]), torch.tensor([4, 1, 2]), torch.arange(4))
    for i, past in enumerate((before[4], torch.zeros(3, 10), before[0])):
        torch.testing.assert_close(found[i : i + 1], by_hand(x[i : i + 1], weight, past))
        assert torch.equal(state[(4, 1, 2)[i]], torch.cat((past, x[i : i + 1]))[1:])
    assert torch.equal(state[[0, 3]], before[[0, 3]])


def test_no_sequences() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert short_conv(torch.zeros(0, 4), torch.zeros(4, 1, 4), torch.zeros(1, 3, 4), none, none, torch.tensor([0])).shape == (0, 4)


def test_misfits_are_named() -> None:
    slot = torch.tensor([0])
    with pytest.raises(ValueError, match=r"state: shape \[1, 4, 4\], expected \[\*, 3, 4\]"):
        short_conv(torch.zeros(2, 4), torch.zeros(4, 1, 4), torch.zeros(1, 4, 4), slot, slot, torch.tensor([0, 2]))
