"""The scheduler of one data-parallel group: requests in, plans out; results in, chunks out. Pure: no clock, no torch, no Ray.

Each step gives every due row the tokens it lacks, up to the budget: rows that lack one token first, then longer ones and new
arrivals by priority, tokens served to the tenant, arrival. When pages or slots run out the row of the worst rank (priority,
arrival) goes back to the queue and is computed again later; a row only ever displaces rows of worse rank, or paused ones, so
the best always gets on.

`schedule` may be called again before the results of earlier plans are applied: rows whose next token is still on its way are
planned on.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field, replace

from engine.admission import account, budget
from engine.cache import CacheManager, Lease
from engine.config import EngineConfig
from engine.errors import InvalidRequest, InvariantBroken, K3Error, QueueFull
from engine.fairness import ServedTokens
from engine.flights import Flight, Flights, FlownRow
from engine.generation import Generation, Status
from engine.lineage import Lineage, lineage_of
from engine.plan import GroupPlan, GroupResult, Output, RowResult, RowStep
from engine.prefix import Match
from engine.ranking import by_turn, gives_way_to_arrival, gives_way_to_row, row_within_reach
from engine.retention import Retention, Written
from engine.rows import Rows
from engine.stats import Counters, EngineStats
from engine.types import FinishReason, GenerateRequest, TokenChunk, TokenLogprob


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    budget: int
    counts: dict[Generation, int] = field(default_factory=dict)
    fresh: list[Generation] = field(default_factory=list)  # admitted in this step
    preempted: set[Generation] = field(default_factory=set)


class Scheduler:
    def __init__(self, config: EngineConfig, fingerprint: str = "") -> None:
        """`fingerprint` names weights and architecture: states of different ones must never be mixed."""
        self._config = config
        self._fingerprint = fingerprint
        self.cache = CacheManager(
            num_pages=config.num_pages,
            num_slots=config.num_slots,
            page_size=config.page_size,
            block_size=config.block_size,
            enabled=config.prefix_cache,
        )
        self._open: dict[str, Generation] = {}
        self._waiting: dict[Generation, None] = {}
        self._running: list[Generation] = []  # by rank, best first
        self._flights = Flights()
        self._rows = Rows(config.max_running)
        self._served = ServedTokens()
        self._counters = Counters()
        self._retention = Retention(self.cache, config.checkpoint_interval, config.checkpoint_decode_interval, self._counters)
        self._arrivals = 0

    # -- events

    def lineage(self, request: GenerateRequest) -> Lineage:
        """The request's tokens, hashed as this engine names them; the same for every group."""
        ids, config = request.prompt + request.generated, self._config
        return lineage_of(self._fingerprint, request.tenant, ids, block_size=config.block_size, prefixes=config.shared_prefixes)

    def add(self, request: GenerateRequest, lineage: Lineage | None = None, *, held: bool = False) -> TokenChunk | None:
        """Queues a request. Returns its last chunk at once when there is nothing left to generate. `held`: not before `release`.

        Raises InvalidRequest, ContextExceeded, QueueFull; nothing is kept then.
        """
        try:
            allowed = budget(request, self._config)
            if request.request_id in self._open:
                raise InvalidRequest(f"request {request.request_id} is open already", param="request_id")
            if len(self._waiting) >= self._config.max_queued:
                raise QueueFull(f"{len(self._waiting)} requests wait, {self._config.max_queued} may")
        except K3Error:
            self._counters.refused += 1
            raise
        lineage = lineage or self.lineage(request)
        seen = self.cache.enabled and self.cache.index.sight(lineage, len(request.prompt))
        g = Generation(request, lineage, self._arrivals, allowed, seen)
        self._arrivals += 1
        g.held = held
        self._open[request.request_id] = g
        self._waiting[g] = None
        self._served.enter(request.tenant)
        if request.generated and request.generated[-1] in g.stops:
            return self._finish(g, FinishReason.STOP)
        if g.end < 1 or (request.generated and g.generated >= g.budget):
            return self._finish(g, FinishReason.LENGTH)
        return None

    def cancel(self, request_id: str) -> TokenChunk | None:
        """Ends a request wherever it is; None when it is not open (any more)."""
        g = self._open.get(request_id)
        return None if g is None else self._finish(g, FinishReason.CANCELLED)

    def release(self, request_id: str, miss: str | None = None) -> None:
        """Whatever was to come for a held request is here, or will not come because of `miss`."""
        if g := self._open.get(request_id):
            g.held, g.miss_reason = False, miss

    def take_written(self) -> list[Written]:
        """Checkpoints that became visible since the last call."""
        written, self._retention.written = self._retention.written, []
        return written

    def pause(self, request_id: str) -> None:
        """Plans no more of its tokens until `resume`: its reader is slow. What is on its way is still delivered."""
        if g := self._open.get(request_id):
            g.paused = True

    def resume(self, request_id: str) -> None:
        if g := self._open.get(request_id):
            g.paused = False

    def match(self, lineage: Lineage) -> int:
        """Tokens that a request of this lineage could skip now."""
        found = self.cache.match(lineage, len(lineage) - 1).checkpoint
        return found.position if found else 0

    @property
    def load(self) -> int:
        """Tokens that the open requests would consume now, each counted at least once."""
        return sum(max(1, g.left) for g in self._open.values())

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._config.max_queued

    def open_requests(self) -> list[GenerateRequest]:
        """The open requests with all they generated, as another engine would continue them."""
        return [replace(g.request, generated=tuple(g.lineage.ids[g.prompt_len :]), admitted=g.admitted) for g in self._open.values()]

    # -- planning

    def schedule(self) -> GroupPlan:
        """The next step, submitted as far as this object is concerned. An empty plan is not run, and nothing is applied for it."""
        draft = _Draft(self._config.max_batched_tokens)
        behind = self._claim_single(draft)
        if draft.budget > 0 and (behind or self._waiting):
            self._claim_longer(draft, behind)
        return self._submit(draft) if draft.counts else GroupPlan()

    def _claim_single(self, draft: _Draft) -> list[Generation]:
        """Rows that lack one token get it; returns those that lack more."""
        behind = []
        page_size = self._config.page_size
        for g in tuple(self._running):
            if g.paused or g.lease is None or (g.solitary and g.pending):
                continue
            left = g.left
            if left > 1:
                behind.append(g)
            elif left == 1 and draft.budget > 0:
                if g.submitted < len(g.lease.pages) * page_size:
                    draft.counts[g] = 1
                    draft.budget -= 1
                else:
                    self._claim(draft, g, 1)
        return behind

    def _claim_longer(self, draft: _Draft, behind: list[Generation]) -> None:
        admitting = bool(self._waiting) and row_within_reach(self._running, self._waiting, self._config.max_running)
        for g in by_turn([*behind, *(self._waiting if admitting else ())], self._served):
            if draft.budget <= 0:
                return
            if g in draft.preempted:
                continue
            if g.lease is not None:
                self._claim(draft, g, min(g.left, draft.budget))
            elif admitting and not self._must_wait(g):
                admitting = self._admit(draft, g, behind)

    def _claim(self, draft: _Draft, g: Generation, count: int) -> None:
        """Gives a running row up to `count` tokens, as far as pages are to be had from rows of worse rank."""
        assert g.lease is not None
        stop = g.submitted + count
        if stop > len(g.lease.pages) * self._config.page_size:
            while (covered := self.cache.extend(g.lease, stop)) < stop:
                victim = gives_way_to_row(self._running, g, draft.fresh)
                if victim is None:
                    count = min(count, covered - g.submitted)
                    break
                self._preempt(draft, victim)
        if count > 0:
            draft.counts[g] = count
            draft.budget -= count

    # -- admission

    def _must_wait(self, g: Generation) -> bool:
        """Not by lack of room: paused or held, a token still on its way, or its prefix about to be written by somebody else."""
        if g.paused or g.held or g.pending:
            return True
        if g.awaits is not None:
            if self._retention.will_come(g, g.awaits):
                return True
            g.awaits = None
        return False

    def _admit(self, draft: _Draft, g: Generation, behind: list[Generation]) -> bool:
        """Gives a waiting request a row, a lease and its first tokens. False when there is no room: who comes after waits too."""
        stop = g.reach
        match = self.cache.match(g.lineage, stop - 1) if g.prompt_logprobs is None else Match()
        if match.expected is not None and self._retention.will_come(g, match.expected):
            g.awaits = match.expected
            self._counters.waits += 1
            return True
        while True:
            lease = None
            if len(self._running) < self._config.max_running:
                lease = self.cache.acquire(match, tokens=stop, reserved=self._promised(behind))
            if lease is not None:
                break
            victim = gives_way_to_arrival(self._running, g, draft.fresh)
            if victim is None:
                return False
            self._preempt(draft, victim)
        count = min(stop - lease.start, draft.budget)
        count = min(count, self.cache.extend(lease, lease.start + count) - lease.start)
        if count <= 0:
            self.cache.release(lease)
            return False
        self._start(g, lease, match)
        behind.append(g)
        draft.fresh.append(g)
        draft.counts[g] = count
        draft.budget -= count
        return True

    def _promised(self, behind: list[Generation]) -> int:
        """Pages that running rows still lack for the tokens they know."""
        return sum(self.cache.missing(g.lease, g.reach) for g in behind if g.lease is not None)

    def _start(self, g: Generation, lease: Lease, match: Match) -> None:
        del self._waiting[g]
        insort(self._running, g, key=lambda r: r.rank)
        g.status, g.lease, g.row = Status.RUNNING, lease, self._rows.take()
        g.submitted = g.computed = lease.start
        account(g, match, self._counters, enabled=self.cache.enabled)
        self._retention.announce(g)

    # -- submission

    def _submit(self, draft: _Draft) -> GroupPlan:
        copies = tuple(copy for g in draft.fresh if g.lease is not None for copy in g.lease.copies)
        new_rows = tuple(self._rows.introduce(g, self._config.page_size) for g in draft.fresh)
        flight = Flight()
        rows = tuple([self._submit_row(g, count, flight) for g, count in draft.counts.items()])
        self._flights.depart(flight)
        self._counters.steps += 1
        return GroupPlan(dropped=self._rows.dropped(), copies=copies, new_rows=new_rows, rows=rows)

    def _submit_row(self, g: Generation, count: int, flight: Flight) -> RowStep:
        assert g.lease is not None
        stop = g.submitted + count
        taken = self._retention.take(g, stop) if g.marks and g.marks[-1].position <= stop else ()
        step = self._rows.step(g, count, taken)
        flight.rows.append(FlownRow(g, g.lease, step, taken))
        if count == 1 and g.submitted >= g.prompt_len:
            self._counters.tokens_decoded += 1
        else:
            self._counters.tokens_prefilled += count
        g.submitted = stop
        g.pending += step.output is Output.SAMPLE
        self._served.charge(g.request.tenant, count)
        return step

    # -- results

    def apply(self, result: GroupResult) -> list[TokenChunk]:
        """Takes the result of the oldest plan that was not empty; returns what the streams get.

        Raises InvariantBroken when no result is awaited or a row that samples has no token.
        """
        flight = self._flights.arrive()
        results = {r.row: r for r in result.rows}
        chunks = []
        for flown in flight.rows:
            g = flown.generation
            if g.lease is flown.lease:
                g.computed = flown.step.start + flown.step.count
            if g.status is not Status.FINISHED and (chunk := self._advance(g, flown.step, results.get(flown.step.row))):
                chunks.append(chunk)
            for taken in flown.taken:
                self._retention.settle(g, taken)
        for g, taken in flight.donated:
            self._retention.settle(g, taken)
        return chunks

    def _advance(self, g: Generation, step: RowStep, result: RowResult | None) -> TokenChunk | None:
        if g.prompt_logprobs is not None and result is not None:
            g.prompt_logprobs += result.prompt_logprobs[len(g.prompt_logprobs) - step.start :]
        if step.output is Output.NONE:
            return self._finish(g, FinishReason.LENGTH) if g.budget == 0 and step.start + step.count == g.end else None
        if result is None or result.token is None:
            raise InvariantBroken(f"row {step.row} was to sample a token and has none")
        token = result.token
        g.pending -= 1
        g.lineage.ids.append(token)
        generated = g.generated
        self._counters.tokens_generated += 1
        logprobs = (result.logprob,) if result.logprob is not None else None
        if token in g.stops:
            return self._finish(g, FinishReason.STOP, (token,), logprobs)
        if generated >= g.budget:
            return self._finish(g, FinishReason.LENGTH, (token,), logprobs)
        first = g.deliver_prompt_logprobs() if g.prompt_logprobs is not None else None
        begun = g.usage if generated == len(g.request.generated) + 1 else None
        return TokenChunk(request_id=g.request.request_id, token_ids=(token,), logprobs=logprobs, prompt_logprobs=first, usage=begun)

    # -- leaving a row

    def _preempt(self, draft: _Draft, g: Generation) -> None:
        """Back to the queue: what it computed is given up, what it generated is kept."""
        assert g.lease is not None
        draft.budget += draft.counts.pop(g, 0)
        draft.preempted.add(g)
        self.cache.release(g.lease)
        self._vacate(g)
        g.status = Status.WAITING
        g.submitted = g.computed = 0
        self._waiting[g] = None
        self._counters.preemptions += 1

    def _finish(
        self, g: Generation, reason: FinishReason, tokens: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] | None = None
    ) -> TokenChunk:
        """Ends a request wherever it is. The state of its row becomes a checkpoint when every token it consumed is known."""
        g.status = Status.FINISHED
        if g.lease is None:
            del self._waiting[g]
        else:
            lease, consumed = g.lease, g.submitted
            self._vacate(g)
            if self.cache.enabled and consumed <= g.known:
                taken = self.cache.donate(lease, consumed, interval=reason is FinishReason.CANCELLED)
                if not self._flights.attach(g, lease, taken):
                    self._retention.settle(g, taken)
            else:
                self.cache.release(lease)
        del self._open[g.request.request_id]
        self._served.leave(g.request.tenant)
        self._counters.finished[reason.value] += 1
        return TokenChunk(
            request_id=g.request.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=None if reason is FinishReason.CANCELLED else g.deliver_prompt_logprobs(),
            finish=reason,
            usage=g.usage,
        )

    def _vacate(self, g: Generation) -> None:
        self._retention.abandon(g)
        self._rows.give_back(g.row)
        self._running.remove(g)
        g.lease, g.row = None, -1

    # -- inspection

    @property
    def idle(self) -> bool:
        """Nothing is open and nothing is on its way."""
        return not self._open and not self._flights

    def check(self) -> None:
        """Raises InvariantBroken when the books of requests, rows, pages, slots or checkpoints are wrong."""
        self.cache.check()
        self._rows.check(self._running)
        self._retention.check(self._running)
        if sorted(g.rank for g in self._running) != [g.rank for g in self._running]:
            raise InvariantBroken("running rows are not in order of rank")
        if set(self._open.values()) != {*self._running, *self._waiting} or len(self._open) != len(self._running) + len(self._waiting):
            raise InvariantBroken(f"{len(self._open)} open requests, {len(self._running)} run and {len(self._waiting)} wait")
        awaited = self._flights.awaited()
        for g in self._open.values():
            g.check(awaited[g])
        if self.idle and self.cache.leases:
            raise InvariantBroken(f"the group is idle, but {self.cache.leases} leases did not end")

    def stats(self) -> EngineStats:
        return EngineStats(
            **self._counters.snapshot(),  # type: ignore[arg-type]
            **self.cache.levels(),  # type: ignore[arg-type]
            running=len(self._running),
            waiting=len(self._waiting),
            paused=sum(g.paused for g in self._open.values()),
        )
