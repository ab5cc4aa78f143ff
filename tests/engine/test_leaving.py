"""Requests that go away: at any point, twice, in crowds. Nothing stays behind (public reports of states leaked on abort)."""

from __future__ import annotations

import random

import pytest

from engine.types import FinishReason
from tests.engine.driver import Driver, config, request


def test_cancelled_while_queued_gives_everything_back() -> None:
    driver = Driver(config(num_slots=4, max_running=4))
    driver.add(*[request(f"r{i}", range(i, i + 12), 6) for i in range(20)])
    for i in range(0, 20, 2):
        driver.cancel(f"r{i}")
    assert driver.scheduler.stats().waiting == 10
    driver.run()
    assert driver.scheduler.stats().finished == {"cancelled": 10, "length": 10}
    driver.verify()


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("landed", [True, False])
def test_cancelled_at_each_point_of_its_life(after: int, landed: bool) -> None:
    """Queued, in each chunk of its prefill, in decode; with and without results on their way."""
    driver = Driver(config(max_batched_tokens=6, run_ahead=1))
    driver.add(request("warm", range(14), 1))
    driver.run()
    driver.add(request("r", range(30), 4, boundaries=(9,)), request("twin", range(30), 4))
    for _ in range(after):
        driver.step()
    if landed:
        while driver.awaited:
            driver.land()
    driver.cancel("r")
    driver.scheduler.check()
    driver.run()
    assert driver.finish("twin") is FinishReason.LENGTH
    driver.verify()


def test_a_cancel_is_idempotent_and_ends_a_stream_once() -> None:
    driver = Driver(config())
    driver.add(request("r", range(10), 4), request("short", range(4), 1))
    driver.step()
    for _ in range(3):
        driver.cancel("r")
    driver.cancel("never heard of")
    driver.run()
    driver.cancel("short")
    assert driver.finish("short") is FinishReason.LENGTH
    driver.verify()


def test_cancelled_while_displaced() -> None:
    driver = Driver(config(num_pages=10))
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 20) for i in range(3)])
    for _ in range(60):
        driver.step()
        if driver.scheduler.stats().preemptions:
            break
    assert driver.scheduler.stats().preemptions > 0
    driver.cancel("r2")
    driver.cancel("r1")
    driver.run()
    driver.verify()


def test_no_room_after_a_match_leaks_nothing() -> None:
    """The hit is found, the pages are not: the request waits and holds nothing."""
    driver = Driver(config(num_pages=12, num_slots=4, max_running=4))
    driver.add(request("a", range(10), 1))
    driver.run()
    driver.add(request("filler", range(500, 532), 8))
    driver.step()
    driver.add(request("hit", [*range(10), *range(70, 82)], 9))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert driver.scheduler.match(driver.scheduler.lineage(driver.requests["hit"])) == 9
    driver.cancel("hit")
    driver.run()
    driver.verify()


def test_forty_sessions_of_three_turns_return_to_the_baseline() -> None:
    driver = Driver(config(num_pages=64, num_slots=12))
    for session in range(40):
        history = [session] * 3 + [7, 8, 9]
        for turn in range(3):
            name = f"s{session}t{turn}"
            driver.add(request(name, history, 3))
            driver.run()
            history = history + driver.tokens(name) + [900 + turn]
    assert driver.scheduler.stats().hits >= 80
    driver.verify()


def test_random_disconnects_leave_the_others_alone() -> None:
    draw = random.Random(5)
    driver = Driver(config(num_pages=48, num_slots=10))
    for i in range(300):
        start = draw.randrange(6) * 10
        driver.add(request(f"r{i}", range(start, start + draw.randint(2, 25)), draw.randint(1, 12), tenant=f"t{draw.randrange(3)}"))
        for _ in range(draw.randrange(4)):
            driver.step()
        if draw.random() < 0.6:
            driver.cancel(f"r{draw.randint(max(0, i - 8), i)}")
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.finished["cancelled"] > 50
    assert stats.finished["length"] > 50
    assert stats.preemptions > 0
    assert stats.hits > 0
    driver.verify()
