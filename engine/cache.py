"""`CacheManager`: who owns pages and slots, and which prefixes can be resumed.

A `Lease` is what one running row holds; a `Taken` is a checkpoint whose step was planned but whose result is not applied yet; a
`Checkpoint` is visible to everybody of its tenant. Ownership moves along that line and each of them is given back by exactly
one call. Shards execute plans in order, so what is given back here may be handed out at once.

What a checkpoint shares with the row that wrote it needs no copy: the row only writes positions behind it. Whoever resumes from
it inside a page gets a copy of that page, and always a copy of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvariantBroken
from engine.lineage import Lineage
from engine.pages import Pages
from engine.plan import Copy
from engine.prefix import Checkpoint, Match, PrefixIndex
from engine.slots import Slots

_MIN_MEMORY = 1 << 16  # prompt blocks remembered even by a small pool


@dataclass(slots=True, eq=False)
class Lease:
    """A row's slot and pages. `pages` grow by `extend`; everything ends with `release` or `donate`."""

    slot: int
    pages: list[int]
    start: int = 0  # tokens whose computation is skipped
    copies: tuple[Copy, ...] = ()  # to be made before the row's first step
    source: str | None = None  # the tier of the state that it resumes from; None = none


@dataclass(slots=True, eq=False)
class Taken:
    """A checkpoint in the making, by a planned step or by an import. Ends with `commit` or `discard`."""

    position: int
    slot: int
    pages: tuple[int, ...]
    interval: bool
    key: bytes | None = None  # set when others were told to expect it


class CacheManager:
    def __init__(self, *, num_pages: int, num_slots: int, page_size: int, block_size: int | None = None, enabled: bool = True) -> None:
        """`block_size` of the lineages; None = that of a page."""
        self.page_size = page_size
        self.enabled = enabled
        self._evictions = 0
        self.pages = Pages(num_pages)
        self.slots = Slots(num_slots)
        self.index = PrefixIndex(block_size or page_size, max(_MIN_MEMORY, 4 * num_pages))
        self._leases: set[Lease] = set()
        self._taken: set[Taken] = set()

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def missing(self, lease: Lease, tokens: int) -> int:
        """Pages that a lease lacks to hold `tokens`."""
        return max(0, self.pages_for(tokens) - len(lease.pages))

    @property
    def leases(self) -> int:
        """Rows that run."""
        return len(self._leases)

    @property
    def idle(self) -> bool:
        """Nobody runs and nothing is in the making: all that is kept can be evicted."""
        return not self._leases and not self._taken

    def match(self, lineage: Lineage, limit: int) -> Match:
        """The longest resumable prefix of at most `limit` tokens. Does not mutate; valid until the next call that does."""
        return self.index.match(lineage, limit) if self.enabled else Match()

    def acquire(self, match: Match, *, tokens: int, reserved: int) -> Lease | None:
        """A lease that resumes from `match`; None when there is no room for `tokens` beside `reserved` pages promised to others.

        Mutates: evicts checkpoints, takes a slot and at most one page (the copied tail). The lease is valid until released or donated.
        """
        source = match.checkpoint
        shared: Sequence[int] = ()
        if source is not None:
            self.slots.position(source.slot)  # raises when the state was never written
            shared = source.pages[: source.position // self.page_size]
        if self.pages_for(tokens) - self.pages.leased(shared) + reserved > self.pages.unleased:
            return None
        partial = source is not None and len(source.pages) > len(shared)
        if source is not None:
            source.pins += 1
        roomy = self._make_room(pages=int(partial), slots=1)
        if source is not None:
            source.pins -= 1
        if not roomy:
            # A pool so small that a copy does not fit beside its source: begin anew rather than wait for ever.
            return self.acquire(Match(), tokens=tokens, reserved=reserved) if source is not None and self.idle else None
        lease = Lease(self.slots.take(), list(shared))
        if source is not None:
            lease.source = source.source
            self.index.touch(source)
            self.pages.lease(shared)
            copies = [Copy(kind="slot", src=source.slot, dst=lease.slot)]
            if partial:
                lease.pages += self.pages.take(1)
                copies.append(Copy(kind="page", src=source.pages[-1], dst=lease.pages[-1]))
            lease.start, lease.copies = source.position, tuple(copies)
        self._leases.add(lease)
        return lease

    def extend(self, lease: Lease, tokens: int) -> int:
        """Grows a lease towards `tokens` as far as there is room; returns the tokens covered. Mutates: evicts, takes pages."""
        if missing := self.missing(lease, tokens):
            self._make_room(pages=missing, slots=0)
            lease.pages += self.pages.take(min(missing, self.pages.free))
        return len(lease.pages) * self.page_size

    def reserve(self, lease: Lease, position: int, *, interval: bool) -> Taken | None:
        """A slot for the state that a planned step will write at `position`; None when there is none to be had. Mutates: evicts."""
        if not self._make_room(pages=0, slots=1):
            return None
        taken = Taken(position, self.slots.take(), tuple(lease.pages[: self.pages_for(position)]), interval)
        self.pages.hold(taken.pages)
        self._taken.add(taken)
        return taken

    def donate(self, lease: Lease, position: int, *, interval: bool) -> Taken:
        """Ends a lease and makes its own state, at `position`, a checkpoint: no copy. Mutates; the lease is invalid after."""
        taken = Taken(position, lease.slot, tuple(lease.pages[: self.pages_for(position)]), interval)
        self._end(lease)
        self.pages.hold(taken.pages)
        self.pages.unlease(lease.pages)
        self._taken.add(taken)
        return taken

    def reserve_import(self, position: int) -> Taken | None:
        """A slot and pages for a state that comes from elsewhere; None when there is no room. Mutates: evicts.

        Steps on their way may still use what was free: nothing is written here before they have landed.
        """
        count = self.pages_for(position)
        if not self.enabled or not self._make_room(pages=count, slots=1):
            return None
        pages = tuple(self.pages.take(count))
        self.pages.hold(pages)
        self.pages.unlease(pages)
        taken = Taken(position, self.slots.take(), pages, False)
        self._taken.add(taken)
        return taken

    def pin(self, lineage: bytes) -> Checkpoint | None:
        """The checkpoint of that lineage, kept until `unpin`: its slot and pages do not change. Mutates."""
        checkpoint = self.index.get(lineage)
        if checkpoint is not None:
            checkpoint.pins += 1
        return checkpoint

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1

    def commit(self, taken: Taken, lineage: Lineage, source: str = "device") -> bool:
        """Its step's result was applied, or its import is whole: others may resume from it. Mutates.

        False when there is one of this lineage already; this one is dropped then.
        """
        if taken not in self._taken:
            raise InvariantBroken(f"a checkpoint at position {taken.position} is committed twice")
        checkpoint = Checkpoint(lineage.at(taken.position), taken.position, taken.slot, taken.pages, taken.interval, source=source)
        self.slots.wrote(taken.slot, taken.position)
        if not self.index.insert(checkpoint, lineage):
            self.discard(taken)
            return False
        self._taken.remove(taken)
        self._withdraw(taken)
        return True

    def discard(self, taken: Taken) -> None:
        """Nobody will resume from it. Mutates."""
        if taken not in self._taken:
            raise InvariantBroken(f"a checkpoint at position {taken.position} is discarded twice")
        self._taken.remove(taken)
        self._withdraw(taken)
        self._free(taken.slot, taken.pages)

    def release(self, lease: Lease) -> None:
        """Ends a lease. Mutates; raises InvariantBroken when it ended before."""
        self._end(lease)
        self.pages.unlease(lease.pages)
        self.slots.give_back(lease.slot)

    def clear(self) -> None:
        """Evicts every checkpoint that is not pinned. Mutates."""
        while self._evict():
            pass

    def levels(self) -> dict[str, int]:
        """Keyword arguments of `EngineStats`."""
        return {
            "evictions": self._evictions,
            "pages_total": self.pages.total,
            "pages_free": self.pages.free,
            "pages_leased": self.pages.total - self.pages.unleased,
            "slots_total": self.slots.total,
            "slots_free": self.slots.free,
            "slots_cached": len(self.index),
        }

    def check(self) -> None:
        """Raises InvariantBroken unless every page and slot has exactly the owners it lists."""
        checkpoints = list(self.index)
        holds = [c.pages for c in checkpoints] + [t.pages for t in self._taken]
        self.pages.check([lease.pages for lease in self._leases], holds)
        owned = [lease.slot for lease in self._leases] + [c.slot for c in checkpoints] + [t.slot for t in self._taken]
        self.slots.check(owned)
        for checkpoint in checkpoints:
            if self.slots.position(checkpoint.slot) != checkpoint.position or len(checkpoint.pages) != self.pages_for(checkpoint.position):
                raise InvariantBroken(f"a checkpoint at {checkpoint.position} does not own a state and pages of that position")
        self.index.check()

    def _make_room(self, *, pages: int, slots: int) -> bool:
        while self.pages.free < pages or self.slots.free < slots:
            if not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        victim = self.index.evict()
        if victim is None:
            return False
        self._evictions += 1
        self._free(victim.slot, victim.pages)
        return True

    def _withdraw(self, taken: Taken) -> None:
        if taken.key is not None:
            self.index.withdraw(taken.key)

    def _free(self, slot: int, pages: Sequence[int]) -> None:
        self.slots.give_back(slot)
        self.pages.unhold(pages)

    def _end(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise InvariantBroken(f"the lease of slot {lease.slot} ended twice")
        self._leases.remove(lease)
