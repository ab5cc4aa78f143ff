from __future__ import annotations

import pytest

from engine.cache import CacheManager, Lease
from engine.errors import InvariantBroken
from engine.lineage import Lineage, root
from engine.plan import Copy
from engine.prefix import Checkpoint, Match


def lineage(count: int = 20) -> Lineage:
    return Lineage(root("", ""), 4, range(count))


def cache(num_pages: int = 10, num_slots: int = 4) -> CacheManager:
    return CacheManager(num_pages=num_pages, num_slots=num_slots, page_size=4)


def cold(manager: CacheManager, tokens: int) -> Lease:
    lease = manager.acquire(Match(), tokens=tokens, reserved=0)
    assert lease is not None
    assert manager.extend(lease, tokens) >= tokens
    return lease


def cached(manager: CacheManager, position: int, interval: bool = False) -> Checkpoint:
    """Leaves a checkpoint of `lineage()` and nothing else."""
    lease = cold(manager, position)
    taken = manager.reserve(lease, position, interval=interval)
    assert taken is not None
    manager.commit(taken, lineage())
    manager.release(lease)
    manager.check()
    found = manager.match(lineage(), position).checkpoint
    assert found is not None
    return found


def test_a_cold_lease_takes_a_slot_and_pages_as_it_grows() -> None:
    manager = cache()
    lease = manager.acquire(Match(), tokens=9, reserved=0)
    assert lease is not None
    assert (lease.start, lease.copies, lease.pages) == (0, (), [])
    assert [manager.extend(lease, tokens) for tokens in (1, 4, 5, 9)] == [4, 4, 8, 12]
    assert (manager.pages.free, manager.slots.free) == (7, 3)
    manager.check()
    manager.release(lease)
    assert manager.idle
    assert (manager.pages.free, manager.slots.free) == (10, 4)
    manager.check()


def test_a_hit_inside_a_page_copies_state_and_tail() -> None:
    manager = cache()
    source = cached(manager, 6)
    lease = manager.acquire(manager.match(lineage(), 15), tokens=16, reserved=0)
    assert lease is not None
    assert lease.start == 6
    assert lease.pages[0] == source.pages[0]
    assert lease.pages[1] != source.pages[1]
    assert lease.copies == (
        Copy(kind="slot", src=source.slot, dst=lease.slot),
        Copy(kind="page", src=source.pages[1], dst=lease.pages[1]),
    )
    manager.check()


def test_a_hit_at_a_boundary_copies_the_state_only() -> None:
    manager = cache()
    source = cached(manager, 8)
    lease = manager.acquire(manager.match(lineage(), 15), tokens=16, reserved=0)
    assert lease is not None
    assert (lease.start, lease.pages) == (8, list(source.pages))
    assert lease.copies == (Copy(kind="slot", src=source.slot, dst=lease.slot),)


def test_a_checkpoint_is_invisible_until_it_is_committed() -> None:
    manager = cache()
    lease = cold(manager, 8)
    taken = manager.reserve(lease, 8, interval=False)
    assert taken is not None
    assert manager.match(lineage(), 8).checkpoint is None
    manager.release(lease)  # the row may end before the result comes
    manager.check()
    assert not manager.idle
    manager.commit(taken, lineage())
    assert manager.match(lineage(), 8).checkpoint is not None
    assert manager.idle
    manager.check()


def test_a_donated_lease_becomes_a_checkpoint_without_a_copy() -> None:
    manager = cache()
    lease = cold(manager, 12)
    taken = manager.donate(lease, 6, interval=False)
    manager.check()
    assert (taken.slot, taken.pages) == (lease.slot, tuple(lease.pages[:2]))
    assert manager.pages.free == 8  # the third page went back
    manager.commit(taken, lineage())
    manager.check()
    with pytest.raises(InvariantBroken, match="ended twice"):
        manager.release(lease)


def test_the_second_checkpoint_of_one_prefix_is_given_back() -> None:
    manager = cache()
    leases = [cold(manager, 8), cold(manager, 8)]
    taken = [manager.reserve(lease, 8, interval=False) for lease in leases]
    for one in taken:
        assert one is not None
        manager.commit(one, lineage())
        manager.check()
    assert len(manager.index) == 1
    assert manager.slots.free == 1


def test_room_is_made_by_evicting_least_recently_used() -> None:
    manager = cache(num_pages=6, num_slots=3)
    cached(manager, 8)
    cached(manager, 4)
    lease = cold(manager, 16)  # four pages; three are free
    assert manager.match(lineage(), 8).checkpoint is not None
    assert manager.match(lineage(), 8).checkpoint.position == 4  # type: ignore[union-attr]
    assert manager.levels()["evictions"] == 1
    manager.check()
    assert manager.extend(lease, 100) == 24  # as far as there is room
    assert len(manager.index) == 0


def test_what_is_hit_is_not_evicted_for_its_own_hit() -> None:
    manager = cache(num_pages=10, num_slots=2)
    cached(manager, 6)
    blocker = cold(manager, 4)
    match = manager.match(lineage(), 15)
    assert manager.acquire(match, tokens=16, reserved=0) is None  # no second slot while the source is in use
    assert match.checkpoint is not None
    assert match.checkpoint.pins == 0
    assert len(manager.index) == 1
    manager.release(blocker)
    lease = manager.acquire(match, tokens=16, reserved=0)
    assert lease is not None
    assert lease.start == 6
    manager.check()


def test_a_pool_too_small_for_a_copy_begins_anew() -> None:
    manager = cache(num_pages=2, num_slots=2)
    cached(manager, 6)
    lease = manager.acquire(manager.match(lineage(), 7), tokens=8, reserved=0)
    assert lease is not None
    assert lease.start == 0
    assert manager.extend(lease, 8) == 8
    assert len(manager.index) == 0
    manager.check()


def test_promised_pages_are_not_given_away() -> None:
    manager = cache(num_pages=4)
    cached(manager, 8)
    assert manager.acquire(Match(), tokens=16, reserved=1) is None
    assert len(manager.index) == 1  # refused before anything was evicted
    hit = manager.acquire(manager.match(lineage(), 15), tokens=12, reserved=1)
    assert hit is not None
    shared = manager.acquire(manager.match(lineage(), 15), tokens=12, reserved=1)
    assert shared is not None  # the two pages are leased already: only the third counts
    manager.check()


def test_no_slot_to_be_had_means_no_checkpoint() -> None:
    manager = cache(num_slots=1)
    lease = cold(manager, 8)
    assert manager.reserve(lease, 8, interval=False) is None
    manager.check()


def test_restoring_an_unwritten_slot_raises() -> None:
    manager = cache()
    slot = manager.slots.take()
    forged = Match(Checkpoint(b"", 4, slot, tuple(manager.pages.take(1)), False))
    with pytest.raises(InvariantBroken, match="holds no state to restore"):
        manager.acquire(forged, tokens=8, reserved=0)


def test_each_owner_ends_once() -> None:
    manager = cache()
    lease = cold(manager, 8)
    taken = manager.reserve(lease, 8, interval=False)
    assert taken is not None
    manager.release(lease)
    with pytest.raises(InvariantBroken, match="ended twice"):
        manager.release(lease)
    manager.discard(taken)
    with pytest.raises(InvariantBroken, match="discarded twice"):
        manager.discard(taken)
    with pytest.raises(InvariantBroken, match="committed twice"):
        manager.commit(taken, lineage())
    manager.check()


def test_check_finds_a_lost_page() -> None:
    manager = cache()
    lease = cold(manager, 8)
    lease.pages.pop()
    with pytest.raises(InvariantBroken, match="leases counted and booked differ"):
        manager.check()


def test_switched_off_it_finds_nothing() -> None:
    manager = CacheManager(num_pages=4, num_slots=2, page_size=4, enabled=False)
    assert manager.match(lineage(), 8) == Match()
