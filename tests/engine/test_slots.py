from __future__ import annotations

import pytest

from engine.errors import InvariantBroken
from engine.slots import Slots


def test_a_slot_is_free_then_reserved_then_written() -> None:
    slots = Slots(2)
    slot = slots.take()
    assert slots.free == 1
    with pytest.raises(InvariantBroken, match="is reserved: it holds no state to restore"):
        slots.position(slot)
    slots.wrote(slot, 5)
    slots.wrote(slot, 9)
    assert slots.position(slot) == 9
    slots.check([slot])
    slots.give_back(slot)
    assert slots.free == 2
    slots.check([])


def test_a_recycled_slot_has_no_state_of_its_former_owner() -> None:
    slots = Slots(1)
    slot = slots.take()
    slots.wrote(slot, 5)
    slots.give_back(slot)
    with pytest.raises(InvariantBroken, match="is free: it holds no state"):
        slots.position(slot)
    assert slots.take() == slot
    with pytest.raises(InvariantBroken, match="is reserved: it holds no state"):
        slots.position(slot)


def test_an_older_state_never_goes_over_a_newer_one() -> None:
    slots = Slots(1)
    slot = slots.take()
    slots.wrote(slot, 5)
    with pytest.raises(InvariantBroken, match="holds position 5 and was written at 4"):
        slots.wrote(slot, 4)
    assert slots.position(slot) == 5


def test_misuse_is_found_at_once() -> None:
    slots = Slots(1)
    with pytest.raises(InvariantBroken, match="is free and was written"):
        slots.wrote(0, 1)
    slot = slots.take()
    with pytest.raises(InvariantBroken, match="none is free"):
        slots.take()
    with pytest.raises(InvariantBroken, match="was written at 0"):
        slots.wrote(slot, 0)
    with pytest.raises(InvariantBroken, match=r"owners have \[\], booked are \[0\]"):
        slots.check([])
    slots.give_back(slot)
    with pytest.raises(InvariantBroken, match="given back twice"):
        slots.give_back(slot)
    with pytest.raises(InvariantBroken, match=r"owners have \[0\], booked are \[\]"):
        slots.check([slot])
