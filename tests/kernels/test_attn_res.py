"""The attention residual against its definition, one token at a time."""

from __future__ import annotations

import pytest
import torch

from kernels.attn_res import attn_res


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 3), (1, 1), (4, 5), (2, 0)])
def test_mix(blocks: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    d = 24
    sealed = 3 * torch.randn(blocks, tokens, d, generator=generator)
    run = torch.randn(tokens, d, generator=generator)
    norm, query = torch.randn(d, generator=generator), torch.randn(1, d, generator=generator)
    found = attn_res(sealed, run, norm, query, 1e-5)
    for t in range(tokens):
        sources = [*sealed[:, t].double(), run[t].double()]
        scores = torch.stack([(s / (s.square().mean() + 1e-5).sqrt() * norm.double()) @ query[0].double() for s in sources])
        expected = sum(a * s for a, s in zip(torch.softmax(scores, 0), sources, strict=True))
        torch.testing.assert_close(found[t].double(), expected, atol=1e-5, rtol=1e-5)
    assert found.shape == (tokens, d)


def test_a_single_source_is_itself() -> None:
    run = torch.randn(2, 8, dtype=torch.bfloat16)
    found = attn_res(run.new_empty(0, 2, 8), run, torch.ones(8), torch.ones(1, 8), 1e-5)
    assert torch.equal(found, run)


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"blocks: shape \[1, 3, 8\], expected \[\*, 2, 8\]"):
        attn_res(torch.zeros(1, 3, 8), torch.zeros(2, 8), torch.ones(8), torch.ones(1, 8), 1e-5)
