"""The scheduler's contract: budget, order, chunks, refusals, run-ahead. Reuse, preemption and leaving have files of their own."""

from __future__ import annotations

import pytest

from engine.errors import ContextExceeded, InvalidRequest, InvariantBroken, QueueFull
from engine.plan import GroupPlan, GroupResult, Output, RowResult
from engine.scheduler import Scheduler
from engine.types import FinishReason, SamplingParams, TokenLogprob
from tests.engine.driver import GREEDY, Driver, config, request
from tests.fake_executor import toy_stream


def prefilled(plan: GroupPlan) -> list[tuple[int, int, int]]:
    return [(step.row, step.start, step.count) for step in plan.rows]


def test_a_long_prompt_goes_in_chunks_and_then_samples_each_step() -> None:
    driver = Driver(config(max_batched_tokens=8, run_ahead=0))
    driver.add(request("r", range(18), 3))
    driver.run()
    assert [prefilled(plan) for plan in driver.plans] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 2)], [(0, 18, 1)], [(0, 19, 1)]]
    outputs = [plan.rows[0].output for plan in driver.plans]
    assert outputs == [Output.NONE, Output.NONE, Output.SAMPLE, Output.SAMPLE, Output.SAMPLE]
    assert driver.finish("r") is FinishReason.LENGTH
    driver.verify()


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 64])
def test_any_chunking_gives_the_same_stream(chunk: int) -> None:
    driver = Driver(config(max_batched_tokens=chunk))
    driver.add(request("a", range(23), 9), request("b", range(5, 20), 9))
    driver.run()
    driver.verify()


def test_rows_that_decode_come_before_prefill() -> None:
    driver = Driver(config(max_batched_tokens=8, run_ahead=0))
    driver.add(request("a", range(4), 9), request("b", range(4, 8), 9))
    driver.step()
    driver.add(request("c", range(100, 130), 2))
    assert prefilled(driver.step()) == [(0, 4, 1), (1, 4, 1), (2, 0, 6)]
    driver.run()
    driver.verify()


def test_pages_are_told_once_and_only_as_they_are_needed() -> None:
    driver = Driver(config(max_batched_tokens=6, run_ahead=0))
    driver.add(request("r", range(10), 4))
    driver.run()
    new = [len(plan.rows[0].new_pages) for plan in driver.plans]
    assert new == [2, 1, 0, 0, 1]  # 6 tokens, 10, 11, 12, 13
    assert [len(plan.new_rows) for plan in driver.plans] == [1, 0, 0, 0, 0]


def test_a_row_id_is_dropped_before_it_is_given_again() -> None:
    driver = Driver(config(max_running=1))
    driver.add(request("a", range(4), 1), request("b", range(4, 8), 1))
    driver.run()
    assert [(plan.dropped, [row.row for row in plan.new_rows]) for plan in driver.plans] == [((), [0]), ((0,), [0])]
    driver.verify()


def test_nothing_is_planned_when_nothing_is_due() -> None:
    driver = Driver(config())
    assert driver.plan().empty
    driver.add(request("r", range(4), 1))
    driver.run()
    assert driver.plan().empty  # not even to drop the row
    assert driver.scheduler.stats().steps == 1


def test_chunks_carry_tokens_finish_and_usage() -> None:
    driver = Driver(config())
    driver.add(request("r", range(6), 3))
    driver.run()
    first, second, last = driver.chunks["r"]
    assert [len(c.token_ids) for c in (first, second, last)] == [1, 1, 1]
    assert first.usage is not None  # what was cached is told before the tokens
    assert (first.usage.prompt_tokens, first.usage.cached_tokens, first.usage.completion_tokens) == (6, 0, 1)
    assert second.usage is None
    assert (first.finish, second.finish, last.finish) == (None, None, FinishReason.LENGTH)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (6, 0, 3)


def test_a_stop_token_ends_the_stream_and_is_part_of_it() -> None:
    whole = toy_stream(range(6), 10, sampling=GREEDY)
    stop = whole[4]
    length = whole.index(stop) + 1
    driver = Driver(config())
    driver.add(request("r", range(6), 10, stop_token_ids=(stop,)))
    driver.run()
    assert driver.finish("r") is FinishReason.STOP
    assert driver.tokens("r") == whole[:length]
    driver.verify()


def test_a_stop_token_as_the_last_one_is_a_stop() -> None:
    whole = toy_stream(range(6), 3, sampling=GREEDY)
    assert len(set(whole)) == 3
    driver = Driver(config())
    driver.add(request("r", range(6), 3, stop_token_ids=(whole[-1],)))
    driver.run()
    assert driver.finish("r") is FinishReason.STOP


def test_max_tokens_zero_computes_the_prompt_and_keeps_its_end() -> None:
    driver = Driver(config())
    driver.add(request("warm", range(10), 0))
    driver.run()
    assert (driver.tokens("warm"), driver.finish("warm")) == ([], FinishReason.LENGTH)
    driver.add(request("r", range(10), 2), request("one", [5], 0))
    driver.run()
    assert driver.cached("r") == 9
    assert driver.finish("one") is FinishReason.LENGTH
    driver.verify()


def test_a_context_that_fills_up_ends_the_stream() -> None:
    driver = Driver(config(max_model_len=12))
    driver.add(request("r", range(8), 100))
    driver.run()
    assert (len(driver.tokens("r")), driver.finish("r")) == (4, FinishReason.LENGTH)
    driver.verify()


def test_a_pool_of_one_request_serves_one_that_fills_it() -> None:
    driver = Driver(config(num_pages=3, num_slots=1, max_running=4))
    driver.add(request("a", range(8), 100), request("b", range(11), 100), request("c", range(8), 100))
    driver.run()
    assert [len(driver.tokens(name)) for name in "abc"] == [4, 1, 4]
    driver.verify()


# -- refusals


def test_refusals_keep_nothing() -> None:
    driver = Driver(config(max_queued=1, max_model_len=16))
    scheduler = driver.scheduler
    with pytest.raises(ContextExceeded):
        scheduler.add(request("long", range(16)))
    with pytest.raises(InvalidRequest, match="empty"):
        scheduler.add(request("empty", []))
    driver.add(request("r", range(4)))
    with pytest.raises(InvalidRequest, match="request r is open already"):
        scheduler.add(request("r", range(4)))
    with pytest.raises(QueueFull, match="1 requests wait, 1 may"):
        scheduler.add(request("s", range(4)))
    assert scheduler.stats().refused == 4
    assert scheduler.full
    driver.run()
    driver.verify()
    assert scheduler.add(request("r", range(4))) is None  # an id may come again
    scheduler.cancel("r")


# -- order


def order(driver: Driver) -> list[str]:
    """Names in the order of their first token."""
    seen: list[str] = []
    for _ in range(200):
        driver.step()
        seen += [name for name, chunks in driver.chunks.items() if chunks and name not in seen]
        if len(seen) == len(driver.requests):
            break
    driver.run()
    driver.verify()
    return seen


def test_smaller_priority_first_then_arrival() -> None:
    driver = Driver(config(max_running=1, run_ahead=0))
    driver.add(*[request(name, [i] * 5, 1, priority=p) for i, (name, p) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", -1)])])
    assert order(driver) == ["d", "b", "a", "c"]


def test_tenants_take_turns_by_tokens_served() -> None:
    driver = Driver(config(max_running=1, run_ahead=0))
    driver.add(*[request(f"big{i}", [i] * 12, 1, tenant="big") for i in range(3)])
    driver.add(*[request(f"small{i}", [i] * 5, 1, tenant="small") for i in range(3)])
    assert order(driver) == ["big0", "small0", "small1", "small2", "big1", "big2"]


def test_a_long_prefill_of_one_tenant_does_not_hold_up_another() -> None:
    driver = Driver(config(max_batched_tokens=8, run_ahead=0))
    driver.add(request("long", range(80), 1, tenant="a"))
    driver.step()
    driver.add(request("short", range(5), 1, tenant="b"))
    assert order(driver) == ["short", "long"]
    assert len(driver.chunks["short"]) == 1


# -- run-ahead


def test_a_step_is_planned_before_the_last_result_is_known() -> None:
    driver = Driver(config(run_ahead=1))
    driver.add(request("r", range(4), 3))
    plans = [driver.plan(), driver.plan(), driver.plan()]
    assert [prefilled(plan) for plan in plans] == [[(0, 0, 4)], [(0, 4, 1)], [(0, 5, 1)]]
    assert driver.plan().empty  # never past max_tokens: the third token is sampled, not consumed
    for _ in plans:
        driver.land()
    driver.verify()


def test_what_ran_ahead_of_a_stop_is_discarded() -> None:
    whole = toy_stream(range(4), 3, sampling=GREEDY)
    driver = Driver(config(run_ahead=1))
    driver.add(request("r", range(4), 9, stop_token_ids=(whole[0],)))
    driver.plan()
    driver.plan()
    driver.land()
    assert driver.finish("r") is FinishReason.STOP
    driver.add(request("next", range(50, 58), 2))
    driver.run()
    assert driver.tokens("r") == whole[:1]
    driver.verify()


def test_constrained_rows_wait_for_each_token() -> None:
    driver = Driver(config(run_ahead=1))
    driver.add(request("free", range(4), 6), request("bound", range(4, 8), 6, constraint="grammar"))
    driver.run()
    with_bound = [plan for plan in driver.plans if any(step.row == 1 for step in plan.rows)]
    assert len(with_bound) == 6
    new = next(row for plan in driver.plans for row in plan.new_rows if row.constraint)
    assert (new.constraint, new.constraint_from) == ("grammar", 4)
    driver.verify()


# -- streams that come from elsewhere


@pytest.mark.parametrize("done", [1, 3, 5])
def test_a_moved_stream_continues_right_after(done: int) -> None:
    whole = toy_stream(range(6), 6, sampling=GREEDY)
    driver = Driver(config())
    driver.add(request("r", range(6), 6, generated=tuple(whole[:done])))
    driver.run()
    assert driver.tokens("r") == whole[done:]
    usage = driver.chunks["r"][-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 6)
    assert driver.plans[0].new_rows[0].prompt_len == 6
    assert driver.plans[0].new_rows[0].tokens == (*range(6), *whole[:done])
    driver.verify()


def test_a_moved_stream_that_was_complete_ends_at_once() -> None:
    whole = tuple(toy_stream(range(6), 6, sampling=GREEDY))
    driver = Driver(config())
    driver.add(request("length", range(6), 6, generated=whole))
    driver.add(request("stop", range(6), 9, generated=whole, stop_token_ids=(whole[-1],)))
    assert [driver.finish(name) for name in ("length", "stop")] == [FinishReason.LENGTH, FinishReason.STOP]
    assert driver.plan().empty
    driver.verify()


def test_open_requests_can_go_on_elsewhere() -> None:
    driver = Driver(config())
    driver.add(request("r", range(6), 8), request("waits", range(9, 15), 8, priority=1))
    for _ in range(4):
        driver.step()
    moved = driver.scheduler.open_requests()
    other = Driver(config())
    other.add(*moved)
    other.run()
    for r in moved:
        assert [*r.generated, *other.tokens(r.request_id)] == toy_stream(r.prompt, 8, sampling=GREEDY)
        assert list(r.generated) == driver.tokens(r.request_id)
    other.verify()


# -- log-probs


def test_logprobs_come_with_their_tokens_and_prompt_logprobs_before_them() -> None:
    driver = Driver(config(max_batched_tokens=4))
    driver.add(request("warm", range(10), 1))
    driver.run()
    driver.add(request("r", range(10), 3, sampling=SamplingParams(temperature=0, logprobs=2, prompt_logprobs=2)))
    driver.run()
    first = driver.chunks["r"][0]
    assert first.logprobs is not None
    assert first.logprobs[0].token_id == first.token_ids[0]
    assert first.prompt_logprobs is not None
    assert [lp.token_id for lp in first.prompt_logprobs] == list(range(1, 10))
    assert driver.cached("r") == 0  # prompt log-probs need every position computed
    assert driver.scheduler.stats().misses == {"never_seen": 1, "disabled": 1}
    driver.verify()


# -- results that cannot be


def test_a_result_that_nobody_awaits_is_a_bug() -> None:
    with pytest.raises(InvariantBroken, match="no plan is on its way"):
        Scheduler(config()).apply(GroupResult())


def test_a_row_that_sampled_nothing_is_a_bug() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request("r", range(4)))
    scheduler.schedule()
    with pytest.raises(InvariantBroken, match="row 0 was to sample a token"):
        scheduler.apply(GroupResult(rows=(RowResult(row=0, logprob=TokenLogprob(1, 0.0)),)))
