"""The loop: lockstep groups, run-ahead, sleep, ends told exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from engine.config import EngineConfig
from engine.errors import EngineFailure, InvalidRequest, InvariantBroken, K3Error, QueueFull, ReplicaLost, ShardLost
from engine.loop import EngineLoop
from engine.plan import StepPlan, StepResult
from engine.prefix import Match
from engine.types import FinishReason, TokenChunk
from tests.engine.driver import GREEDY, config, request
from tests.fake_executor import FakeExecutor, toy_stream


class Harness:
    """A running loop over the toy model; keeps what was delivered."""

    def __init__(self, settings: EngineConfig, *, groups: int = 1, **faults: object) -> None:
        self.executor = FakeExecutor(
            num_pages=settings.num_pages,
            num_slots=settings.num_slots,
            page_size=settings.page_size,
            groups=groups,
            **faults,  # type: ignore[arg-type]
        )
        self.loop = EngineLoop(settings, self.executor, deliver=self.deliver, groups=groups, check_after_s=0.0)
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.failures: dict[str, K3Error] = {}
        self.deliveries = 0
        self.news = asyncio.Event()
        self.loop.start()

    def deliver(self, chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        self.deliveries += 1
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        assert not failures.keys() & self.failures.keys()
        self.failures |= failures
        self.news.set()

    def tokens(self, name: str) -> list[int]:
        return [token for chunk in self.chunks.get(name, ()) for token in chunk.token_ids]

    def finish(self, name: str) -> FinishReason | None:
        ends = [chunk.finish for chunk in self.chunks.get(name, ()) if chunk.finish]
        assert len(ends) <= 1
        return ends[0] if ends else None

    async def until(self, name: str, tokens: int) -> None:
        while len(self.tokens(name)) < tokens:
            self.news.clear()
            await self.news.wait()

    async def ended(self, name: str) -> None:
        while self.finish(name) is None and name not in self.failures:
            self.news.clear()
            await self.news.wait()

    async def close(self) -> None:
        await self.loop.drain()
        for scheduler in self.loop.schedulers:
            scheduler.check()
            assert scheduler.idle
        await self.loop.stop()


async def settled() -> None:
    """Lets everything run that can run."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("run_ahead", [0, 1])
async def test_streams_are_those_of_unbroken_runs(groups: int, run_ahead: int) -> None:
    harness = Harness(config(run_ahead=run_ahead), groups=groups)
    for i in range(24):
        harness.loop.submit(request(f"r{i}", range(i, i + 5 + i % 7), 6, constraint="g" if i % 3 == 0 else None))
        await asyncio.sleep(0)
    await harness.loop.drain()
    for i in range(24):
        assert harness.tokens(f"r{i}") == toy_stream(range(i, i + 5 + i % 7), 6, sampling=GREEDY)
        assert harness.finish(f"r{i}") is FinishReason.LENGTH
    assert harness.executor.max_outstanding == 1 + run_ahead
    await harness.close()


async def test_idle_groups_join_every_step() -> None:
    harness = Harness(config(), groups=2)
    harness.loop.submit(request("r", range(8), 4))
    await harness.ended("r")
    assert sorted(group.consumed_tokens > 0 for group in harness.executor.groups) == [False, True]
    assert harness.executor.steps == harness.loop.stats().steps == 4
    await harness.close()


async def test_load_spreads_over_groups_and_prefixes_and_sessions_attract() -> None:
    harness = Harness(config(), groups=2)
    first = harness.loop.submit(request("a", range(30), 2, session="s"))
    second = harness.loop.submit(request("b", range(100, 110), 2))
    assert {first, second} == {0, 1}
    await harness.ended("a")
    await harness.ended("b")
    assert harness.loop.submit(request("c", [*range(30), 7], 2)) == first
    assert harness.loop.submit(request("d", [*range(100, 110), 7], 2)) == second
    assert harness.loop.submit(request("e", range(100, 110), 2, session="s")) == first
    await harness.close()
    assert harness.loop.stats().hits == 2


async def test_a_full_group_passes_on_and_all_full_refuses() -> None:
    harness = Harness(config(max_queued=1), groups=2)
    groups = [harness.loop.submit(request(f"r{i}", [i], 2, session="s")) for i in range(2)]
    assert sorted(groups) == [0, 1]
    with pytest.raises(QueueFull):
        harness.loop.submit(request("r3", [3], 2))
    await harness.close()
    assert "r3" not in harness.chunks


async def test_one_delivery_a_step_for_all_requests() -> None:
    harness = Harness(config(run_ahead=0))
    for i in range(6):
        harness.loop.submit(request(f"r{i}", [i, i], 5))
    await harness.close()
    assert harness.deliveries == harness.executor.steps == 5


async def test_it_sleeps_when_idle_and_wakes_for_the_next() -> None:
    harness = Harness(config())
    await settled()
    assert harness.executor.steps == 0
    harness.loop.submit(request("a", range(4), 2))
    await harness.ended("a")
    steps = harness.executor.steps
    await settled()
    assert harness.executor.steps == steps
    harness.loop.submit(request("b", range(4), 2))
    await harness.ended("b")
    assert harness.loop.stats().hits == 1
    await harness.close()


async def test_cancel_ends_a_stream_within_the_steps_on_their_way() -> None:
    gate = asyncio.Semaphore(0)
    harness = Harness(config(), gate=gate)
    harness.loop.submit(request("r", range(4), 50))
    harness.loop.submit(request("other", range(20, 24), 3))
    gate.release()
    await harness.until("r", 1)
    harness.loop.cancel("r")
    harness.loop.cancel("r")
    for _ in range(20):
        gate.release()
    await harness.ended("r")
    await harness.ended("other")
    assert harness.finish("r") is FinishReason.CANCELLED
    assert harness.chunks["r"][-1].usage is not None
    assert harness.tokens("other") == toy_stream(range(20, 24), 3, sampling=GREEDY)
    assert harness.executor.steps < 6
    await harness.close()


async def test_cancel_from_within_a_delivery() -> None:
    harness = Harness(config())
    kept = harness.deliver

    def deliver(chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        kept(chunks, failures)
        harness.loop.cancel("r")

    loop = EngineLoop(config(), harness.executor, deliver=deliver)
    await harness.loop.stop()
    harness.loop = loop
    loop.start()
    loop.submit(request("r", range(4), 50))
    await harness.ended("r")
    assert harness.finish("r") is FinishReason.CANCELLED
    await harness.close()


async def test_a_paused_stream_sleeps_and_goes_on() -> None:
    harness = Harness(config())
    harness.loop.submit(request("r", range(4), 40))
    await harness.until("r", 3)
    harness.loop.pause("r")
    await settled()
    held = len(harness.tokens("r"))
    await settled()
    assert len(harness.tokens("r")) == held < 10
    harness.loop.resume("r")
    await harness.ended("r")
    assert harness.tokens("r") == toy_stream(range(4), 40, sampling=GREEDY)
    await harness.close()


async def test_a_request_that_is_complete_ends_without_a_step() -> None:
    harness = Harness(config())
    whole = tuple(toy_stream(range(4), 3, sampling=GREEDY))
    harness.loop.submit(request("r", range(4), 3, generated=whole))
    await harness.ended("r")
    assert (harness.finish("r"), harness.executor.steps) == (FinishReason.LENGTH, 0)
    await harness.close()


async def test_refusals_reach_the_caller_only() -> None:
    harness = Harness(config(), groups=2)
    with pytest.raises(InvalidRequest, match="empty"):
        harness.loop.submit(request("r", []))
    harness.loop.submit(request("r", [1]))
    with pytest.raises(InvalidRequest, match="open already"):
        harness.loop.submit(request("r", [1]))
    await harness.close()
    assert Counter(len(ends) for ends in harness.chunks.values()) == {4: 1}


async def test_draining_refuses_the_new_and_ends_the_open() -> None:
    harness = Harness(config())
    harness.loop.submit(request("r", range(4), 20))
    drain = asyncio.create_task(harness.loop.drain())
    await asyncio.sleep(0)
    with pytest.raises(ReplicaLost, match="draining"):
        harness.loop.submit(request("s", range(4), 20))
    await drain
    assert harness.finish("r") is FinishReason.LENGTH
    await harness.close()


@pytest.mark.parametrize("error", [ShardLost("shard 3 died"), ValueError("a bug in the runner")], ids=["lost", "bug"])
async def test_a_lost_shard_fails_every_open_request_once(error: Exception) -> None:
    harness = Harness(config(max_running=2), fail_at=3, error=error)
    harness.loop.submit(request("done", range(4), 2))
    for i in range(4):
        harness.loop.submit(request(f"r{i}", range(50 * i, 50 * i + 4), 30))
    for i in range(4):
        await harness.ended(f"r{i}")
    assert harness.finish("done") is FinishReason.LENGTH
    assert sorted(harness.failures) == [f"r{i}" for i in range(4)]
    assert all(isinstance(failure, ShardLost) for failure in harness.failures.values())
    assert isinstance(harness.loop.failure, ShardLost)
    assert str(error) in str(harness.loop.failure)
    with pytest.raises(ShardLost):
        harness.loop.submit(request("late", range(4)))
    harness.loop.cancel("r0")
    await harness.loop.drain()
    await harness.loop.stop()
    assert isinstance(harness.loop.failure, ShardLost)


async def test_a_step_that_answers_out_of_turn_is_a_lost_shard() -> None:
    class Wrong:
        async def run(self, plan: StepPlan) -> StepResult:
            return StepResult(step=plan.step + 1, groups=())

    failures: dict[str, K3Error] = {}
    told = asyncio.Event()

    def deliver(chunks: list[TokenChunk], failed: dict[str, K3Error]) -> None:
        failures.update(failed)
        told.set()

    loop = EngineLoop(config(), Wrong(), deliver=deliver)
    loop.start()
    loop.submit(request("r", [1]))
    await told.wait()
    assert isinstance(failures["r"], ShardLost)
    await loop.stop()


async def test_a_bug_in_the_engine_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(config())

    def deliver(chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        if chunks:
            raise RuntimeError("the sender is broken")
        harness.deliver(chunks, failures)

    loop = EngineLoop(config(), harness.executor, deliver=deliver)
    await harness.loop.stop()
    harness.loop = loop
    loop.start()
    loop.submit(request("r", range(4), 9))
    await harness.ended("r")
    assert type(harness.failures["r"]) is EngineFailure
    assert "the sender is broken" in str(loop.failure)
    assert "the engine loop failed" in caplog.text
    await loop.stop()


async def test_stopping_fails_what_is_open() -> None:
    harness = Harness(config(), gate=asyncio.Semaphore(0))
    harness.loop.submit(request("r", range(4), 9))
    await settled()
    await harness.loop.stop()
    await harness.loop.stop()
    assert isinstance(harness.failures["r"], ReplicaLost)


async def test_an_import_whose_request_left_is_no_leak() -> None:
    harness = Harness(config())
    group = harness.loop.submit(request("r", range(10)), held=True)
    taken = await harness.loop.reserve(group, 8)
    assert taken is not None
    harness.loop.cancel("r")
    await harness.ended("r")
    await settled()
    assert harness.loop.failure is None
    harness.loop.discard(group, taken)
    await harness.close()


async def test_wrong_books_end_the_engine_once_it_idles() -> None:
    harness = Harness(config())
    harness.loop.submit(request("r", range(8), 3))
    await harness.ended("r")
    harness.loop.schedulers[0].cache.acquire(Match(), tokens=4, reserved=0)  # a lease that nobody runs
    harness.loop.submit(request("s", range(8), 3))
    await harness.ended("s")
    await settled()
    assert isinstance(harness.loop.failure, InvariantBroken)


async def test_figures_add_up() -> None:
    harness = Harness(config(), groups=2)
    for i in range(8):
        harness.loop.submit(request(f"r{i}", range(10 * i, 10 * i + 8), 5))
    await harness.close()
    stats = harness.loop.stats()
    assert stats.tokens_generated == sum(len(harness.tokens(f"r{i}")) for i in range(8)) == 40
    assert stats.tokens_prefilled + stats.tokens_decoded == sum(group.consumed_tokens for group in harness.executor.groups)
    assert stats.finished == {"length": 8}
    assert stats.last is not None
    assert stats.last.step == stats.steps - 1 == harness.executor.steps - 1
