"""Host memory in which the blocks of one node arrive: a fixed number of slots, shared by the node's shards, and who may use them.

A block is read by one of the shards that need it, into a slot; every other takes it from there. When all have it, it stays until its slot
is needed: a shard that starts again finds there what its node still holds. When every slot is in use, reading waits.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import ConfigError

ALIGNMENT = 64  # a block lies in its slot as it lies in its file, modulo this


@dataclass(frozen=True, slots=True)
class Grant:
    """A block's place in memory. `read`: the one that gets this grant reads it; otherwise it is there."""

    block: int
    slot: int
    read: bool


class Desk(Protocol):
    """Hands out slots to one shard."""

    def turn(self, read: Sequence[int], taken: Sequence[int], want: int) -> list[Grant]:
        """Says which blocks the shard has read and which it needs no more since the last turn; gets up to `want` further ones."""
        ...


@dataclass(slots=True)
class _Held:
    slot: int
    reader: int | None  # the rank that reads it; None: it is there
    waiting: set[int]  # ranks that have not taken it


@dataclass(slots=True)
class _Member:
    """A rank's blocks that are neither granted to it nor taken, in order."""

    left: OrderedDict[int, None]
    granted: set[int] = field(default_factory=set)


class SlotBook:
    """Who holds what. Not thread-safe. `needs`: the blocks of each rank, in the order in which they are read."""

    def __init__(self, needs: Mapping[int, Sequence[int]], slots: int) -> None:
        self._needs = needs
        self._free = list(range(slots))
        self._held: dict[int, _Held] = {}
        self._spent: OrderedDict[int, None] = OrderedDict()  # held and taken by all, oldest first
        self._members = {rank: _Member(OrderedDict.fromkeys(blocks)) for rank, blocks in needs.items()}
        self._ranks: dict[int, set[int]] = {}
        for rank, blocks in needs.items():
            for block in blocks:
                self._ranks.setdefault(block, set()).add(rank)

    def turn(self, rank: int, read: Sequence[int], taken: Sequence[int], want: int) -> list[Grant]:
        """See `Desk`."""
        member = self._members[rank]
        for block in read:
            self._held[block].reader = None
        for block in taken:
            member.granted.discard(block)
            self._ranks[block].discard(rank)
            held = self._held[block]
            held.waiting.discard(rank)
            if not held.waiting:
                self._spent[block] = None
        grants: list[Grant] = []
        for block in list(member.left):
            if len(grants) >= want:
                break
            held_now = self._held.get(block)
            if held_now is None:
                slot = self._slot()
                if slot is None:
                    continue  # another one may be there already
                self._held[block] = _Held(slot, rank, set(self._ranks[block]))
                grants.append(Grant(block, slot, True))
            elif held_now.reader is None:
                self._spent.pop(block, None)
                grants.append(Grant(block, held_now.slot, False))
            else:
                continue  # another rank reads it
            del member.left[block]
            member.granted.add(block)
        return grants

    def restart(self, rank: int) -> None:
        """The rank needs all of its blocks again; what it was reading is not there. Only when its former process has ended."""
        for block in self._needs[rank]:
            self._ranks[block].add(rank)
            held = self._held.get(block)
            if held is None:
                continue
            if held.reader == rank:
                self._free.append(held.slot)
                del self._held[block]
            else:
                held.waiting.add(rank)
                self._spent.pop(block, None)
        self._members[rank] = _Member(OrderedDict.fromkeys(self._needs[rank]))

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._spent:
            return None
        block, _ = self._spent.popitem(last=False)
        return self._held.pop(block).slot


class SoleDesk:
    """The desk of a process that shares with nobody."""

    def __init__(self, rank: int, blocks: Sequence[int], slots: int) -> None:
        self._rank = rank
        self._book = SlotBook({rank: blocks}, slots)

    def turn(self, read: Sequence[int], taken: Sequence[int], want: int) -> list[Grant]:
        return self._book.turn(self._rank, read, taken, want)


class Memory:
    """Slots in anonymous shared memory. Other processes of the node attach by `path`; it is gone when the last of them ends."""

    def __init__(self, slots: int, slot_bytes: int, descriptor: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, slots * slot_bytes)

    @classmethod
    def create(cls, *, budget: int, blocks: int, largest: int) -> Memory:
        """As many slots for blocks of up to `largest` bytes as the budget has room for, one a block at most. Raises ConfigError."""
        slot_bytes = -(-(largest + ALIGNMENT) // mmap.PAGESIZE) * mmap.PAGESIZE
        if budget < 2 * slot_bytes:
            raise ConfigError(f"load_buffer_bytes={budget} is too small: two blocks of {slot_bytes} bytes must fit")
        slots = max(1, min(budget // slot_bytes, blocks))
        descriptor = os.memfd_create("k3-weights")
        os.ftruncate(descriptor, slots * slot_bytes)
        return cls(slots, slot_bytes, descriptor)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @classmethod
    def attach(cls, path: str, slots: int, slot_bytes: int) -> Memory:
        return cls(slots, slot_bytes, os.open(path, os.O_RDWR))

    def view(self) -> memoryview:
        return memoryview(self._map)

    def place(self, slot: int, start: int, nbytes: int) -> memoryview:
        """Where the block that begins at byte `start` of its file lies in a slot."""
        begin = slot * self.slot_bytes + start % ALIGNMENT
        return self.view()[begin : begin + nbytes]

    def close(self) -> None:
        """Gives the memory back, once nobody has a view of it."""
        with suppress(BufferError):  # a view lives on: it goes with that
            self._map.close()
        os.close(self._descriptor)
