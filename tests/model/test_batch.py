"""A step as tensors: pages, rounds of pieces and the checkpoints between them."""

from __future__ import annotations

import pytest

from model.batch import Segment, build_batch


def test_places_tables_and_lengths() -> None:
    batch = build_batch([Segment([5], 9, 3, [7, 2]), Segment([1, 2, 3], 7, 4, [9, 1, 8], logits=range(1, 3))], [4, 0], 8, "cpu")
    assert batch.counts == (4, 0)
    assert batch.num_decode == 1
    assert batch.ids.tolist() == [5, 1, 2, 3]
    assert batch.lengths.tolist() == [10, 10]
    assert batch.page_tables.tolist() == [[7, 2], [9, 1]]
    assert batch.latent_places.tolist() == [2 * 8 + 1, 9 * 8 + 7, 1 * 8, 1 * 8 + 1]
    assert batch.prefill_cu_seqlens.tolist() == [0, 3]
    assert batch.logits.tolist() == [2, 3]


def test_without_checkpoints_there_is_one_round() -> None:
    batch = build_batch([Segment([5], 9, 3, [0, 1]), Segment([1, 2], 0, 4, [2])], [3], 8, "cpu")
    (only,) = batch.rounds
    assert only.tokens is None
    assert (only.num_decode, only.cu_seqlens.tolist()) == (1, [0, 1, 3])
    assert only.read_slots.tolist() == [3, -1]  # a row at its start reads nothing
    assert only.write_slots.tolist() == [3, 4]
    assert only.copy_to is None


def test_checkpoints_cut_rows_into_rounds() -> None:
    """Row A: [10, 13) [13, 14) [14, 16); row B: [0, 4) whole, its checkpoint at the end."""
    a = Segment([0] * 6, 10, 1, [0, 1], ((14, 21), (13, 20)))
    b = Segment([0] * 4, 0, 2, [2], ((4, 22),))
    first, second, third = build_batch([a, b], [10], 8, "cpu").rounds
    assert first.tokens is not None
    assert first.tokens.tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert (first.read_slots.tolist(), first.write_slots.tolist()) == ([1, -1], [20, 2])
    assert first.copy_from is not None
    assert first.copy_to is not None
    assert (first.copy_from.tolist(), first.copy_to.tolist()) == ([2], [22])
    assert second.tokens is not None
    assert (second.tokens.tolist(), second.num_decode) == ([3], 1)
    assert (second.read_slots.tolist(), second.write_slots.tolist()) == ([20], [21])
    assert third.tokens is not None
    assert third.tokens.tolist() == [4, 5]
    assert (third.read_slots.tolist(), third.write_slots.tolist()) == ([21], [1])


def test_one_token_pieces_lead_their_round() -> None:
    a = Segment([0] * 3, 0, 1, [0], ((2, 20),))
    b = Segment([0] * 3, 5, 2, [1], ((6, 21),))
    first, second = build_batch([a, b], [6], 8, "cpu").rounds
    assert first.tokens is not None
    assert second.tokens is not None
    assert (first.num_decode, first.tokens.tolist(), first.read_slots.tolist()) == (1, [3, 0, 1], [2, -1])
    assert (second.num_decode, second.tokens.tolist(), second.read_slots.tolist()) == (1, [2, 4, 5], [20, 21])


def test_nothing_is_a_legal_batch() -> None:
    batch = build_batch([], [0, 5], 8, "cpu")
    assert (batch.num_tokens, batch.rounds, batch.page_tables.shape) == (0, (), (0, 0))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment([1, 2], 7, 0, [3]), r"tokens \[7, 9\) of the row in slot 0 with 1 pages of 8"),
        (Segment([], 7, 0, [3]), r"tokens \[7, 7\)"),
        (Segment([1, 2], 4, 5, [3], ((4, 9),)), r"checkpoint at 4 outside of tokens \(4, 6\] of the row in slot 5"),
        (Segment([1, 2], 4, 5, [3], ((7, 9),)), r"checkpoint at 7 outside"),
    ],
)
def test_broken_contract(segment: Segment, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch([segment], [len(segment.tokens)], 8, "cpu")


def test_order_is_demanded() -> None:
    with pytest.raises(ValueError, match="one token must come first"):
        build_batch([Segment([1, 2], 0, 0, [0]), Segment([1], 0, 1, [1])], [3], 8, "cpu")
