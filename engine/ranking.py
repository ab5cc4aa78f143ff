"""Who goes first and who gives way. Pure functions over the running rows (by rank, best first) and the waiting requests.

Rank is (priority, arrival): it decides who may displace whom, so that the best ranked always gets on. Between requests that
could use the same tokens of a step, the tenant that was served least goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine.fairness import ServedTokens
from engine.generation import Generation, Status


def by_turn(candidates: Iterable[Generation], served: ServedTokens) -> list[Generation]:
    """Priority, then the tenant's served tokens, then those that run, then arrival."""
    return sorted(candidates, key=lambda g: (g.request.priority, served[g.request.tenant], g.status is Status.WAITING, g.arrival))


def gives_way_to_row(running: Sequence[Generation], g: Generation, fresh: Collection[Generation]) -> Generation | None:
    """For a running row that needs pages: a paused row, else the worst behind it. Rows admitted in this step are left alone."""
    paused = _paused(running, g)
    if paused is not None:
        return paused
    for other in reversed(running):
        if other is g:
            return None
        if other not in fresh:
            return other
    return None


def gives_way_to_arrival(running: Sequence[Generation], g: Generation, fresh: Collection[Generation]) -> Generation | None:
    """For a waiting request that needs a row, a slot or pages: a paused row, else the worst of a lower priority."""
    paused = _paused(running, g)
    if paused is not None:
        return paused
    worst = next((other for other in reversed(running) if other not in fresh), None)
    return worst if worst is not None and worst.request.priority > g.request.priority else None


def row_within_reach(running: Sequence[Generation], waiting: Iterable[Generation], max_running: int) -> bool:
    """Whether some waiting request could get a row: cheap to ask in every step."""
    if len(running) < max_running or any(g.paused for g in running):
        return True
    return running[-1].request.priority > min(g.request.priority for g in waiting)


def _paused(running: Sequence[Generation], g: Generation) -> Generation | None:
    return next((other for other in reversed(running) if other.paused and other is not g), None)
