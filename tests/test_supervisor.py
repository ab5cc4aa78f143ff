"""Recovery without Ray: a group that is lost and formed again, as often as it may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.bundle_stats import BundleCounters
from deployments.spec import EngineSpec, RecoverySpec
from deployments.supervisor import Supervisor
from engine.errors import EngineFailure, K3Error, QueueFull, ReplicaLost, ShardLost
from engine.plan import StepPlan, StepResult
from engine.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk, Usage
from tests.engine.driver import GREEDY
from tests.fake_executor import FakeExecutor, toy_stream
from tests.specs import engine_spec

PROMPT = tuple(range(1, 22))


def spec(attempts: int = 5, window_s: float = 300.0) -> EngineSpec:
    return engine_spec(recovery=RecoverySpec(attempts=attempts, window_s=window_s))


class ToyGroup:
    """A toy executor that can be lost: at a step, or at any time by `lose`. `reform` fails as often as told."""

    def __init__(self, lose_at: tuple[int, ...] = (), reform_failures: int = 0) -> None:
        self.bytes_loaded = [100, 0]
        self.replaced = 0
        self.on_lost: Callable[[ShardLost], None] | None = None
        self.formed = 1
        self.steps = 0
        self.lose_at = lose_at
        self.reform_failures = reform_failures
        self.may_reform = asyncio.Event()
        self.may_reform.set()
        self._inner = self._fresh()

    def _fresh(self) -> FakeExecutor:
        return FakeExecutor(num_pages=128, num_slots=32, page_size=4)

    async def run(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.steps in self.lose_at:
            raise ShardLost(f"shard 1 died at step {self.steps}")
        return await self._inner.run(plan)

    async def reform(self) -> None:
        self.replaced += 1
        await self.may_reform.wait()
        if self.reform_failures:
            self.reform_failures -= 1
            raise ShardLost("another one died meanwhile")
        self.formed += 1
        self._inner = self._fresh()


class Harness:
    def __init__(
        self, group: ToyGroup, made: EngineSpec | None = None, clock: Callable[[], float] = lambda: 0.0, mended: bool = True
    ) -> None:
        self.spec = made or spec()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenChunk | K3Error] = {}
        self.counters = BundleCounters()
        self.engine = Supervisor(
            self.spec,
            group,
            deliver=self.deliver,
            counters=self.counters,
            group=group if mended else None,
            clock=clock,
            backoff_s=0.0,
        )

    def deliver(self, chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        for chunk in chunks:
            assert chunk.request_id not in self.ends
            self.tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if chunk.finish is not None:
                self.ends[chunk.request_id] = chunk
        for name, error in failures.items():
            assert name not in self.ends
            self.ends[name] = error

    def ask(self, name: str, max_tokens: int = 30, **fields: Any) -> None:
        self.engine.submit(
            GenerateRequest(**{"request_id": name, "prompt": PROMPT, "max_tokens": max_tokens, "sampling": GREEDY, **fields})
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not come to that")

    async def ended(self, *names: str) -> None:
        await self.until(lambda: all(name in self.ends for name in names))


@pytest.mark.parametrize("lose_at", [(1,), (2,), (7,), (7, 8), (3, 12, 20), (5, 6, 7, 8)])
async def test_streams_go_on_with_the_same_tokens(lose_at: tuple[int, ...]) -> None:
    harness = Harness(ToyGroup(lose_at))
    sampled = SamplingParams(seed=4)
    harness.ask("greedy")
    harness.ask("sampled", sampling=sampled)
    harness.ask("short", 2)
    await harness.ended("greedy", "sampled", "short")
    assert harness.tokens["greedy"] == toy_stream(PROMPT, 30, sampling=GREEDY)
    assert harness.tokens["sampled"] == toy_stream(PROMPT, 30, sampling=sampled)
    assert harness.tokens["short"] == toy_stream(PROMPT, 2, sampling=GREEDY)
    assert harness.counters.recoveries >= 1
    stats = harness.engine.stats()
    assert stats.finished == {"length": 3}
    assert stats.tokens_generated == 62
    assert stats.pages_total == 128, "levels are those of now"
    for name in ("greedy", "sampled", "short"):
        end = harness.ends[name]
        assert isinstance(end, TokenChunk)
        assert end.usage is not None
        assert end.usage.completion_tokens == len(harness.tokens[name])
    assert set(harness.counters.requests_moved) <= {"prefill", "decode"}
    assert sum(harness.counters.requests_moved.values()) >= harness.counters.recoveries
    assert stats.tokens_cached == sum(e.usage.cached_tokens for e in harness.ends.values() if isinstance(e, TokenChunk) and e.usage)
    await harness.engine.stop()


async def test_an_attempt_that_fails_is_followed_by_another() -> None:
    group = ToyGroup((4,), reform_failures=2)
    harness = Harness(group)
    harness.ask("r")
    await harness.ended("r")
    assert harness.tokens["r"] == toy_stream(PROMPT, 30, sampling=GREEDY)
    counters = harness.counters
    assert (counters.recoveries, counters.recoveries_failed, counters.shards_replaced) == (1, 2, 3)
    assert counters.weights_reread_bytes == 100
    await harness.engine.stop()


async def test_attempts_are_bounded_and_the_end_is_clear() -> None:
    harness = Harness(ToyGroup((4,), reform_failures=9), spec(attempts=3))
    harness.ask("a")
    harness.ask("b")
    await harness.ended("a", "b")
    assert isinstance(harness.ends["a"], ShardLost)
    assert "3 recoveries within 300 s are used up; last: another one died meanwhile" in str(harness.ends["a"])
    assert isinstance(harness.engine.failure, EngineFailure)
    with pytest.raises(ShardLost):
        harness.ask("c")
    await harness.engine.stop()


async def test_streams_are_handed_over_and_go_on_elsewhere_with_the_same_tokens() -> None:
    first, second = Harness(ToyGroup()), Harness(ToyGroup())
    for name in ("a", "b"):
        first.ask(name)
    first.ask("short", 2)
    await first.ended("short")
    await first.until(lambda: len(first.tokens["a"]) > 5)
    first.ask("fresh")
    assert await first.engine.hand_over(1.0) == 3
    for name in ("a", "b", "fresh"):
        assert isinstance(first.ends[name], ReplicaLost)
        passed = tuple(first.tokens.get(name, ()))
        assert len(passed) < 30
        second.ask(name, generated=passed)
    with pytest.raises(ReplicaLost):
        first.ask("late")
    await second.ended("a", "b", "fresh")
    for name in ("a", "b", "fresh"):
        assert [*first.tokens.get(name, ()), *second.tokens[name]] == toy_stream(PROMPT, 30, sampling=GREEDY)
    assert await first.engine.hand_over(1.0) == 0
    await first.engine.stop()
    await second.engine.stop()


async def test_handing_over_in_the_middle_of_a_recovery_moves_everybody() -> None:
    group = ToyGroup(lose_at=(3,))
    group.may_reform.clear()
    harness = Harness(group)
    harness.ask("a")
    await harness.until(lambda: group.replaced == 1)
    await harness.engine.hand_over(1.0)
    assert isinstance(harness.ends["a"], ReplicaLost)
    group.may_reform.set()
    await harness.engine.stop()


async def test_attempts_long_ago_do_not_count() -> None:
    now = [0.0]
    group = ToyGroup(lose_at=(3, 10, 17, 24))
    harness = Harness(group, spec(attempts=1, window_s=10), clock=lambda: now[0])
    for i in range(4):
        now[0] += 11
        harness.ask(f"r{i}", 4)
        await harness.ended(f"r{i}")
        assert harness.tokens[f"r{i}"] == toy_stream(PROMPT, 4, sampling=GREEDY)
    assert harness.counters.recoveries >= 2
    await harness.engine.stop()


async def test_a_loss_while_idle_is_mended_before_the_next_request() -> None:
    group = ToyGroup()
    harness = Harness(group)
    assert group.on_lost is not None
    group.on_lost(ShardLost("no answer"))
    await harness.until(lambda: harness.counters.recoveries == 1)
    harness.ask("r", 3)
    await harness.ended("r")
    assert harness.tokens["r"] == toy_stream(PROMPT, 3, sampling=GREEDY)
    await harness.engine.stop()


async def test_during_a_recovery_requests_wait_and_can_be_cancelled_and_paused() -> None:
    group = ToyGroup((6,))
    group.may_reform.clear()
    harness = Harness(group)
    harness.ask("early")
    harness.ask("leaves")
    await harness.until(lambda: group.replaced == 1)
    so_far = len(harness.tokens["leaves"])
    harness.ask("late", 3)
    harness.ask("slow", 3)
    harness.engine.cancel("leaves")
    harness.engine.pause("slow")
    end = harness.ends["leaves"]
    assert isinstance(end, TokenChunk)
    told = Usage(prompt_tokens=21, cached_tokens=20, completion_tokens=so_far, resume_source="device")
    assert (end.finish, end.usage) == (FinishReason.CANCELLED, told)
    group.may_reform.set()
    await harness.ended("early", "late")
    assert harness.tokens["early"] == toy_stream(PROMPT, 30, sampling=GREEDY)
    assert "slow" not in harness.ends
    harness.engine.resume("slow")
    await harness.ended("slow")
    await harness.engine.stop()


async def test_more_than_the_queue_holds_is_refused_during_a_recovery() -> None:
    group = ToyGroup((1,))
    group.may_reform.clear()
    harness = Harness(group)
    harness.ask("r0")
    await harness.until(lambda: group.replaced == 1)
    room = harness.spec.engine.max_queued + harness.spec.engine.max_running
    for i in range(1, room):
        harness.ask(f"r{i}")
    with pytest.raises(QueueFull):
        harness.ask("one too many")
    await harness.engine.stop()


async def test_stopping_in_the_middle_of_a_recovery_tells_everybody() -> None:
    group = ToyGroup((4,))
    group.may_reform.clear()
    harness = Harness(group)
    harness.ask("r")
    await harness.until(lambda: group.replaced == 1)
    await harness.engine.stop()
    assert isinstance(harness.ends["r"], ReplicaLost)


async def test_without_a_group_that_can_be_formed_again_a_loss_is_final() -> None:
    harness = Harness(ToyGroup((4,)), mended=False)
    harness.ask("r")
    await harness.ended("r")
    assert isinstance(harness.ends["r"], ShardLost)
    assert isinstance(harness.engine.failure, ShardLost)
    await harness.engine.stop()
