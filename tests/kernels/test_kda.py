"""The two forms of Kimi Delta Attention against each other and against the recurrence written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.kda import kda_chunk, kda_gate, kda_recurrent

Kernel = Callable[..., Tensor]
HEADS, K, V = 3, 12, 20


def inputs(lengths: list[int], strength: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and bounds of ragged sequences; `strength` scales the decays (5: as strong as K3's bound allows)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k = (torch.randn(tokens, HEADS, K, generator=generator) for _ in range(2))
    v = torch.randn(tokens, HEADS, V, generator=generator)
    g = -strength * torch.rand(tokens, HEADS, K, generator=generator)
    beta = torch.rand(tokens, HEADS, generator=generator)
    bounds = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    return q, k, v, g, beta, bounds


def by_hand(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, one token and head at a time, float64."""
    q, k, v, g, beta, s = (x.double() for x in (q, k, v, g, beta, s))
    out = torch.empty_like(v)
    for t in range(len(q)):
        for h in range(HEADS):
            key = k[t, h] / (k[t, h].square().sum() + 1e-6).sqrt()
            query = q[t, h] / (q[t, h].square().sum() + 1e-6).sqrt() / K**0.5
            decayed = s[h] * g[t, h].exp()[:, None]
            s[h] = decayed + beta[t, h] * torch.outer(key, v[t, h] - key @ decayed)
            out[t, h] = query @ s[h]
    return out, s


@pytest.mark.parametrize("kernel", [kda_recurrent, kda_chunk])
@pytest.mark.parametrize(
    ("lengths", "strength"), [([1], 1.0), ([64], 1.0), ([65, 1, 63], 0.01), ([17, 130, 16, 1, 100], 5.0), ([200], 5.0)], ids=str
)
def test_against_the_recurrence(kernel: Kernel, lengths: list[int], strength: float) -> None:
    q, k, v, g, beta, bounds = inputs(lengths, strength)
    n = len(lengths)
    pool = torch.full((2 * n + 1, HEADS, K, V), float("nan"))
    pool[:n] = torch.randn(n, HEADS, K, V, generator=torch.Generator().manual_seed(1))
    before = pool.clone()
    reads = torch.arange(n)
    reads[-1] = -1  # the last sequence begins from zeros
    found = kernel(q, k, v, g, beta, pool, reads, torch.arange(n, 2 * n), bounds)
    for i in range(n):
        part = slice(int(bounds[i]), int(bounds[i + 1]))
        start = torch.zeros(HEADS, K, V) if reads[i] < 0 else before[i]
        out, state = by_hand(q[part], k[part], v[part], g[part], beta[part], start)
        torch.testing.assert_close(found[part].double(), out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(pool[n + i].double(), state, atol=2e-5, rtol=1e-4)
    assert torch.equal(pool[:n], before[:n])
    assert pool[2 * n].isnan().all()


@pytest.mark.parametrize("kernel", [kda_recurrent, kda_chunk])
def test_in_place_and_across_calls(kernel: Kernel) -> None:
    """A sequence in two calls over its own slot is the sequence in one; slots may also be handed on crosswise."""
    q, k, v, g, beta, bounds = inputs([90, 40])
    pool = torch.zeros(2, HEADS, K, V)
    slots = torch.tensor([0, 1])
    whole = kernel(q, k, v, g, beta, pool, torch.tensor([-1, -1]), slots, bounds)
    parts = torch.zeros(2, HEADS, K, V)
    cuts = [torch.cat((torch.arange(0, 70), torch.arange(90, 95))), torch.cat((torch.arange(70, 90), torch.arange(95, 130)))]
    first = kernel(*(x[cuts[0]] for x in (q, k, v, g, beta)), parts, torch.tensor([-1, -1]), slots.flip(0), torch.tensor([0, 70, 75]))
    second = kernel(*(x[cuts[1]] for x in (q, k, v, g, beta)), parts, slots.flip(0), slots, torch.tensor([0, 20, 55]))
    torch.testing.assert_close(first, whole[cuts[0]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(second, whole[cuts[1]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts, pool, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", [kda_recurrent, kda_chunk])
def test_no_sequences(kernel: Kernel) -> None:
    q, k, v, g, beta, bounds = inputs([])
    none = torch.empty(0, dtype=torch.int64)
    assert kernel(q, k, v, g, beta, torch.zeros(1, HEADS, K, V), none, none, bounds).shape == (0, HEADS, V)


def test_gate_is_bounded() -> None:
    f = torch.tensor([[-200.0, 0.0, 200.0, 1.0]])
    g = kda_gate(f, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0, 0.0, -1.0]), -5.0)
    expected = torch.tensor([[[0.0, -5 * torch.sigmoid(torch.tensor(2.0))], [-5.0, -2.5]]])
    torch.testing.assert_close(g, expected)


def test_misfits_are_named() -> None:
    q, k, v, g, beta, bounds = inputs([4])
    pool, slot = torch.zeros(1, HEADS, K, V), torch.tensor([0])
    with pytest.raises(ValueError, match=r"state: shape \[1, 3, 20, 12\], expected \[\*, 3, 12, 20\]"):
        kda_chunk(q, k, v, g, beta, pool.transpose(2, 3), slot, slot, bounds)
    with pytest.raises(ValueError, match=r"state: torch.bfloat16, expected torch.float32"):
        kda_recurrent(q, k, v, g, beta, pool.bfloat16(), slot, slot, bounds)
    with pytest.raises(ValueError, match=r"read_slots: shape \[2\], expected \[1\]"):
        kda_chunk(q, k, v, g, beta, pool, torch.tensor([0, 0]), slot, bounds)
