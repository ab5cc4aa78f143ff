"""The checkpoints of running rows: announced at admission, taken when a step passes them, visible when its result is applied.

An announced checkpoint keeps others from computing the same prefix twice: they wait for it as long as its writer gets on.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache import CacheManager, Taken
from engine.errors import InvariantBroken
from engine.generation import Generation, Status
from engine.lineage import Lineage
from engine.marks import Mark, marks, next_interval
from engine.stats import Counters
from engine.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint of a request is visible: it may be pinned and exported until it is evicted."""

    request: GenerateRequest
    lineage: Lineage  # of the request; may have grown past `position`
    position: int
    ended: bool  # the request's last state; otherwise one on its way


class Retention:
    def __init__(self, cache: CacheManager, interval: int, decode_interval: int, counters: Counters) -> None:
        """`interval` in tokens between checkpoints of a prefill, `decode_interval` behind the known tokens."""
        self._cache = cache
        self._index = cache.index
        self._interval = interval
        self._decode_interval = decode_interval
        self._counters = counters
        self._writers: dict[bytes, Generation] = {}  # announced checkpoints whose step is not planned yet
        self.written: list[Written] = []  # since somebody last emptied it

    def announce(self, g: Generation) -> None:
        """A row was admitted: decides where its tokens up to the known ones leave checkpoints."""
        if not self._cache.enabled:
            return
        junction = self._index.junction(g.lineage, g.prompt_len, g.submitted)
        g.marks = marks(
            g.lineage, g.request, start=g.submitted, stop=g.reach, interval=self._interval, junction=junction, has=self._index.has
        )
        every = self._decode_interval
        g.marks[0] = next_interval(g.reach - g.reach % every, every)
        for mark in g.marks:
            if mark.key is not None:
                self._index.expect(g.lineage, mark.position)
                self._writers[mark.key] = g

    def take(self, g: Generation, stop: int) -> tuple[Taken, ...]:
        """Reserves the checkpoints that a step up to `stop` passes."""
        assert g.lease is not None
        found = []
        while g.marks[-1].position <= stop:
            mark = g.marks.pop()
            if not g.marks:
                g.marks.append(next_interval(mark.position, self._decode_interval))
            if mark.key is not None and self._index.is_there(mark.key):  # another row ended exactly here
                self._withdraw(mark)
                continue
            taken = self._cache.reserve(g.lease, mark.position, interval=mark.interval)
            if taken is None:
                self._counters.checkpoints_skipped += 1
                self._withdraw(mark)
                continue
            self._counters.checkpoints += 1
            found.append(taken)
            if mark.key is not None:
                taken.key = mark.key  # no writer any more: its step is submitted, so it will come
                del self._writers[mark.key]
        return tuple(found)

    def settle(self, g: Generation, taken: Taken) -> None:
        """The result of a checkpoint's step was applied."""
        if taken.position <= g.known:
            self._cache.commit(taken, g.lineage)  # or there is an equal one already, which will do
            self.written.append(Written(g.request, g.lineage, taken.position, g.status is Status.FINISHED))
        else:  # a cancelled row's tokens that nobody was told
            self._cache.discard(taken)

    def abandon(self, g: Generation) -> None:
        """The row ends or is displaced: what it announced and did not reach will not come."""
        for mark in g.marks:
            self._withdraw(mark)
        g.marks = []

    def will_come(self, g: Generation, key: bytes) -> bool:
        """Whether `g` should wait for this checkpoint: its step is submitted, or its writer runs and does not rank behind `g`."""
        if not self._index.is_expected(key):
            return False
        writer = self._writers.get(key)
        return writer is None or (not writer.paused and writer.request.priority <= g.request.priority)

    def check(self, running: list[Generation]) -> None:
        for key, writer in self._writers.items():
            if writer not in running or all(mark.key != key for mark in writer.marks) or not self._index.has(key):
                raise InvariantBroken(f"a checkpoint is announced by {writer.request.request_id}, which will not write it")

    def _withdraw(self, mark: Mark) -> None:
        if mark.key is not None:
            self._index.withdraw(mark.key)
            del self._writers[mark.key]
