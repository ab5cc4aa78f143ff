"""Prefix reuse: where a resume starts, what is copied, who waits for whom, and why nothing was found."""

from __future__ import annotations

import numpy as np
import pytest

from engine.types import SamplingParams
from tests.engine.driver import GREEDY, Driver, config, request
from tests.fake_executor import toy_stream

B = 16  # page size and checkpoint interval of the boundary cases


def run_one(driver: Driver, name: str, prompt: list[int] | range, max_tokens: int = 4, **fields: object) -> int:
    """Runs a request alone; returns its cached tokens."""
    driver.add(request(name, prompt, max_tokens, **fields))
    driver.run()
    return driver.cached(name)


@pytest.mark.parametrize("length", [2 * B - 1, 2 * B, 2 * B + 1, 3 * B - 1, 3 * B, 3 * B + 1])
@pytest.mark.parametrize("more", [1, 2])
def test_a_prompt_that_ends_at_a_block_is_reused_to_its_last_token(length: int, more: int) -> None:
    driver = Driver(config(page_size=B, num_pages=32, checkpoint_interval=B))
    assert run_one(driver, "first", range(length)) == 0
    cached = run_one(driver, "next", [*range(length), *range(900, 900 + more)])
    assert cached == (length if length % B == 0 else length - 1)
    driver.verify()


def test_the_same_prompt_again_computes_one_token() -> None:
    driver = Driver(config())
    assert [run_one(driver, name, range(21)) for name in "abc"] == [0, 20, 20]
    assert driver.plans[-4].rows[0].count == 1
    assert driver.shards.copied_slots == 2
    assert driver.shards.copied_pages == 0  # 20 is a boundary: nothing half written
    driver.verify()


def test_tenants_share_a_marked_prefix_and_nothing_else() -> None:
    system = [*range(21)]
    driver = Driver(config(shared_prefixes=(np.asarray(system, "<u4").tobytes(),)))
    assert run_one(driver, "a", [*system, 500, 501, 502], tenant="a") == 0
    assert run_one(driver, "b", [*system, 500, 501, 502], tenant="b") == 20, (
        "the full blocks of the prefix; the same tokens behind it are not"
    )
    assert run_one(driver, "again", [*system, 500, 501, 502], tenant="a") == 23
    assert driver.tokens("b") == toy_stream([*system, 500, 501, 502], 4, sampling=GREEDY)
    driver.verify()


def test_a_resume_inside_a_page_works_on_a_copy() -> None:
    driver = Driver(config())
    prompt = [*range(22)]
    run_one(driver, "a", prompt)
    first = toy_stream(prompt, 4, sampling=GREEDY)
    # The first goes on behind 21 in the page that the second resumes in, and so does the second.
    assert run_one(driver, "b", [*prompt, 700, 701]) == 21
    assert run_one(driver, "c", prompt) == 21
    assert driver.tokens("c") == first
    assert driver.shards.copied_pages == 2
    driver.verify()


def test_the_next_turn_resumes_behind_the_answer() -> None:
    """Ten turns, nine hits; each computes its new tokens only."""
    driver = Driver(config(num_pages=200, max_model_len=512))
    history: list[int] = []
    for turn in range(10):
        history += [800 + turn] * 5
        cached = run_one(driver, f"t{turn}", history, 6)
        assert cached == (len(history) - 6 if turn else 0)  # all but the last sampled token and the five new ones
        history += driver.tokens(f"t{turn}")
    assert driver.scheduler.stats().hits == 9
    driver.verify()


def test_behind_a_stop_token_the_next_turn_computes_only_what_is_new() -> None:
    """The stop token ran ahead, so the kept state has consumed it."""
    prompt = list(range(9))
    stop = toy_stream(prompt, 3, sampling=GREEDY)[-1]
    driver = Driver(config(run_ahead=1))
    run_one(driver, "a", prompt, 9, stop_token_ids=(stop,))
    history = prompt + driver.tokens("a")
    assert run_one(driver, "b", [*history, 77, 78]) == len(history)
    driver.verify()


def test_an_ended_rows_state_is_used_only_when_its_last_step_has_landed() -> None:
    prompt = list(range(9))
    stop = toy_stream(prompt, 1, sampling=GREEDY)[0]
    driver = Driver(config(run_ahead=1))
    driver.add(request("a", prompt, 9, stop_token_ids=(stop,)))
    driver.plan()
    driver.plan()  # consumes the stop token
    driver.land()
    assert driver.finish("a") is not None
    lineage = driver.scheduler.lineage(request("b", [*prompt, stop, 77]))
    assert driver.scheduler.match(lineage) == 8
    driver.land()
    assert driver.scheduler.match(lineage) == 10
    driver.verify()


def test_boundaries_that_the_renderer_marks_are_kept() -> None:
    driver = Driver(config())
    run_one(driver, "a", range(30), boundaries=(18,))
    assert run_one(driver, "b", [*range(18), 500, 501, 502]) == 18
    driver.verify()


def test_the_second_sighting_keeps_a_shared_beginning_and_the_third_uses_it() -> None:
    driver = Driver(config())
    system = list(range(22))
    cached = [run_one(driver, name, [*system, 500 + i, 600 + i]) for i, name in enumerate("abcd")]
    assert cached == [0, 0, 20, 20]
    stats = driver.scheduler.stats()
    assert stats.misses == {"never_seen": 1, "no_state_at_boundary": 1}
    assert stats.hits == 2
    driver.verify()


def test_intervals_serve_prompts_that_part_in_the_middle() -> None:
    driver = Driver(config(checkpoint_interval=8))
    run_one(driver, "a", range(40))
    assert run_one(driver, "b", [*range(27), 500]) == 24
    driver.verify()


def test_shared_beginning_without_a_checkpoint_says_so() -> None:
    """Two prompts that share 90 percent, and no state on the way."""
    driver = Driver(config())
    run_one(driver, "a", range(40))
    assert run_one(driver, "b", [*range(36), 500, 501]) == 0
    assert driver.scheduler.stats().misses == {"never_seen": 1, "no_state_at_boundary": 1}
    driver.verify()


def test_what_was_evicted_says_so() -> None:
    driver = Driver(config())
    run_one(driver, "a", range(21))
    driver.scheduler.cache.clear()
    assert run_one(driver, "b", range(21)) == 0
    assert driver.scheduler.stats().misses == {"never_seen": 1, "evicted": 1}
    driver.verify()


def test_switched_off_says_so() -> None:
    driver = Driver(config(prefix_cache=False))
    assert [run_one(driver, name, range(21)) for name in "ab"] == [0, 0]
    stats = driver.scheduler.stats()
    assert (stats.misses, stats.checkpoints, stats.slots_cached) == ({"disabled": 2}, 0, 0)
    driver.verify()


def test_tenants_do_not_reach_each_others_prefixes() -> None:
    driver = Driver(config())
    assert [run_one(driver, f"{tenant}{i}", range(21), tenant=tenant) for i in range(2) for tenant in ("a", "b", "")] == [
        0,
        0,
        0,
        20,
        20,
        20,
    ]
    assert driver.scheduler.stats().misses == {"never_seen": 3}
    driver.verify()


def test_warm_equals_cold_over_many_lengths() -> None:
    """Includes lengths where one token is left to compute."""
    driver = Driver(config(num_pages=400, num_slots=64))
    for length in range(1, 40):
        run_one(driver, f"cold{length}", range(100, 100 + length))
        run_one(driver, f"warm{length}", range(100, 100 + length), sampling=SamplingParams(seed=3), choice=1)
    assert driver.scheduler.stats().hits >= 38
    driver.verify()


# -- several at once


def test_choices_of_one_prompt_are_one_prefill() -> None:
    driver = Driver(config(max_batched_tokens=8))
    driver.add(*[request(f"c{i}", range(30), 6, choice=i, sampling=SamplingParams(seed=1)) for i in range(5)])
    driver.run()
    assert [driver.cached(f"c{i}") for i in range(5)] == [0, 29, 29, 29, 29]
    assert len({tuple(driver.tokens(f"c{i}")) for i in range(5)}) == 5
    stats = driver.scheduler.stats()
    assert (stats.hits, stats.waits) == (4, 4)
    assert stats.tokens_prefilled == 30 + 4
    driver.verify()


def test_a_burst_behind_one_system_prompt_computes_it_once() -> None:
    driver = Driver(config(max_batched_tokens=8))
    driver.add(*[request(f"r{i}", [*range(41), 500 + i, 600 + i], 3) for i in range(6)])
    driver.run()
    assert [driver.cached(f"r{i}") for i in range(6)] == [0, 40, 40, 40, 40, 40]
    assert driver.scheduler.stats().waits == 5
    driver.verify()


def test_the_checkpoint_of_a_planned_step_is_waited_for_not_used() -> None:
    driver = Driver(config(run_ahead=1))
    driver.add(request("a", range(20), 8))
    driver.plan()  # writes the checkpoint at 19
    driver.add(request("b", range(20), 8))
    plan = driver.plan()
    assert not plan.new_rows
    driver.land()
    assert driver.plan().new_rows[0].tokens == tuple(range(20))
    driver.run()
    assert driver.cached("b") == 19
    driver.verify()


@pytest.mark.parametrize(("budget", "cached"), [(64, 39), (8, 8)], ids=["its step was submitted", "in the middle"])
def test_who_waits_goes_on_when_the_writer_is_cancelled(budget: int, cached: int) -> None:
    """With all that the cancelled one had computed."""
    driver = Driver(config(max_batched_tokens=budget))
    driver.add(request("a", range(40), 2), request("b", range(40), 2))
    driver.plan()
    assert driver.scheduler.stats().waits == (budget == 64)
    driver.cancel("a")
    driver.land()
    driver.run()
    assert driver.cached("b") == cached
    driver.verify()


def test_who_waits_goes_on_when_the_writer_is_paused() -> None:
    driver = Driver(config(max_batched_tokens=8))
    driver.add(request("a", range(40), 2), request("b", range(40), 2))
    driver.step()
    driver.scheduler.pause("a")
    driver.run()
    assert driver.finish("b") is not None
    driver.scheduler.resume("a")
    driver.run()
    driver.verify()


def test_who_waits_goes_on_when_no_slot_is_left_for_the_checkpoint() -> None:
    driver = Driver(config(num_slots=1))
    driver.add(request("a", range(20), 2), request("b", range(20), 2))
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.checkpoints_skipped > 0
    driver.verify()


def test_nobody_waits_for_a_writer_of_lower_priority() -> None:
    driver = Driver(config(max_batched_tokens=8))
    driver.add(request("low", range(40), 2, priority=5))
    driver.step()
    driver.add(request("high", range(40), 2, priority=0))
    driver.run()
    assert driver.scheduler.stats().waits == 0
    driver.verify()


def test_the_counter_equals_the_sum_of_usage() -> None:
    driver = Driver(config(num_pages=40, num_slots=6))
    for i in range(30):
        driver.add(request(f"r{i}", [*range(10 + i % 7), i % 3], 5, tenant=f"t{i % 2}"))
        driver.step()
    driver.cancel("r29")
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.tokens_cached == sum(driver.cached(name) for name in driver.chunks) > 0
    assert stats.hits + sum(stats.misses.values()) == 30
    driver.verify()
