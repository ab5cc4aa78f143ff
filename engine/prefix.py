"""The index of cached prefixes: lineage at a position -> the state written there and the pages up to it.

A recurrent state cannot be cut, so a prefix can be resumed only where somebody took a checkpoint. The index also remembers what
it does not have: prompts seen (their second sighting is where a checkpoint pays), checkpoints about to be written (worth
waiting for), checkpoints evicted (the reason of a miss). Eviction is LRU in two classes: checkpoints of a long prefill's
intervals that were never hit go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from engine.errors import InvariantBroken
from engine.lineage import Lineage

_SHARED = b""  # a block of more than one prompt


class Miss(StrEnum):
    """Why nothing could be reused."""

    DISABLED = "disabled"  # by configuration, or the request wants prompt log-probs
    NEVER_SEEN = "never_seen"
    NO_STATE = "no_state_at_boundary"  # the tokens were seen, but no state was kept on their way
    EVICTED = "evicted"


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A resumable prefix. Immutable but for `pins`: while pinned it is not evicted."""

    lineage: bytes
    position: int
    slot: int
    pages: tuple[int, ...]  # cover [0, position); the last one may be half valid and is copied by whoever goes on from here
    interval: bool
    pins: int = 0
    source: str = "device"  # the tier that it came from, until it was resumed once


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable checkpoint, and a longer one that is about to be written. Valid until the next mutation of the index."""

    checkpoint: Checkpoint | None = None
    expected: bytes | None = None
    evicted: bool = False  # a longer one was evicted


@dataclass(slots=True)
class _Place:
    """What the index knows about one lineage. Removed when it knows nothing."""

    chain: bytes
    tail: int
    checkpoint: Checkpoint | None = None
    expected: bool = False
    evicted: bool = False


class PrefixIndex:
    def __init__(self, block_size: int, memory: int) -> None:
        """`memory`: how many seen blocks, and how many evicted checkpoints, to remember."""
        self._block_size = block_size
        self._memory = memory
        self._places: dict[bytes, _Place] = {}
        self._tails: dict[bytes, dict[int, int]] = {}  # lineage of full blocks -> tail length -> places there
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()  # block -> the prompt it belongs to, or _SHARED
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._lru: tuple[OrderedDict[bytes, Checkpoint], ...] = (OrderedDict(), OrderedDict())  # interval, others

    def __len__(self) -> int:
        return len(self._lru[0]) + len(self._lru[1])

    def __iter__(self) -> Iterator[Checkpoint]:
        """Next to be evicted first."""
        for lru in self._lru:
            yield from lru.values()

    # -- prompts seen

    def sight(self, lineage: Lineage, prompt_len: int) -> bool:
        """Remembers a prompt (mutates). Returns whether its beginning had been seen before."""
        seen, end = self._seen, lineage.at(prompt_len - 1)
        before = end in seen or (prompt_len >= self._block_size and lineage.block(1) in seen)
        for i in range(1, prompt_len // self._block_size + 1):
            block = lineage.block(i)
            seen[block] = end if seen.get(block, end) == end else _SHARED
            seen.move_to_end(block)
        seen[end] = end
        while len(seen) > self._memory:
            seen.popitem(last=False)
        return before

    def junction(self, lineage: Lineage, prompt_len: int, after: int) -> int:
        """The last block boundary in (after, prompt_len) shared with a different prompt; 0 = none."""
        end = lineage.at(prompt_len - 1)
        for i in range((prompt_len - 1) // self._block_size, after // self._block_size, -1):
            if self._seen.get(lineage.block(i), end) != end:
                return i * self._block_size
        return 0

    # -- lookup (none of these mutates)

    def match(self, lineage: Lineage, limit: int) -> Match:
        """The longest checkpoint of at most `limit` tokens."""
        expected, evicted = None, False
        for i in range(limit // self._block_size, -1, -1):
            tails = self._tails.get(lineage.block(i))
            if tails is None:
                continue
            for tail in sorted(tails, reverse=True):
                position = i * self._block_size + tail
                key = lineage.at(position) if position <= limit else None
                place = self._places.get(key) if key else None
                if place is None:
                    continue
                if place.checkpoint is not None:
                    return Match(place.checkpoint, expected, evicted)
                if place.expected and expected is None:
                    expected = key
                evicted = evicted or place.evicted
        return Match(None, expected, evicted)

    def has(self, key: bytes) -> bool:
        """Whether a checkpoint is there or about to be written."""
        place = self._places.get(key)
        return place is not None and (place.checkpoint is not None or place.expected)

    def is_expected(self, key: bytes) -> bool:
        """Whether a checkpoint is about to be written that is not there yet."""
        place = self._places.get(key)
        return place is not None and place.expected and place.checkpoint is None

    def is_there(self, key: bytes) -> bool:
        return self.get(key) is not None

    def get(self, key: bytes) -> Checkpoint | None:
        place = self._places.get(key)
        return None if place is None else place.checkpoint

    # -- changes

    def expect(self, lineage: Lineage, position: int) -> None:
        """Somebody is about to write the checkpoint at `position`."""
        self._place(lineage, position).expected = True

    def withdraw(self, key: bytes) -> None:
        """It will not be written, or was."""
        place = self._places.get(key)
        if place is not None:
            place.expected = False
            self._forget(key, place)

    def insert(self, checkpoint: Checkpoint, lineage: Lineage) -> bool:
        """Makes a checkpoint visible. False when there is one of this lineage already; the caller keeps ownership then."""
        place = self._place(lineage, checkpoint.position)
        if place.checkpoint is not None:
            return False
        place.checkpoint = checkpoint
        if place.evicted:
            place.evicted = False
            del self._evicted[checkpoint.lineage]
        self._lru[not checkpoint.interval][checkpoint.lineage] = checkpoint
        return True

    def touch(self, checkpoint: Checkpoint) -> None:
        """It was used: evicted last, whatever it was taken for."""
        checkpoint.source = "device"
        if self._lru[0].pop(checkpoint.lineage, None):
            self._lru[1][checkpoint.lineage] = checkpoint
        self._lru[1].move_to_end(checkpoint.lineage)

    def evict(self) -> Checkpoint | None:
        """Removes the least recently used checkpoint that is not pinned; the caller owns its slot and pages."""
        for lru in self._lru:
            for key, checkpoint in lru.items():
                if not checkpoint.pins:
                    del lru[key]
                    place = self._places[key]
                    place.checkpoint, place.evicted = None, True
                    self._evicted[key] = None
                    self._trim_evicted()
                    return checkpoint
        return None

    def check(self) -> None:
        listed = [c for lru in self._lru for c in lru.values()]
        placed = [p.checkpoint for p in self._places.values() if p.checkpoint is not None]
        if {id(c) for c in listed} != {id(c) for c in placed} or len(listed) != len(placed):
            raise InvariantBroken(f"prefix: {len(listed)} checkpoints in eviction order, {len(placed)} in the index")
        if any(c.pins < 0 for c in listed):
            raise InvariantBroken("prefix: a checkpoint was unpinned too often")
        tails: dict[bytes, dict[int, int]] = {}
        for place in self._places.values():
            if place.checkpoint is None and not place.expected and not place.evicted:
                raise InvariantBroken("prefix: a place knows nothing and was not removed")
            at = tails.setdefault(place.chain, {})
            at[place.tail] = at.get(place.tail, 0) + 1
        if tails != self._tails:
            raise InvariantBroken("prefix: the lookup by block does not list the places")
        if self._evicted.keys() != {k for k, p in self._places.items() if p.evicted}:
            raise InvariantBroken("prefix: the evicted are not the places marked so")

    def _place(self, lineage: Lineage, position: int) -> _Place:
        key = lineage.at(position)
        place = self._places.get(key)
        if place is None:
            blocks, tail = divmod(position, self._block_size)
            place = self._places[key] = _Place(lineage.block(blocks), tail)
            tails = self._tails.setdefault(place.chain, {})
            tails[tail] = tails.get(tail, 0) + 1
        return place

    def _forget(self, key: bytes, place: _Place) -> None:
        if place.checkpoint is not None or place.expected or place.evicted:
            return
        del self._places[key]
        tails = self._tails[place.chain]
        tails[place.tail] -= 1
        if not tails[place.tail]:
            del tails[place.tail]
        if not tails:
            del self._tails[place.chain]

    def _trim_evicted(self) -> None:
        while len(self._evicted) > self._memory:
            key, _ = self._evicted.popitem(last=False)
            place = self._places[key]
            place.evicted = False
            self._forget(key, place)
