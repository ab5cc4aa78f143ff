from __future__ import annotations

from engine.lineage import Lineage, root
from engine.prefix import Checkpoint, PrefixIndex

B = 4


def lineage(ids: range | list[int], tenant: str = "") -> Lineage:
    return Lineage(root("fp", tenant), B, ids)


def checkpoint(source: Lineage, position: int, interval: bool = False) -> Checkpoint:
    return Checkpoint(source.at(position), position, slot=position, pages=(), interval=interval)


def filled(*positions: int, source: Lineage | None = None) -> tuple[PrefixIndex, Lineage]:
    index, source = PrefixIndex(B, 100), source or lineage(range(20))
    for position in positions:
        assert index.insert(checkpoint(source, position), source)
    index.check()
    return index, source


def found(index: PrefixIndex, source: Lineage, limit: int) -> int:
    match = index.match(source, limit)
    return match.checkpoint.position if match.checkpoint else 0


def test_the_longest_one_within_the_limit_is_found() -> None:
    index, source = filled(3, 6, 7, 8, 15)
    assert [found(index, source, limit) for limit in (0, 2, 3, 5, 6, 7, 8, 14, 15, 20)] == [0, 0, 3, 3, 6, 7, 8, 8, 15, 15]


def test_only_a_common_beginning_is_found() -> None:
    index, _ = filled(3, 6, 9)
    assert found(index, lineage([*range(7), 99, 99, 99]), 9) == 6
    assert found(index, lineage([0, 1, 99, 3, 4, 5, 6]), 6) == 0
    assert found(index, lineage(range(20), tenant="other"), 20) == 0


def test_a_second_one_of_the_same_lineage_is_refused() -> None:
    index, source = filled(6)
    assert not index.insert(checkpoint(source, 6), source)
    assert len(index) == 1
    index.check()


def test_least_recently_used_goes_first_and_intervals_before_all() -> None:
    index, source = filled(3, 6)
    for position in (5, 9):
        index.insert(checkpoint(source, position, interval=True), source)
    used = index.match(source, 3).checkpoint
    assert used is not None
    index.touch(used)
    hit = index.match(source, 5).checkpoint
    assert hit is not None
    index.touch(hit)  # an interval that was hit is as good as the others
    gone = [index.evict() for _ in range(5)]
    assert [c.position if c else None for c in gone] == [9, 6, 3, 5, None]
    index.check()


def test_pinned_ones_stay() -> None:
    index, source = filled(3, 6)
    first = index.match(source, 3).checkpoint
    assert first is not None
    first.pins += 1
    gone = [index.evict(), index.evict()]
    assert [c.position if c else None for c in gone] == [6, None]
    first.pins -= 1
    assert index.evict() is first


def test_an_evicted_one_is_remembered_until_it_comes_back() -> None:
    index, source = filled(6)
    assert not index.match(source, 10).evicted
    index.evict()
    index.check()
    assert index.match(source, 10).evicted
    assert not index.match(source, 5).evicted
    index.insert(checkpoint(source, 6), source)
    index.check()
    assert not index.match(source, 10).evicted


def test_memory_is_bounded() -> None:
    index = PrefixIndex(B, 10)
    for i in range(50):
        one = lineage(range(i * 100, i * 100 + 20))
        index.sight(one, 20)
        index.insert(checkpoint(one, 19), one)
        index.evict()
        index.check()
    remembered = [i for i in range(50) if index.match(lineage(range(i * 100, i * 100 + 20)), 19).evicted]
    assert remembered == list(range(40, 50))
    seen = [i for i in range(50) if index.sight(lineage(range(i * 100, i * 100 + 20)), 20)]
    assert seen == [] or seen == [49]  # one prompt has six entries of the ten


def test_expected_ones_are_told_apart_from_those_that_are_there() -> None:
    index, source = filled(3)
    index.expect(source, 9)
    index.check()
    key = source.at(9)
    match = index.match(source, 15)
    assert match.checkpoint is not None
    assert (match.checkpoint.position, match.expected) == (3, key)
    assert index.match(source, 8).expected is None
    assert (index.is_expected(key), index.is_there(key), index.has(key)) == (True, False, True)
    index.insert(checkpoint(source, 9), source)
    assert (index.is_expected(key), index.is_there(key)) == (False, True)
    index.withdraw(key)
    index.check()
    assert found(index, source, 15) == 9


def test_withdrawn_ones_leave_nothing() -> None:
    index, source = filled()
    index.expect(source, 9)
    index.withdraw(source.at(9))
    index.withdraw(source.at(9))
    index.check()
    assert not index.has(source.at(9))
    assert index.match(source, 15).expected is None


def test_a_boundary_shared_with_a_different_prompt_is_a_junction() -> None:
    index = PrefixIndex(B, 100)
    one, other = lineage(range(20)), lineage([*range(10), 99, 99, 99])
    assert not index.sight(one, 20)
    assert index.junction(one, 20, 0) == 0
    assert index.sight(other, 13)
    assert index.junction(one, 20, 0) == 8
    assert index.junction(other, 13, 0) == 8
    assert index.junction(other, 13, 8) == 0  # resumed there
    assert index.junction(other, 13, 7) == 8


def test_the_same_prompt_again_is_no_junction() -> None:
    index = PrefixIndex(B, 100)
    for expected in (False, True, True):
        assert index.sight(lineage(range(20)), 20) is expected
    assert index.junction(lineage(range(20)), 20, 0) == 0


def test_a_junction_lies_before_the_last_token() -> None:
    index = PrefixIndex(B, 100)
    index.sight(lineage(range(20)), 20)
    index.sight(lineage(range(8)), 8)
    assert index.junction(lineage(range(8)), 8, 0) == 4


def test_prompts_shorter_than_a_block_are_seen_by_their_end() -> None:
    index = PrefixIndex(B, 100)
    assert [index.sight(lineage([1, 2]), 2), index.sight(lineage([1, 3]), 2), index.sight(lineage([5, 3]), 2)] == [False, True, False]
