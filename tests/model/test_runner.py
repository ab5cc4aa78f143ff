"""What a plan may ask for besides tokens, and what the runner says to a plan that breaks the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import Unsupported
from engine.plan import Copy, GroupPlan, NewRow, Output, RowStep, StepPlan
from engine.types import SamplingParams
from model.runner import ModelRunner
from tests.model.golden import Golden
from tests.model.planning import GREEDY, Planner, tokens_of

pytestmark = pytest.mark.parametrize("gold", ["tiny-b"], indirect=True)


def new_row(**changes: object) -> NewRow:
    row = NewRow(row=0, tokens=(1, 2, 3), prompt_len=3, slot=0, pages=(), sampling=GREEDY)
    return replace(row, **changes)  # type: ignore[arg-type]


def plan(*rows: RowStep, new: tuple[NewRow, ...] = (), **parts: tuple[object, ...]) -> StepPlan:
    return StepPlan(step=0, groups=(GroupPlan(rows=rows, new_rows=new, **parts),))  # type: ignore[arg-type]


def test_prompt_logprobs_in_chunks(runner: ModelRunner, gold: Golden) -> None:
    """Of every prompt token but the first, whatever the chunks; none for generated tokens."""
    planner = Planner()
    prompt = gold.prompt("r33")
    row = planner.add(prompt, sampling=SamplingParams(temperature=0, prompt_logprobs=2))
    for count in (10, 1, 22):
        planner.consume(row, count, Output.SAMPLE if count == 22 else Output.NONE, prompt_logprobs=True)
        planner.flush()
    planner.consume(row, 1, Output.SAMPLE, prompt_logprobs=True)
    planner.flush()
    results = [runner.run(p).groups[0].rows[0] for p in planner.plans]
    said = [value for result in results for value in result.prompt_logprobs]
    expected = torch.log_softmax(gold.logits("r33"), -1)
    assert [value.token_id for value in said] == list(prompt[1:])
    assert [value.logprob for value in said] == pytest.approx([expected[i, t].item() for i, t in enumerate(prompt[1:])], abs=1e-3)
    assert all(len(value.top) == 2 and value.top[0][1] >= value.top[1][1] >= min(value.logprob, value.top[1][1]) for value in said)
    assert [r.token for r in results] == [None, None, *gold.greedy("r33")[:2]]


def test_logprobs_only_where_asked(runner: ModelRunner, gold: Golden) -> None:
    planner = Planner()
    asked = [planner.add(gold.prompt("r5"), sampling=SamplingParams(temperature=0, logprobs=k)) for k in (None, 0, 3)]
    planner.generate(asked, 1)
    rows = {r.row: r for r in runner.run(planner.plans[0]).groups[0].rows}
    first, second, third = (rows[a.row] for a in asked)
    assert first.logprob is None
    assert second.logprob is not None
    assert third.logprob is not None
    assert (second.logprob.token_id, second.logprob.top) == (gold.greedy("r5")[0], ())
    assert [t for t, _ in third.logprob.top] == gold.logits("r5")[-1].topk(3).indices.tolist()


def test_penalties_follow_drawn_tokens(runner: ModelRunner, gold: Golden) -> None:
    """With a crushing presence penalty no token comes twice; prompt tokens may; a row moved with its history goes on the same."""
    sampling = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=100.0)
    planner = Planner()
    row = planner.add(gold.prompt("r5"), sampling=sampling)
    planner.generate([row], 20)
    results = [runner.run(p) for p in planner.plans]
    tokens = tokens_of(results, row)
    assert len(set(tokens)) == 20
    moved = Planner(next_row=5, next_slot=5, next_page=20)
    again = moved.add([*gold.prompt("r5"), *tokens[:12]], prompt_len=5, sampling=sampling)
    moved.generate([again], 8)
    assert tokens_of([runner.run(p) for p in moved.plans], again) == tokens[12:]


def test_sampled_stream_does_not_depend_on_its_way(runner: ModelRunner, gold: Golden) -> None:
    """Alone, in company, and resumed after a move: the same draws; another choice or seed: others."""
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=77)

    def alone(tokens: int, history: list[int], **changes: int) -> list[int]:
        planner = Planner()
        prompt = [*gold.prompt("r33"), *history]
        row = planner.add(prompt, prompt_len=33, sampling=replace(sampling, seed=changes.get("seed", 77)), choice=changes.get("choice", 0))
        planner.generate([row], tokens)
        planner.drop(row)
        planner.flush()
        return tokens_of([runner.run(p) for p in planner.plans], row)

    expected = alone(12, [])
    assert alone(5, expected[:7]) == expected[7:]
    assert alone(12, [], choice=1) != expected
    assert alone(12, [], seed=78) != expected
    planner = Planner()
    rows = [planner.add(gold.prompt("r33"), sampling=sampling, choice=i) for i in range(4)]
    planner.generate(rows, 12)
    results = [runner.run(p) for p in planner.plans]
    assert tokens_of(results, rows[0]) == expected
    assert len({tuple(tokens_of(results, row)) for row in rows}) == 4


def test_row_and_slot_and_pages_pass_on_within_a_plan(runner: ModelRunner, gold: Golden) -> None:
    """Dropped, copied and introduced in this order: the newcomer takes everything of the one that leaves, in the same plan."""
    prompt = gold.prompt("p70")
    runner.run(plan(RowStep(row=0, start=0, count=40, new_pages=(0, 1, 2)), new=(new_row(tokens=prompt, prompt_len=70),)))
    again = new_row(tokens=prompt, prompt_len=70, slot=7, pages=(0, 1, 9))
    step = RowStep(row=0, start=40, count=30, new_pages=(3, 4), output=Output.SAMPLE)
    copies = (Copy(kind="slot", src=0, dst=7), Copy(kind="page", src=2, dst=9))
    result = runner.run(plan(step, new=(again,), dropped=(0,), copies=copies))
    assert result.groups[0].rows[0].token == gold.greedy("p70")[0]


def test_empty_plans_say_nothing(runner: ModelRunner, gold: Golden) -> None:
    result = runner.run(StepPlan(step=41, groups=(GroupPlan(),)))
    assert result.step == 41
    assert result.groups[0].rows == ()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (RowStep(row=0, start=0, count=4, new_pages=(0,)), r"row 0: tokens \[0, 4\) of 3 known ones"),
        (RowStep(row=0, start=0, count=0, new_pages=(0,)), r"row 0: tokens \[0, 0\)"),
        (RowStep(row=0, start=0, count=2, new_pages=(0,), output=Output.SAMPLE), r"asked for after 2, but 3 tokens are known"),
        (RowStep(row=0, start=0, count=3), r"with 0 pages of 16"),
        (RowStep(row=0, start=0, count=3, new_pages=(0,), checkpoints=((0, 3),)), r"checkpoint at 0"),
    ],
)
def test_broken_contract(runner: ModelRunner, gold: Golden, step: RowStep, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.run(plan(step, new=(new_row(),)))


def test_row_twice(runner: ModelRunner, gold: Golden) -> None:
    with pytest.raises(ValueError, match="row 0 is introduced again"):
        runner.run(plan(new=(new_row(), new_row())))


def test_unknown_copy(runner: ModelRunner, gold: Golden) -> None:
    with pytest.raises(ValueError, match="kind 'row'"):
        runner.run(plan(copies=(Copy(kind="row", src=0, dst=1),)))


def test_constraint_is_refused_not_ignored(runner: ModelRunner, gold: Golden) -> None:
    with pytest.raises(Unsupported, match="constrained"):
        runner.run(plan(new=(new_row(constraint="{}"),)))
