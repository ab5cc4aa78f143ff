from __future__ import annotations

import pytest

from engine.errors import InvariantBroken
from engine.pages import Pages


def test_a_page_is_free_when_nobody_keeps_it() -> None:
    pages = Pages(4)
    mine = pages.take(2)
    pages.hold(mine)  # a checkpoint
    pages.lease(mine)  # a second row
    assert (pages.free, pages.unleased, pages.leased(mine)) == (2, 2, 2)
    pages.unlease(mine)
    pages.unlease(mine)
    assert (pages.free, pages.unleased, pages.leased(mine)) == (2, 4, 0)
    pages.check([], [mine])
    pages.lease(mine)  # a hit on what only the checkpoint keeps
    pages.unhold(mine)
    assert (pages.free, pages.unleased) == (2, 2)
    pages.unlease(mine)
    assert (pages.free, pages.unleased) == (4, 4)
    pages.check([], [])


def test_ids_are_distinct_and_come_back() -> None:
    pages = Pages(3)
    assert sorted(pages.take(3)) == [0, 1, 2]
    pages.unlease([1])
    assert pages.take(1) == [1]
    assert pages.take(0) == []


def test_misuse_is_found_at_once() -> None:
    pages = Pages(2)
    with pytest.raises(InvariantBroken, match="3 pages asked for, 2 are free"):
        pages.take(3)
    (page,) = pages.take(1)
    with pytest.raises(InvariantBroken, match="no checkpoint keeps it"):
        pages.unhold([page])
    with pytest.raises(InvariantBroken, match="is free and cannot be shared"):
        pages.lease([1 - page])
    with pytest.raises(InvariantBroken, match="is free and cannot be cached"):
        pages.hold([1 - page])
    pages.unlease([page])
    with pytest.raises(InvariantBroken, match="has no lease"):
        pages.unlease([page])


def test_check_finds_a_leak_and_a_stranger() -> None:
    pages = Pages(3)
    mine = pages.take(1)
    pages.check([mine], [])
    with pytest.raises(InvariantBroken, match="leases counted and booked differ"):
        pages.check([], [])
    with pytest.raises(InvariantBroken, match="checkpoints counted and booked differ"):
        pages.check([mine], [mine])
