from __future__ import annotations

from engine.fairness import ServedTokens
from engine.generation import Generation, Status
from engine.lineage import Lineage, root
from engine.ranking import by_turn, gives_way_to_arrival, gives_way_to_row, row_within_reach
from tests.engine.driver import request


def generation(arrival: int, priority: int = 0, *, paused: bool = False, tenant: str = "", runs: bool = True) -> Generation:
    r = request(f"r{arrival}", [1], priority=priority, tenant=tenant)
    g = Generation(r, Lineage(root("", ""), 4, r.prompt), arrival, 4, False)
    g.paused = paused
    g.status = Status.RUNNING if runs else Status.WAITING
    return g


def test_a_row_displaces_the_worst_behind_it_only() -> None:
    first, middle, last = running = [generation(0), generation(1), generation(2)]
    assert gives_way_to_row(running, first, []) is last
    assert gives_way_to_row(running, middle, []) is last
    assert gives_way_to_row(running, last, []) is None
    assert gives_way_to_row(running, first, [last]) is middle
    assert gives_way_to_row(running, middle, [last]) is None


def test_a_paused_row_gives_way_to_anybody() -> None:
    paused, other = running = [generation(0, priority=-5, paused=True), generation(1)]
    assert gives_way_to_row(running, other, []) is paused
    assert gives_way_to_arrival(running, generation(2, priority=9, runs=False), []) is paused


def test_an_arrival_displaces_lower_priorities_only() -> None:
    same, lower = running = [generation(0, 1), generation(1, 2)]
    assert gives_way_to_arrival(running, generation(2, 1, runs=False), []) is lower
    assert gives_way_to_arrival(running, generation(2, 2, runs=False), []) is None
    assert gives_way_to_arrival(running, generation(2, 1, runs=False), [lower]) is None
    assert gives_way_to_arrival(running, generation(2, 0, runs=False), [lower]) is same


def test_a_row_is_within_reach_when_one_is_free_or_gives_way() -> None:
    running = [generation(0, 1), generation(1, 2)]
    assert row_within_reach(running, [generation(2, 9)], 3)
    assert not row_within_reach(running, [generation(2, 2)], 2)
    assert row_within_reach(running, [generation(2, 2), generation(3, 1)], 2)
    assert row_within_reach([generation(0, paused=True)], [generation(2, 9)], 1)


def test_turns_go_by_priority_served_tokens_running_arrival() -> None:
    served = ServedTokens()
    for tenant in ("much", "little"):
        served.enter(tenant)
    served.charge("much", 10)
    waits = generation(0, tenant="little", runs=False)
    runs = generation(3, tenant="little")
    much = generation(1, tenant="much")
    urgent = generation(4, -1, tenant="much", runs=False)
    later = generation(5, tenant="little", runs=False)
    assert by_turn([much, later, waits, runs, urgent], served) == [urgent, runs, waits, later, much]
