"""One request's mutable record: the only state that the scheduler changes.

Three counters, no phases. `submitted` tokens are consumed by the steps planned so far and chase `known` tokens (prompt +
generated) plus the `pending` ones that a planned step will sample; `computed` follows `submitted` when results arrive. Prefill,
a prefix hit, decode and the recomputation after a preemption are the same case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.cache import Lease
from engine.errors import InvariantBroken
from engine.lineage import Lineage
from engine.marks import Mark
from engine.types import Admission, GenerateRequest, TokenLogprob, Usage, usage


class Status(Enum):
    WAITING = "waiting"  # queued or preempted: holds nothing
    RUNNING = "running"  # has a row and a lease
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Generation:
    request: GenerateRequest
    lineage: Lineage  # holds the known ids
    arrival: int
    budget: int  # generated tokens at most; the request's max_tokens clipped to the context and the pool
    seen_before: bool  # somebody asked for the beginning of this prompt before
    prompt_len: int = field(init=False)
    end: int = field(init=False)  # tokens to consume in all: the last one sampled is never consumed
    rank: tuple[int, int] = field(init=False)  # smaller claims first
    solitary: bool = field(init=False)  # waits for each of its tokens before the next step (a grammar's mask needs it)
    stops: frozenset[int] = field(init=False)
    prompt_logprobs: list[TokenLogprob] | None = field(init=False)  # collected so far; None = not wanted, or delivered

    status: Status = Status.WAITING
    paused: bool = False  # its reader is slow
    held: bool = False  # its state is on its way from elsewhere
    submitted: int = 0
    computed: int = 0
    pending: int = 0
    row: int = -1
    lease: Lease | None = None
    told_pages: int = 0  # pages of the lease that the shards know
    marks: list[Mark] = field(default_factory=list)  # ahead of `submitted`, the next one last
    awaits: bytes | None = None  # lineage of a checkpoint that another generation is about to write
    admitted: Admission | None = None  # what the first admission found
    miss_reason: str | None = None  # set before it when a stored state could not be used

    def __post_init__(self) -> None:
        request = self.request
        self.prompt_len = len(request.prompt)
        self.end = self.prompt_len + self.budget - 1
        self.rank = (request.priority, self.arrival)
        self.admitted = request.admitted
        self.solitary = request.constraint is not None
        self.stops = frozenset(request.stop_token_ids)
        wants = request.sampling.prompt_logprobs is not None and not request.generated
        self.prompt_logprobs = [] if wants else None

    @property
    def known(self) -> int:
        return len(self.lineage.ids)

    @property
    def generated(self) -> int:
        return len(self.lineage.ids) - self.prompt_len

    @property
    def reach(self) -> int:
        """Known tokens that a step may consume."""
        return min(len(self.lineage.ids), self.end)

    @property
    def left(self) -> int:
        """Tokens that the next step could consume."""
        return min(len(self.lineage.ids) + self.pending, self.end) - self.submitted

    @property
    def usage(self) -> Usage:
        return usage(self.request, self.generated, self.admitted)

    def deliver_prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """All of them at once; None when they were not wanted or went out before."""
        collected, self.prompt_logprobs = self.prompt_logprobs, None
        return None if collected is None else tuple(collected)

    def check(self, awaited: int) -> None:
        """Raises InvariantBroken unless status and counters agree; `awaited` = tokens that planned steps sample."""
        runs = self.status is Status.RUNNING
        if runs != (self.lease is not None) or runs != (self.row >= 0) or (not runs and self.submitted):
            raise InvariantBroken(f"request {self.request.request_id} is {self.status.value} with lease {self.lease} and row {self.row}")
        if self.pending != awaited or not self.computed <= self.submitted <= min(self.known + self.pending, self.end):
            raise InvariantBroken(
                f"request {self.request.request_id}: {self.computed} computed, {self.submitted} submitted, {self.known} known, "
                f"{self.pending} pending of {awaited} awaited"
            )
