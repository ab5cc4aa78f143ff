"""SiTU, routing and the grouped experts against loops."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.moe import grouped_experts, route, situ
from kernels.mxfp4 import dequantise


@pytest.mark.parametrize("linear_beta", [25.0, 2.0, None])
def test_situ(linear_beta: float | None) -> None:
    gate, up = torch.tensor([-30.0, -1.0, 0.0, 2.0, 30.0]), torch.tensor([3.0, -100.0, 5.0, 1.0, 60.0])
    expected = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        right = u if linear_beta is None else linear_beta * math.tanh(u / linear_beta)
        expected.append(4 * math.tanh(g / 4) / (1 + math.exp(-g)) * right)
    torch.testing.assert_close(situ(gate, up, 4.0, linear_beta), torch.tensor(expected))


def test_selection_by_bias_weights_without() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    ids, weights = route(logits, torch.tensor([5.0, 0.0, 0.0, -5.0]), 2, True, 2.5)
    assert sorted(ids[0].tolist()) == [0, 2]
    scores = torch.sigmoid(logits[0])[ids[0].long()]
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.5)
    torch.testing.assert_close(route(logits, torch.zeros(4), 1, False, 1.0)[1], torch.sigmoid(logits[:, 3:]))


@pytest.mark.parametrize(("first", "local"), [(0, 6), (2, 3), (5, 1)])
@pytest.mark.parametrize("tokens", [1, 9, 0])
@pytest.mark.parametrize("block_elements", [1, 1 << 22])
def test_local_experts(first: int, local: int, tokens: int, block_elements: int) -> None:
    """Only the local experts' part, whether one expert is decoded at a time or all at once."""
    generator = torch.Generator().manual_seed(0)
    d, f, experts, k = 64, 32, 6, 2
    w13, w2 = (torch.randint(0, 256, s, generator=generator, dtype=torch.uint8) for s in ((experts, 2 * f, d // 2), (experts, d, f // 2)))
    s13 = torch.randint(120, 126, (experts, 2 * f, d // 32), generator=generator, dtype=torch.uint8)
    s2 = torch.randint(120, 126, (experts, d, f // 32), generator=generator, dtype=torch.uint8)
    x = torch.randn(tokens, d, generator=generator)
    ids = (
        torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]).int() if tokens else torch.empty(0, k).int()
    )
    weights = torch.rand(tokens, k, generator=generator)
    mine = slice(first, first + local)
    found = grouped_experts(x, ids, weights, w13[mine], s13[mine], w2[mine], s2[mine], first, 4.0, 25.0, block_elements)
    expected = torch.zeros(tokens, d)
    for t in range(tokens):
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            if first <= e < first + local:
                gate, up = (dequantise(w13[e], s13[e]) @ x[t]).chunk(2)
                expected[t] += w * (dequantise(w2[e], s2[e]) @ situ(gate, up, 4.0, 25.0))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_misfits_are_named() -> None:
    x, ids, weights = torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3)
    packed = torch.zeros(1, 64, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"ids: shape \[2, 2\], expected \[2, 3\]"):
        grouped_experts(x, ids, weights, packed, packed, packed, packed, 0, 4.0, 25.0)
