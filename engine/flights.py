"""Steps whose results are awaited, oldest first: what each row of them consumes, samples and writes to checkpoints."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache import Lease, Taken
from engine.errors import InvariantBroken
from engine.generation import Generation
from engine.plan import Output, RowStep


class FlownRow(NamedTuple):
    """A row's part of a step."""

    generation: Generation
    lease: Lease
    step: RowStep
    taken: tuple[Taken, ...]


@dataclass(slots=True)
class Flight:
    rows: list[FlownRow] = field(default_factory=list)
    donated: list[tuple[Generation, Taken]] = field(default_factory=list)  # states of ended rows that this step still writes


class Flights:
    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def depart(self, flight: Flight) -> None:
        self._flights.append(flight)

    def arrive(self) -> Flight:
        """The oldest one. Raises InvariantBroken when none is awaited."""
        if not self._flights:
            raise InvariantBroken("a result came, but no plan is on its way")
        return self._flights.popleft()

    def attach(self, g: Generation, lease: Lease, taken: Taken) -> bool:
        """Hands a donated state to the last step that still writes it; False when none does."""
        for flight in reversed(self._flights):
            if any(row.lease is lease for row in flight.rows):
                flight.donated.append((g, taken))
                return True
        return False

    def awaited(self) -> Counter[Generation]:
        """Tokens on their way, by generation."""
        return Counter(row.generation for flight in self._flights for row in flight.rows if row.step.output is Output.SAMPLE)
