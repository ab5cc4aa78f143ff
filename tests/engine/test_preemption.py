"""Pages and slots that run out: nobody gets an error, everybody gets the same stream, the best ranked always gets on."""

from __future__ import annotations

import pytest

from engine.types import FinishReason, SamplingParams
from tests.engine.driver import Driver, config, request


def tight(**changes: int | bool) -> Driver:
    """Ten pages of four tokens: two requests of 20 tokens fill it."""
    return Driver(config(num_pages=10, num_slots=8, **changes))


def test_streams_survive_a_pool_that_holds_two_of_six() -> None:
    driver = tight()
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 20) for i in range(6)])
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.finished == {"length": 6}
    driver.verify()


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sampled_streams_with_logprobs_survive_as_well(run_ahead: int, prefix_cache: bool) -> None:
    driver = tight(run_ahead=run_ahead, prefix_cache=prefix_cache)
    sampling = SamplingParams(seed=7, logprobs=1, prompt_logprobs=1)
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 20, sampling=sampling, choice=i) for i in range(4)])
    driver.run()
    assert driver.scheduler.stats().preemptions > 0
    driver.verify()


def test_the_latest_gives_way_and_the_first_never_does() -> None:
    driver = tight(run_ahead=0)
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 20) for i in range(3)])
    ends: list[str] = []
    for _ in range(200):
        driver.step()
        ends += [name for name in driver.chunks if driver.finish(name) and name not in ends]
    assert ends == ["r0", "r1", "r2"]
    introduced = [row.tokens[0] for plan in driver.plans for row in plan.new_rows]
    assert introduced.count(0) == 1
    assert introduced.count(100) > 1
    driver.verify()


def test_usage_counts_what_was_cached_at_first_only() -> None:
    driver = tight()
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 20) for i in range(3)])
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.preemptions > 0
    assert [driver.cached(f"r{i}") for i in range(3)] == [0, 0, 0]
    assert (stats.hits, stats.misses) == (0, {"never_seen": 3})
    driver.verify()


def test_recomputation_starts_at_the_best_surviving_checkpoint() -> None:
    """Displaced by a row that is needed, not by pages: the prompt's end is still there."""
    driver = Driver(config(max_running=1, run_ahead=0))
    driver.add(request("low", range(30), 10, priority=1))
    for _ in range(5):
        driver.step()
    driver.add(request("high", range(500, 510), 3, priority=0))
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.preemptions, stats.tokens_resumed) == (1, 29)
    driver.verify()


def test_a_better_priority_takes_the_row_of_a_worse_one_at_once() -> None:
    driver = Driver(config(max_running=2, run_ahead=0))
    driver.add(*[request(f"low{i}", range(50 * i, 50 * i + 10), 20, priority=1) for i in range(2)])
    for _ in range(4):
        driver.step()
    driver.add(request("high", range(900, 910), 2, priority=0))
    plan = driver.step()
    assert [row.tokens[0] for row in plan.new_rows] == [900]
    assert plan.dropped == (1,)  # the later of the two
    driver.run()
    driver.verify()


def test_the_same_priority_waits_its_turn() -> None:
    driver = Driver(config(max_running=2, run_ahead=0))
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 20) for i in range(4)])
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    driver.verify()


def test_rows_that_lack_slots_wait() -> None:
    driver = Driver(config(num_slots=2))
    driver.add(*[request(f"r{i}", range(50 * i, 50 * i + 10), 5) for i in range(5)])
    driver.run()
    assert driver.shards.max_rows <= 2
    driver.verify()


def test_a_stream_of_arrivals_does_not_starve_the_displaced() -> None:
    driver = tight()
    driver.add(request("first", range(10), 25), request("second", range(100, 110), 25))
    for i in range(60):
        driver.add(request(f"late{i}", range(200 + i, 206 + i), 4, tenant=f"t{i % 5}"))
        driver.step()
    for _ in range(150):
        driver.step()
        if driver.finish("second"):
            break
    assert driver.finish("first") is FinishReason.LENGTH
    assert driver.finish("second") is FinishReason.LENGTH
    driver.run()
    driver.verify()


def test_a_paused_row_gives_way_whatever_its_rank() -> None:
    driver = tight()
    driver.add(request("slow", range(10), 28, priority=-1))
    for _ in range(20):
        driver.step()
    driver.scheduler.pause("slow")
    driver.add(request("other", range(100, 110), 28))
    driver.run()
    assert driver.finish("other") is FinishReason.LENGTH
    assert driver.finish("slow") is None
    assert driver.scheduler.stats().preemptions == 1
    driver.scheduler.resume("slow")
    driver.run()
    driver.verify()


def test_many_slow_readers_do_not_keep_the_rows() -> None:
    driver = Driver(config(max_running=2))
    driver.add(*[request(f"slow{i}", range(50 * i, 50 * i + 10), 20) for i in range(2)])
    for _ in range(3):
        driver.step()
    for i in range(2):
        driver.scheduler.pause(f"slow{i}")
    driver.add(request("quick", range(900, 910), 5, priority=3))
    driver.run()
    assert driver.finish("quick") is FinishReason.LENGTH
    for i in range(2):
        driver.scheduler.resume(f"slow{i}")
    driver.run()
    driver.verify()


def test_a_paused_stream_stalls_alone_and_goes_on_where_it_was() -> None:
    driver = Driver(config())
    driver.add(request("slow", range(10), 20), request("quick", range(100, 110), 20))
    for _ in range(4):
        driver.step()
    driver.scheduler.pause("slow")
    driver.run()
    held = len(driver.tokens("slow"))
    assert held < 20
    assert driver.finish("quick") is FinishReason.LENGTH
    assert driver.scheduler.stats().paused == 1
    driver.scheduler.resume("slow")
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    driver.verify()
