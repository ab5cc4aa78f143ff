"""Runs a scheduler against the toy model, step by step, and holds every stream against an unbroken run."""

from __future__ import annotations

from collections import deque
from typing import Any

from engine.config import EngineConfig
from engine.plan import GroupPlan, GroupResult, Output
from engine.scheduler import Scheduler
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from tests.fake_executor import ZERO, FakeGroup, digest, logprob, toy_stream

GREEDY = SamplingParams(temperature=0)


def config(**changes: Any) -> EngineConfig:
    """A small engine: pages and blocks of 4 tokens, room for many rows unless told otherwise."""
    base: dict[str, Any] = {
        "max_model_len": 256,
        "page_size": 4,
        "block_size": int(changes.get("page_size", 4)),
        "num_pages": 128,
        "num_slots": 32,
        "max_running": 8,
        "max_batched_tokens": 32,
        "checkpoint_interval": 64,
    }
    return EngineConfig(**{**base, **changes})


def request(name: str, prompt: list[int] | range, max_tokens: int = 4, **fields: object) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=tuple(prompt), max_tokens=max_tokens, **{"sampling": GREEDY, **fields})  # type: ignore[arg-type]


class Driver:
    """One group. Results wait in `awaited` until `land`; `step` plans, runs and lands one step."""

    def __init__(self, config: EngineConfig, vocab: int = 1024) -> None:
        self.config = config
        self.scheduler = Scheduler(config, "toy")
        self.shards = FakeGroup(num_pages=config.num_pages, num_slots=config.num_slots, page_size=config.page_size, vocab=vocab)
        self.plans: list[GroupPlan] = []
        self.awaited: deque[tuple[GroupPlan, GroupResult]] = deque()
        self.requests: dict[str, GenerateRequest] = {}
        self.chunks: dict[str, list[TokenChunk]] = {}

    def add(self, *requests: GenerateRequest) -> None:
        for r in requests:
            chunk = self.scheduler.add(r)
            self.requests[r.request_id] = r
            self.chunks[r.request_id] = [] if chunk is None else [chunk]

    def cancel(self, name: str) -> None:
        if chunk := self.scheduler.cancel(name):
            self.chunks[name].append(chunk)

    def plan(self) -> GroupPlan:
        """Plans a step and has the shards run it; its result is awaited."""
        plan = self.scheduler.schedule()
        if not plan.empty:
            assert plan.num_tokens <= self.config.max_batched_tokens
            assert len(plan.rows) <= self.config.max_running
            self.plans.append(plan)
            self._check_constrained(plan)
            self.awaited.append((plan, self.shards.execute(plan)))
        self.scheduler.check()
        return plan

    def crash(self) -> None:
        """The shards are lost with all they hold; every open request goes on in a new engine from what it generated."""
        moved = self.scheduler.open_requests()
        self.awaited.clear()
        self.scheduler = Scheduler(self.config, "toy")
        c = self.config
        self.shards = FakeGroup(num_pages=c.num_pages, num_slots=c.num_slots, page_size=c.page_size, vocab=self.shards.vocab)
        for r in moved:
            if chunk := self.scheduler.add(r):
                self.chunks[r.request_id].append(chunk)

    def land(self) -> None:
        for chunk in self.scheduler.apply(self.awaited.popleft()[1]):
            self.chunks[chunk.request_id].append(chunk)
        self.scheduler.check()

    def step(self) -> GroupPlan:
        plan = self.plan()
        while len(self.awaited) > self.config.run_ahead or (plan.empty and self.awaited):
            self.land()
        return plan

    def run(self, limit: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            waited = bool(self.awaited)
            if self.step().empty and not waited:
                return
        raise AssertionError(f"not done after {limit} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for chunk in self.chunks[name] for token in chunk.token_ids]

    def finish(self, name: str) -> FinishReason | None:
        return self.chunks[name][-1].finish if self.chunks[name] else None

    def cached(self, name: str) -> int:
        """usage.cached_tokens of a finished request."""
        usage = self.chunks[name][-1].usage
        assert usage is not None
        return usage.cached_tokens

    def expected(self, name: str) -> list[int]:
        r = self.requests[name]
        room = min(self.config.max_model_len, self.config.num_pages * self.config.page_size) - len(r.prompt)
        whole = toy_stream(
            r.prompt,
            min(r.max_tokens, room),
            stop_token_ids=r.stop_token_ids,
            sampling=r.sampling,
            choice=r.choice,
            vocab=self.shards.vocab,
        )
        return whole[len(r.generated) :]

    def verify(self) -> None:
        """Every stream is that of an unbroken run (a beginning of it when cancelled), ends once, and nothing is leaked."""
        for name, chunks in self.chunks.items():
            ends = [chunk for chunk in chunks if chunk.finish is not None]
            assert len(ends) == 1, name
            assert ends[0] is chunks[-1], name
            usage = ends[0].usage
            assert usage is not None
            generated = len(self.requests[name].generated) + len(self.tokens(name))
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(self.requests[name].prompt), generated)
            expected = self.expected(name)
            cancelled = ends[0].finish is FinishReason.CANCELLED
            if cancelled:
                expected = expected[: len(self.tokens(name))]
            assert self.tokens(name) == expected, name
            self._verify_logprobs(name, cancelled)
        assert self.scheduler.idle
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert stats.hits + sum(stats.misses.values()) <= len(self.chunks)
        assert (stats.pages_leased, stats.slots_free + stats.slots_cached) == (0, stats.slots_total)
        self.scheduler.cache.clear()
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)

    def _verify_logprobs(self, name: str, cancelled: bool) -> None:
        """Log-probs exactly where they were asked for: the prompt's all at once, with or before the first token."""
        r, chunks = self.requests[name], self.chunks[name]
        states = [ZERO]
        tokens = [*r.prompt, *r.generated, *self.tokens(name)]
        for token in tokens:
            states.append(digest(states[-1], token))
        wanted = r.sampling.logprobs is not None
        got = [lp for chunk in chunks for lp in chunk.logprobs or ()]
        first = len(r.prompt) + len(r.generated)
        assert got == ([logprob(states[i], tokens[i]) for i in range(first, len(tokens))] if wanted else []), name
        prompt_logprobs = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
        if r.sampling.prompt_logprobs is None or r.generated or (cancelled and not self.tokens(name)):
            assert not prompt_logprobs, name
        else:
            assert prompt_logprobs == [tuple(logprob(states[i], r.prompt[i]) for i in range(1, len(r.prompt)))], name
            assert chunks[0].prompt_logprobs is not None, name

    def _check_constrained(self, plan: GroupPlan) -> None:
        sampled: set[int] = set()
        for other in [*(p for p, _ in self.awaited), plan]:
            sampled -= {row.row for row in other.new_rows}
            if other is not plan:
                sampled |= {step.row for step in other.rows if step.output is Output.SAMPLE}
        for row in sampled & {step.row for step in plan.rows}:
            assert self.shards.rows[row].new.constraint is None, f"row {row} runs ahead of its mask"
