"""States that leave and come beside the steps: what is told, what is pinned, what a reservation is, and what a moved stream remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.errors import InvariantBroken, ShardLost
from engine.loop import EngineLoop
from engine.retention import Written
from engine.types import FinishReason, GenerateRequest, TokenChunk, Usage
from tests.engine.driver import GREEDY, Driver, config, request
from tests.fake_executor import FakeExecutor, Misuse, toy_stream

PROMPT = range(1, 22)


def positions(driver: Driver) -> list[tuple[int, bool]]:
    return [(w.position, w.ended) for w in driver.scheduler.take_written()]


def move(source: Driver, target: Driver, name: str, at: int) -> None:
    """A checkpoint of `source` becomes one of `target`, for a request that waits there held."""
    lineage = source.scheduler.lineage(replace(source.requests[name], generated=tuple(source.tokens(name))))
    checkpoint = source.scheduler.cache.pin(lineage.at(at))
    assert checkpoint is not None
    stored = source.shards.export(checkpoint.slot, checkpoint.pages, at)
    source.scheduler.cache.unpin(checkpoint)
    taken = target.scheduler.cache.reserve_import(at)
    assert taken is not None
    target.shards.restore(taken.slot, taken.pages, stored)
    target.scheduler.cache.commit(taken, lineage, "store")


def test_checkpoints_are_told_once_they_are_visible() -> None:
    driver = Driver(config(checkpoint_decode_interval=8))
    driver.add(request("r", PROMPT, 20))
    driver.step()
    assert positions(driver) == []
    driver.run()
    assert positions(driver) == [(20, False), (24, False), (32, False), (40, True), (40, True)], "the last interval and the row's own state"
    assert positions(driver) == []


def test_a_cancelled_rows_state_is_told_even_when_no_step_follows() -> None:
    driver = Driver(config(run_ahead=0))
    driver.add(request("r", PROMPT, 20))
    for _ in range(3):
        driver.step()
    driver.scheduler.take_written()
    driver.cancel("r")
    assert positions(driver) == [(23, True)]


def test_a_pinned_checkpoint_outlives_pressure_and_an_unpinned_one_does_not() -> None:
    driver = Driver(config(num_slots=3, num_pages=16))
    driver.add(request("r", PROMPT, 2))
    driver.run()
    cache = driver.scheduler.cache
    key = driver.scheduler.lineage(request("r", PROMPT)).at(20)
    pinned = cache.pin(key)
    assert pinned is not None
    cache.clear()
    assert cache.pin(b"nothing") is None
    driver.add(request("other", range(100, 130), 6))
    driver.run()
    assert cache.index.get(key) is pinned
    assert driver.shards.export(pinned.slot, pinned.pages, 20)
    cache.unpin(pinned)
    cache.clear()
    assert cache.index.get(key) is None
    driver.verify()


def test_an_imported_state_is_resumed_and_says_where_it_came_from() -> None:
    first, second = Driver(config()), Driver(config(page_size=8, block_size=4))  # pages of another size, the same blocks
    first.add(request("r", PROMPT, 6))
    first.run()
    second.add(request("r", PROMPT, 6))
    second.scheduler.pause("r")
    move(first, second, "r", 20)
    second.scheduler.resume("r")
    second.run()
    assert second.tokens("r") == first.tokens("r")
    usage = second.chunks["r"][-1].usage
    assert usage == Usage(prompt_tokens=21, cached_tokens=20, completion_tokens=6, resume_source="store")
    second.add(request("again", PROMPT, 6))
    second.run()
    usage = second.chunks["again"][-1].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.resume_source) == (20, "device")
    second.verify()


def test_a_reservation_is_kept_from_others_until_it_is_given_back() -> None:
    driver = Driver(config(num_slots=2, num_pages=8))
    cache = driver.scheduler.cache
    taken = cache.reserve_import(29)
    assert taken is not None
    assert len(taken.pages) == 8
    assert cache.reserve_import(1) is None
    driver.add(request("r", range(9), 3))
    assert driver.plan().empty
    cache.discard(taken)
    driver.run()
    driver.verify()
    with pytest.raises(InvariantBroken):
        cache.discard(taken)


def test_a_second_state_of_one_lineage_is_dropped() -> None:
    driver = Driver(config())
    driver.add(request("r", PROMPT, 4))
    driver.run()
    lineage = driver.scheduler.lineage(request("r", PROMPT))
    taken = driver.scheduler.cache.reserve_import(20)
    assert taken is not None
    assert not driver.scheduler.cache.commit(taken, lineage, "store")
    driver.verify()


def test_an_import_of_garbage_would_be_found_by_the_toy_model() -> None:
    """The fake is strict about what it is given: a state of another prefix fails the first step that reads it."""
    first, second = Driver(config()), Driver(config())
    first.add(request("r", range(50, 71), 4))
    first.run()
    lineage = first.scheduler.lineage(first.requests["r"])
    checkpoint = first.scheduler.cache.pin(lineage.at(20))
    assert checkpoint is not None
    wrong = first.shards.export(checkpoint.slot, checkpoint.pages, 20)
    second.add(request("s", PROMPT, 4))
    taken = second.scheduler.cache.reserve_import(20)
    assert taken is not None
    second.shards.restore(taken.slot, taken.pages, wrong)
    second.scheduler.cache.commit(taken, second.scheduler.lineage(second.requests["s"]), "store")
    with pytest.raises(Misuse, match="does not hold the row's state"):
        second.run()


def test_a_held_request_waits_and_says_why_nothing_came() -> None:
    driver = Driver(config())
    driver.scheduler.add(request("r", PROMPT, 3), held=True)
    driver.chunks["r"], driver.requests["r"] = [], request("r", PROMPT, 3)
    assert driver.plan().empty
    driver.scheduler.release("r", "digest")
    driver.run()
    usage = driver.chunks["r"][-1].usage
    assert usage is not None
    assert usage.miss_reason == "digest"
    assert driver.scheduler.stats().misses == {"digest": 1}
    driver.verify()


def test_a_moved_stream_keeps_its_usage_and_is_counted_as_computed_again() -> None:
    first = Driver(config())
    first.add(request("warm", PROMPT, 2), request("r", PROMPT, 12))
    for _ in range(8):
        first.step()
    [moved] = first.scheduler.open_requests()
    assert moved.admitted is not None
    assert moved.admitted.cached_tokens == 20
    assert 0 < len(moved.generated) < 12
    second = Driver(config())
    second.add(moved)
    second.run()
    assert (*moved.generated, *second.tokens("r")) == tuple(toy_stream(PROMPT, 12, sampling=GREEDY))
    usage = second.chunks["r"][-1].usage
    assert usage is not None
    assert (usage.cached_tokens, usage.resume_source, usage.completion_tokens) == (20, "device", 12)
    stats = second.scheduler.stats()
    assert (stats.tokens_cached, stats.hits, stats.misses, stats.tokens_recomputed) == (0, 0, {}, 21 + len(moved.generated))


class Ends:
    """Collects what a loop delivers."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.failed: dict[str, Exception] = {}
        self.written: list[tuple[int, Written]] = []

    def deliver(self, chunks: list[TokenChunk], failures: dict[str, Exception]) -> None:
        for chunk in chunks:
            self.tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if chunk.finish is not None:
                self.finished[chunk.request_id] = chunk.finish
        self.failed |= failures

    def hear(self, group: int, written: list[Written]) -> None:
        self.written += [(group, w) for w in written]


def loop_on(executor: FakeExecutor, ends: Ends, **changes: int) -> EngineLoop:
    loop = EngineLoop(config(**changes), executor, deliver=ends.deliver, on_written=ends.hear, fingerprint="toy", check_after_s=0.0)
    loop.start()
    return loop


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


async def test_a_reservation_waits_for_the_steps_that_may_use_it_still() -> None:
    gate, ends = asyncio.Semaphore(0), Ends()
    loop = loop_on(FakeExecutor(num_pages=128, num_slots=32, page_size=4, gate=gate), ends)
    loop.submit(GenerateRequest(request_id="r", prompt=tuple(PROMPT), max_tokens=40, sampling=GREEDY))
    await asyncio.sleep(0.01)  # two steps are on their way and stand at the gate
    reserving = asyncio.ensure_future(loop.reserve(0, 20))
    await asyncio.sleep(0.01)
    assert not reserving.done()
    gate.release()
    await asyncio.sleep(0.01)
    assert not reserving.done(), "the second step was planned before the reservation too"
    gate.release()
    taken = await reserving
    assert taken is not None
    loop.discard(0, taken)
    for _ in range(60):
        gate.release()
    await loop.drain()
    assert ends.tokens["r"] == toy_stream(PROMPT, 40, sampling=GREEDY)
    assert [(group, w.position) for group, w in ends.written] == [(0, 20), (0, 60)]
    await loop.stop()


async def test_a_request_without_room_goes_on_when_a_pin_is_taken_off() -> None:
    ends = Ends()
    loop = loop_on(FakeExecutor(num_pages=8, num_slots=2, page_size=4), ends, num_pages=8, num_slots=2, max_running=1)
    loop.submit(GenerateRequest(request_id="first", prompt=tuple(range(20)), max_tokens=4, sampling=GREEDY))
    await until(lambda: "first" in ends.finished)
    checkpoint = loop.pin(0, ends.written[-1][1].lineage.at(ends.written[-1][1].position))
    assert checkpoint is not None
    loop.submit(GenerateRequest(request_id="second", prompt=tuple(range(50, 70)), max_tokens=4, sampling=GREEDY))
    for _ in range(50):
        await asyncio.sleep(0)
    assert "second" not in ends.finished
    loop.unpin(0, checkpoint)
    await loop.drain()
    assert ends.tokens["second"] == toy_stream(range(50, 70), 4, sampling=GREEDY)
    await loop.stop()


async def test_a_loop_that_is_woken_and_stopped_at_once_does_stop() -> None:
    ends = Ends()
    loop = loop_on(FakeExecutor(num_pages=128, num_slots=32, page_size=4), ends)
    loop.submit(GenerateRequest(request_id="r", prompt=tuple(PROMPT), max_tokens=2, sampling=GREEDY))
    await until(lambda: "r" in ends.finished)
    for _ in range(5):  # it sleeps
        await asyncio.sleep(0)
    checkpoint = loop.pin(0, ends.written[-1][1].lineage.at(ends.written[-1][1].position))
    assert checkpoint is not None
    loop.unpin(0, checkpoint)
    async with asyncio.timeout(5):
        await loop.stop()


async def test_an_aborted_loop_tells_at_once_and_gives_its_requests_away() -> None:
    gate, ends = asyncio.Semaphore(4), Ends()
    loop = loop_on(FakeExecutor(num_pages=128, num_slots=32, page_size=4, gate=gate), ends)
    loop.submit(GenerateRequest(request_id="r", prompt=tuple(PROMPT), max_tokens=40, sampling=GREEDY))
    await until(lambda: len(ends.tokens.get("r", ())) >= 3)
    loop.abort(ShardLost("gone"))
    assert isinstance(ends.failed["r"], ShardLost)
    [moved] = loop.open_requests()
    assert list(moved.generated) == ends.tokens["r"]
    with pytest.raises(ShardLost, match="gone"):
        loop.submit(GenerateRequest(request_id="s", prompt=(1,), max_tokens=1))
    await loop.stop()
