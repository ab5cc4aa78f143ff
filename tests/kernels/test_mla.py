"""Paged latent attention against plain softmax attention over gathered latents; memory past a sequence is poison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.mla import mla_decode, mla_prefill

HEADS, D, VALUE, PAGE, SCALE = 3, 20, 14, 8, 0.3


def pool(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """-> latents [pages, PAGE, D] (NaN where nothing was written), page_tables, each sequence's latents."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    latents = torch.full((len(order), PAGE, D), float("nan"))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    sequences = []
    for i, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[sum(counts[:i]) : sum(counts[:i]) + count]
        tables[i, :count] = pages
        sequence = torch.randn(n, D, generator=generator)
        for p in range(n):
            latents[pages[p // PAGE], p % PAGE] = sequence[p]
        sequences.append(sequence)
    return latents, tables, sequences


def by_hand(query: Tensor, sequence: Tensor) -> Tensor:
    """query [heads, D] at the sequence's last position."""
    p = torch.softmax(query.double() @ sequence.double().T * SCALE, -1)
    return p @ sequence[:, :VALUE].double()


def test_decode() -> None:
    lengths = [1, 8, 9, 30]
    latents, tables, sequences = pool(lengths)
    query = torch.randn(4, HEADS, D, generator=torch.Generator().manual_seed(1))
    found = mla_decode(query, latents, tables, torch.tensor(lengths), VALUE, SCALE)
    for i, sequence in enumerate(sequences):
        torch.testing.assert_close(found[i].double(), by_hand(query[i], sequence), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [3, 256])
def test_prefill(block: int) -> None:
    lengths, news = [5, 30, 17, 8], [5, 13, 1, 2]
    latents, tables, sequences = pool(lengths)
    query = torch.randn(sum(news), HEADS, D, generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 5, 18, 19, 21])
    found = mla_prefill(query, latents, tables, bounds, torch.tensor(lengths), VALUE, SCALE, block)
    for i, (sequence, n) in enumerate(zip(sequences, news, strict=True)):
        for j in range(n):
            seen = sequence[: lengths[i] - n + j + 1]
            expected = by_hand(query[bounds[i] + j], seen)
            torch.testing.assert_close(found[bounds[i] + j].double(), expected, atol=1e-5, rtol=1e-5)


def test_misfits_are_named() -> None:
    latents, tables, _ = pool([3])
    with pytest.raises(ValueError, match=r"latents: shape \[4, 8, 20\], expected \[\*, \*, 21\]"):
        mla_decode(torch.zeros(1, HEADS, D + 1), latents, tables, torch.tensor([3]), VALUE, SCALE)
