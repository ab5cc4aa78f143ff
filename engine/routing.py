"""Which replica or data-parallel group takes a request: the one that has its session, else the best prefix, else the least loaded.

Pure and deterministic. The answer is a ranking, so that whoever refuses or is gone is followed by the next best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    name: str  # stable: ties are broken by it, so a session without a home finds the same one from everywhere
    has_session: bool = False
    prefix: int = 0  # tokens of the request that it could skip
    load: int = 0  # tokens, or requests, that wait there
    full: bool = False  # would refuse


def rank(candidates: Sequence[Candidate], session: str | None = None) -> list[int]:
    """Indices of the candidates, best first; full ones last. Ties go by rendezvous hashing: losing one moves only what it had."""

    def key(i: int) -> tuple[bool, bool, int, int, bytes]:
        c = candidates[i]
        tie = sha256(f"{session or ''}\0{c.name}".encode()).digest()
        return c.full, not c.has_session, -c.prefix, c.load, tie

    return sorted(range(len(candidates)), key=key)
