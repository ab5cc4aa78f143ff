"""The toy model is only worth something if it raises on each way to break the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.plan import Copy, GroupPlan, NewRow, Output, RowStep, StepPlan
from engine.types import SamplingParams
from tests.fake_executor import FakeExecutor, FakeGroup, Misuse, toy_stream

GREEDY = SamplingParams(temperature=0)
NEW = NewRow(row=0, tokens=tuple(range(6)), prompt_len=6, slot=0, pages=(), sampling=GREEDY)
FIRST = RowStep(row=0, start=0, count=4, new_pages=(0, 1), checkpoints=((3, 2),))
SECOND = RowStep(row=0, start=4, count=2, output=Output.SAMPLE)
THIRD = RowStep(row=0, start=6, count=1, output=Output.SAMPLE)
# A second sequence that resumes from the checkpoint at 3: one full page of 2 tokens, and a copy of the half one.
HIT = NewRow(row=1, tokens=(0, 1, 2, 9), prompt_len=4, slot=1, pages=(0, 4), sampling=GREEDY)
COPIES = (Copy(kind="slot", src=2, dst=1), Copy(kind="page", src=1, dst=4))
RESUME = RowStep(row=1, start=3, count=1, output=Output.SAMPLE)


def group() -> FakeGroup:
    return FakeGroup(num_pages=8, num_slots=4, page_size=2)


def begun() -> FakeGroup:
    shards = group()
    shards.execute(GroupPlan(new_rows=(NEW,), rows=(replace(FIRST, new_pages=(0, 1, 2, 3)),)))
    return shards


def test_the_stream_is_that_of_an_unbroken_run() -> None:
    shards = begun()
    tokens = [shards.execute(GroupPlan(rows=(step,))).rows[0].token for step in (SECOND, THIRD)]
    assert tokens == toy_stream(range(6), 2, sampling=GREEDY)
    hit = shards.execute(GroupPlan(copies=COPIES, new_rows=(HIT,), rows=(RESUME,)))
    assert [hit.rows[0].token] == toy_stream((0, 1, 2, 9), 1, sampling=GREEDY)


def test_streams_depend_on_seed_and_choice_only_when_sampled() -> None:
    def stream(temperature: float, seed: int, choice: int) -> list[int]:
        return toy_stream(range(4), 8, sampling=SamplingParams(temperature=temperature, seed=seed), choice=choice)

    assert stream(0, 1, 0) == stream(0, 2, 1)
    assert stream(1, 1, 0) == stream(1, 1, 0)
    assert len({tuple(stream(1, seed, choice)) for seed in (1, 2) for choice in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (GroupPlan(dropped=(3,)), "row 3 is dropped but was never introduced"),
        (GroupPlan(new_rows=(NEW,), rows=(FIRST,)), "row 0 is introduced twice"),
        (GroupPlan(new_rows=(replace(HIT, slot=0),), copies=(), rows=(RESUME,)), "slot 0 is given to two rows"),
        (GroupPlan(new_rows=(replace(HIT, slot=9),), rows=(RESUME,)), "slot 9 does not exist"),
        (GroupPlan(new_rows=(HIT,)), "a new row does not step"),
        (GroupPlan(new_rows=(HIT,), rows=(RESUME,)), "slot 1 does not hold the row's state at 3"),
        (GroupPlan(new_rows=(HIT,), copies=COPIES[:1], rows=(RESUME,)), "page 4 does not hold the row's position 2"),
        (GroupPlan(new_rows=(HIT,), copies=(replace(COPIES[0], src=3), COPIES[1])), "slot 3 is copied but was never written"),
        (GroupPlan(copies=(replace(COPIES[1], src=7),)), "page 7 is copied but was never written"),
        (GroupPlan(copies=(replace(COPIES[0], dst=0),)), "slot 0 of a live row is copied over"),
        (GroupPlan(new_rows=(replace(HIT, pages=(0,)),), copies=COPIES, rows=(RESUME,)), "row 1 starts at 3 with 1 pages"),
        (GroupPlan(new_rows=(replace(HIT, tokens=(0, 1, 5, 9)),), copies=COPIES, rows=(RESUME,)), "does not hold the row's"),
        (GroupPlan(rows=(replace(SECOND, start=3),)), "row 0 consumed 4 tokens and steps from 3"),
        (GroupPlan(rows=(replace(SECOND, start=5),)), "row 0 consumed 4 tokens and steps from 5"),
        (GroupPlan(rows=(replace(SECOND, count=3),)), "row 0 consumes 7 tokens, 6 are known"),
        (GroupPlan(rows=(replace(SECOND, count=0),)), "row 0 steps 0 tokens"),
        (GroupPlan(rows=(replace(SECOND, count=1),)), "row 0 samples before its last token"),
        (GroupPlan(rows=(SECOND, SECOND)), "a row steps twice"),
        (GroupPlan(rows=(replace(SECOND, row=5),)), "row 5 steps but was never introduced"),
        (GroupPlan(rows=(replace(SECOND, new_pages=(1,)),)), "row 0 lists a page twice"),
        (GroupPlan(rows=(replace(SECOND, checkpoints=((4, 3),)),)), "checkpoints outside of"),
        (GroupPlan(rows=(replace(SECOND, checkpoints=((5, 0),)),)), "a checkpoint goes to the slot of a live row"),
        (GroupPlan(rows=(replace(SECOND, checkpoints=((5, 3), (6, 3))),)), "two checkpoints go to one slot"),
    ],
)
def test_misuse_raises(plan: GroupPlan, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        begun().execute(plan)


def test_writing_over_a_shared_page_is_found_by_who_shares_it() -> None:
    shards = begun()
    thief = NewRow(row=1, tokens=(7, 7, 7), prompt_len=3, slot=1, pages=(), sampling=GREEDY)
    shards.execute(GroupPlan(new_rows=(thief,), rows=(RowStep(row=1, start=0, count=2, new_pages=(0,)),)))
    with pytest.raises(Misuse, match="page 0 does not hold the row's position 0"):
        shards.execute(GroupPlan(rows=(SECOND,)))


def test_too_few_pages_are_found() -> None:
    with pytest.raises(Misuse, match="row 0 has 1 pages for 4 tokens"):
        group().execute(GroupPlan(new_rows=(NEW,), rows=(replace(FIRST, new_pages=(0,)),)))


def test_copies_are_made_in_order() -> None:
    shards = begun()
    shards.execute(GroupPlan(copies=(Copy(kind="slot", src=2, dst=1), Copy(kind="slot", src=1, dst=3))))
    assert shards.slots[3] == shards.slots[2]


async def test_constrained_rows_that_run_ahead_are_found() -> None:
    executor = FakeExecutor(num_pages=8, num_slots=4, page_size=2)
    new = replace(NEW, constraint="grammar")
    rows = (replace(FIRST, count=6, checkpoints=(), new_pages=(0, 1, 2, 3), output=Output.SAMPLE),)
    first = executor.run(StepPlan(step=0, groups=(GroupPlan(new_rows=(new,), rows=rows),)))
    first.send(None)  # submitted, not finished
    with pytest.raises(Misuse, match=r"constrained rows \[0\] run ahead"):
        await executor.run(StepPlan(step=1, groups=(GroupPlan(rows=(THIRD,)),)))
    first.close()


async def test_steps_out_of_turn_are_found() -> None:
    executor = FakeExecutor(num_pages=8, num_slots=4, page_size=2)
    with pytest.raises(Misuse, match="step 1 comes after step -1"):
        await executor.run(StepPlan(step=1, groups=(GroupPlan(),)))
    with pytest.raises(Misuse, match="2 plans for 1 groups"):
        await executor.run(StepPlan(step=0, groups=(GroupPlan(), GroupPlan())))
