"""Where bundles are: lineage → the holders that have it in memory, and which bundles end within the block behind an anchor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.bundle import StateBundle
from engine.session import BundleAt

MAX_INDEXED = 500_000  # bundles whose place is remembered


@dataclass(frozen=True, slots=True)
class Found:
    """A bundle that may fit a prompt, and the holders that have it in memory; none = look in the durable tier."""

    at: BundleAt
    holders: tuple[str, ...]
    guess: bool = False  # nobody said that it exists


@dataclass(slots=True)
class _Place:
    position: int
    anchor: str
    holders: set[str]


class BundleIndex:
    def __init__(self) -> None:
        self._places: OrderedDict[str, _Place] = OrderedDict()  # by lineage, the longest known first to go
        self._anchors: dict[str, dict[str, None]] = {}  # lineage after a full block → bundles that end before the next one

    def __len__(self) -> int:
        return len(self._places)

    def add(self, bundle: StateBundle, holder: str) -> None:
        place = self._places.get(bundle.lineage)
        if place is None:
            place = self._places[bundle.lineage] = _Place(bundle.position, bundle.anchor, set())
            self._anchors.setdefault(bundle.anchor, {})[bundle.lineage] = None
            while len(self._places) > MAX_INDEXED:
                self.remove(next(iter(self._places)))
        place.holders.add(holder)

    def discard(self, lineage: str, holder: str) -> None:
        """That holder turned out not to have it."""
        place = self._places.get(lineage)
        if place is not None:
            place.holders.discard(holder)
            if not place.holders:
                self.remove(lineage)

    def remove(self, lineage: str) -> tuple[str, ...]:
        """Forgets a bundle; the holders that had it."""
        place = self._places.pop(lineage, None)
        if place is None:
            return ()
        at = self._anchors[place.anchor]
        del at[lineage]
        if not at:
            del self._anchors[place.anchor]
        return tuple(sorted(place.holders))

    def holders(self, lineage: str) -> tuple[str, ...]:
        place = self._places.get(lineage)
        return tuple(sorted(place.holders)) if place else ()

    def near(self, anchors: Iterable[str]) -> Iterator[BundleAt]:
        """Bundles that end within the block behind one of the anchors."""
        for anchor in anchors:
            for lineage in self._anchors.get(anchor, ()):
                yield BundleAt(position=self._places[lineage].position, lineage=lineage)
