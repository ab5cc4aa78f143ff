"""What the shards were told about rows: which ids are taken, which were dropped, and how a row and its steps are put to them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache import Taken
from engine.errors import InvariantBroken
from engine.generation import Generation
from engine.plan import NewRow, Output, RowStep


class Rows:
    """Row ids of one group. An id is free again at once: the plan that gives it to somebody else drops it first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._count = count
        self._told: set[int] = set()  # rows that the shards keep
        self._dropped: list[int] = []

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)
        if row in self._told:
            self._told.remove(row)
            self._dropped.append(row)

    def dropped(self) -> tuple[int, ...]:
        """Rows to drop in the plan being made; the next call returns later ones only."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def introduce(self, g: Generation, page_size: int) -> NewRow:
        """Tells the shards of an admitted row, with the pages that hold what it resumes from."""
        lease = g.lease
        assert lease is not None
        self._told.add(g.row)
        g.told_pages = -(-lease.start // page_size)
        return NewRow(
            row=g.row,
            tokens=g.request.prompt + tuple(g.lineage.ids[g.prompt_len :]),
            prompt_len=g.prompt_len,
            slot=lease.slot,
            pages=tuple(lease.pages[: g.told_pages]),
            sampling=g.request.sampling,
            choice=g.request.choice,
            constraint=g.request.constraint,
            constraint_from=g.prompt_len,
        )

    def step(self, g: Generation, count: int, taken: Sequence[Taken]) -> RowStep:
        """The next `count` tokens of a row, with the pages it got since its last step. Samples when it consumes the last token there is."""
        lease = g.lease
        assert lease is not None
        new_pages: tuple[int, ...] = ()
        if g.told_pages < len(lease.pages):
            new_pages = tuple(lease.pages[g.told_pages :])
            g.told_pages = len(lease.pages)
        start = g.submitted
        return RowStep(
            row=g.row,
            start=start,
            count=count,
            new_pages=new_pages,
            checkpoints=tuple([(t.position, t.slot) for t in taken]) if taken else (),
            output=Output.SAMPLE if start + count == len(g.lineage.ids) + g.pending else Output.NONE,
            prompt_logprobs=g.prompt_logprobs is not None and start < g.prompt_len - 1,
        )

    def check(self, running: list[Generation]) -> None:
        rows = [g.row for g in running]
        if sorted(rows + self._free) != list(range(self._count)):
            raise InvariantBroken(f"rows: {sorted(rows)} run and {sorted(self._free)} are free of {self._count}")
        if self._told != set(rows):
            raise InvariantBroken(f"rows: the shards keep {sorted(self._told)}, {sorted(rows)} run")
