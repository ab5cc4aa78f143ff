"""Grammars at the rank that samples: random weights under a constraint give valid JSON, and a moved reply goes on where it was."""

from __future__ import annotations

import json

import pytest
import torch

from app.default_model import ensure_default_model
from chat.grammar import constraint_for
from chat.matcher import MatcherFactory
from chat.render import render
from chat.reply import parse
from chat.tokenizer import Tokenizer
from chat.types import Conversation
from deployments.load import build_runner
from engine.plan import GroupPlan, NewRow, Output, RowStep, StepPlan
from engine.types import SamplingParams
from model.parallel import Mesh
from model.runner import ModelRunner

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
EOS_LIMIT = 120


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    tokenizer = Tokenizer.tiny()
    return build_runner(
        ensure_default_model(),
        Mesh.single(),
        device="cpu",
        dtype=torch.float32,
        page_size=16,
        num_pages=64,
        num_slots=2,
        matchers=MatcherFactory(tokenizer, 1024).create,
    )


class Steps:
    """One row, driven token by token."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.step = runner, 0

    def reply(self, prompt: tuple[int, ...], generated: tuple[int, ...], constraint: str, sampling: SamplingParams, end: int) -> list[int]:
        tokens = prompt + generated
        new = NewRow(
            row=0,
            tokens=tokens,
            prompt_len=len(prompt),
            slot=0,
            pages=(),
            sampling=sampling,
            constraint=constraint,
            constraint_from=len(prompt),
        )
        out, start, pages = list(generated), 0, 0
        while len(out) < EOS_LIMIT and (not out or out[-1] != end):
            count = len(prompt) + len(out) - start
            need = -(-(start + count) // 16)
            step = RowStep(row=0, start=start, count=count, new_pages=tuple(range(pages, need)), output=Output.SAMPLE)
            plan = GroupPlan(
                dropped=tuple(self.runner.table.rows) if start == 0 else (), new_rows=(new,) if start == 0 else (), rows=(step,)
            )
            result = self.runner.run(StepPlan(step=self.step, groups=(plan,))).groups[0].rows[0]
            self.step, start, pages = self.step + 1, start + count, need
            assert result.token is not None
            out.append(result.token)
        return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_weights_under_a_schema_give_valid_json_and_a_moved_reply_is_the_same(runner: ModelRunner, temperature: float) -> None:
    tokenizer = Tokenizer.tiny()
    conversation = Conversation(
        messages=[{"role": "user", "content": "q"}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        thinking=False,
    )
    prompt = render(conversation, tokenizer)
    constraint = constraint_for(conversation, prompt.opened)
    assert constraint is not None
    steps = Steps(runner)
    for seed in range(3):
        sampling = SamplingParams(seed=seed, temperature=temperature)
        ids = steps.reply(prompt.ids, (), constraint.to_json(), sampling, tokenizer.end_of_msg)
        assert ids[-1] == tokenizer.end_of_msg, "the constraint ends the turn"
        value = json.loads(parse(ids, tokenizer, opened=prompt.opened).content or "")
        assert set(value) == {"ok", "n"}
        assert value["ok"] in (True, False)
        assert 0 <= value["n"] <= 9
        for cut in (1, len(ids) // 2):
            moved = steps.reply(prompt.ids, tuple(ids[:cut]), constraint.to_json(), sampling, tokenizer.end_of_msg)
            assert moved == ids
