"""Refcounted MLA pages of one pool.

A page is kept by leases (running rows, who may write behind what others rely on) and by checkpoints (cached prefixes, who never
write). It is free when nobody keeps it. Pages without a lease are what eviction could bring back, so `unleased` bounds what a
new row can get.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import InvariantBroken


class Pages:
    """Every method mutates but the properties and `check`. Ids are valid until the last keeper gives them back."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))  # a stack: low ids first, recently used ones again
        self._leases = [0] * count
        self._holds = [0] * count
        self._leased = 0

    @property
    def total(self) -> int:
        return len(self._leases)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def unleased(self) -> int:
        """Free pages and pages that only checkpoints keep."""
        return len(self._leases) - self._leased

    def leased(self, pages: Sequence[int]) -> int:
        """How many of `pages` some lease keeps already."""
        return sum(1 for page in pages if self._leases[page])

    def take(self, count: int) -> list[int]:
        """`count` free pages, leased once; the caller has made room."""
        if count > len(self._free):
            raise InvariantBroken(f"{count} pages asked for, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in taken:
            self._leases[page] = 1
        self._leased += count
        return taken

    def lease(self, pages: Iterable[int]) -> None:
        """One more lease on pages that are kept by somebody."""
        leases = self._leases
        for page in pages:
            if not (leases[page] or self._holds[page]):
                raise InvariantBroken(f"page {page} is free and cannot be shared")
            if not leases[page]:
                self._leased += 1
            leases[page] += 1

    def unlease(self, pages: Iterable[int]) -> None:
        leases = self._leases
        for page in pages:
            if not leases[page]:
                raise InvariantBroken(f"page {page} is given back but has no lease")
            leases[page] -= 1
            if not leases[page]:
                self._leased -= 1
                if not self._holds[page]:
                    self._free.append(page)

    def hold(self, pages: Iterable[int]) -> None:
        """One more checkpoint on pages that are kept by somebody."""
        for page in pages:
            if not (self._leases[page] or self._holds[page]):
                raise InvariantBroken(f"page {page} is free and cannot be cached")
            self._holds[page] += 1

    def unhold(self, pages: Iterable[int]) -> None:
        holds = self._holds
        for page in pages:
            if not holds[page]:
                raise InvariantBroken(f"page {page} is given back but no checkpoint keeps it")
            holds[page] -= 1
            if not holds[page] and not self._leases[page]:
                self._free.append(page)

    def check(self, leases: Iterable[Sequence[int]], holds: Iterable[Sequence[int]]) -> None:
        """Raise InvariantBroken unless the books equal what the owners list."""
        for name, books, owners in (("leases", self._leases, leases), ("checkpoints", self._holds, holds)):
            counted = [0] * self.total
            for owner in owners:
                for page in owner:
                    counted[page] += 1
            if counted != books:
                wrong = {p: (counted[p], books[p]) for p in range(self.total) if counted[p] != books[p]}
                raise InvariantBroken(f"pages: {name} counted and booked differ: {wrong}")
        kept = {p for p in range(self.total) if self._leases[p] or self._holds[p]}
        if len(self._free) != len(set(self._free)) or kept & set(self._free) or len(kept) + len(self._free) != self.total:
            raise InvariantBroken(f"pages: {len(kept)} kept and {len(self._free)} free of {self.total}")
        if self._leased != sum(1 for n in self._leases if n):
            raise InvariantBroken(f"pages: {self._leased} booked as leased, {sum(1 for n in self._leases if n)} are")
