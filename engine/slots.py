"""KDA state slots of one pool: who has one, and at which position its state was written.

A slot is free, reserved (owned, content undefined) or written at a position. A recurrent state is valid at exactly one
position, so reading a slot that was not written, or writing an older position over a newer one, is a bug that must never reach
the shards.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InvariantBroken

_FREE = -2
_RESERVED = -1


class Slots:
    """Every method mutates but the properties, `position` and `check`. A slot is its taker's until `give_back`."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._position = [_FREE] * count

    @property
    def total(self) -> int:
        return len(self._position)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot, now reserved; the caller has made room."""
        if not self._free:
            raise InvariantBroken("a slot is asked for, none is free")
        slot = self._free.pop()
        self._position[slot] = _RESERVED
        return slot

    def wrote(self, slot: int, position: int) -> None:
        """The shards have written the state after `position` tokens."""
        before = self._position[slot]
        if before == _FREE:
            raise InvariantBroken(f"slot {slot} is free and was written at position {position}")
        if position < max(before, 1):
            raise InvariantBroken(f"slot {slot} holds position {before} and was written at {position}")
        self._position[slot] = position

    def position(self, slot: int) -> int:
        """The position of the state to be restored or published. Raises InvariantBroken when the slot was not written."""
        position = self._position[slot]
        if position < 0:
            raise InvariantBroken(f"slot {slot} is {'free' if position == _FREE else 'reserved'}: it holds no state to restore")
        return position

    def give_back(self, slot: int) -> None:
        if self._position[slot] == _FREE:
            raise InvariantBroken(f"slot {slot} is given back twice")
        self._position[slot] = _FREE
        self._free.append(slot)

    def check(self, owned: Iterable[int]) -> None:
        """Raise InvariantBroken unless exactly the `owned` slots are not free."""
        owners = sorted(owned)
        booked = [s for s, p in enumerate(self._position) if p != _FREE]
        if owners != booked:
            raise InvariantBroken(f"slots: owners have {owners}, booked are {booked}")
        if sorted(self._free) != [s for s, p in enumerate(self._position) if p == _FREE]:
            raise InvariantBroken(f"slots: the free list {sorted(self._free)} is not the free slots")
