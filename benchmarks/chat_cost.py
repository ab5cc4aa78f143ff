"""What text costs: rendering and parsing per 1,000 tokens, and a grammar's masks per step beside the step that they are made for.

    python -m benchmarks.chat_cost [--tokenizer DIR]      # DIR: a checkpoint's tokenizer, beside the tiny one

Floors: encoding the same bodies without their tags in one call, decoding the same ids in one call, the same step without a constraint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from app.default_model import ensure_default_model
from benchmarks.report import Row, publish
from chat.grammar import constraint_for
from chat.matcher import MatcherFactory
from chat.parse import OutputParser
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.types import Conversation
from deployments.load import build_runner
from engine.plan import GroupPlan, NewRow, Output, RowStep, StepPlan
from engine.types import SamplingParams
from model.parallel import Mesh
from model.runner import ModelRunner

REPEATS = 15
BATCH = 16
STEPS = 60
PAGE = 16
LONGEST_TAG_WORD = len("<|end_of_msg|>")
WORDS = "The state of a session is small, so it can be moved: 状态很小，可以移动。 It has a position and a digest.\n"
ROWS = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name", "n"]},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "rows", "schema": {**ROWS, "minItems": 10_000}}}  # goes on and on


def best(*works: Callable[[], object]) -> list[float]:
    """Microseconds of processor time, the best of REPEATS; in turns, so that the machine's moods hit all of them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for work, taken in zip(works, times, strict=True):
            begin = time.thread_time()
            work()
            taken.append((time.thread_time() - begin) * 1e6)
    return [min(taken) for taken in times]


def agent_session(turns: int = 40) -> Conversation:
    """Reasoning, a call and its result in every turn."""
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}
    messages: list[dict[str, object]] = [{"role": "user", "content": WORDS * 4}]
    for i in range(turns):
        call = {"id": f"call_{i}", "type": "function", "function": {"name": "search", "arguments": {"q": WORDS, "limit": i}}}
        messages.append({"role": "assistant", "content": WORDS, "reasoning_content": WORDS * 4, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": WORDS * 8})
    return Conversation(messages=messages, tools=[tool])


def text_rows(tokenizer: Tokenizer, name: str) -> list[Row]:
    session = agent_session()
    prompt = render(session, tokenizer)
    bodies = "".join(segment.text for segment in prompt.segments if len(segment.text) > LONGEST_TAG_WORD)
    thousands = len(prompt.ids) / 1000
    floor, ours = best(lambda: tokenizer.encode(bodies), lambda: render(session, tokenizer))
    rendering = Row(work=f"render, {name}", floor=floor / thousands, ours=ours / thousands, unit="µs/1k tokens")
    begin, end = prompt.starts[1], prompt.starts[2]
    opening = len(render(Conversation(messages=[{"role": "assistant", "partial": True, "content": ""}], effort=None), tokenizer).ids)
    reply = prompt.ids[begin + opening : end]
    thousands = len(reply) / 1000

    def parse(groups: Sequence[Sequence[int]]) -> None:
        parser = OutputParser(tokenizer, opened="think")
        for group in groups:
            parser.push(group)
        assert parser.calls == 1

    single = [(i,) for i in reply]
    floor, whole, streamed = (t / thousands for t in best(lambda: tokenizer.decode(reply), lambda: parse([reply]), lambda: parse(single)))
    return [
        rendering,
        Row(work=f"parse, all at once, {name}", floor=floor, ours=whole, unit="µs/1k tokens"),
        Row(work=f"parse, token by token, {name}", floor=floor, ours=streamed, unit="µs/1k tokens"),
    ]


def mask_rows(tokenizer: Tokenizer, name: str) -> list[Row]:
    """Mask and consume of one row, along an answer of about 1,000 tokens; the first walk also builds the lexer's states."""
    constraint = constraint_for(Conversation(messages=[{"role": "user", "content": "q"}], response_format=SCHEMA), "response")
    assert constraint is not None
    factory = MatcherFactory(tokenizer)
    ids = tokenizer.encode("[" + ",".join(f'{{"name":"{WORDS.strip()}","n":{i}}}' for i in range(40)))

    def walk() -> float:
        matcher = factory.create(constraint.to_json())
        begin = time.thread_time()
        for token_id in ids:
            matcher.mask()
            assert matcher.consume(token_id)
        return (time.thread_time() - begin) / len(ids) * 1e6

    first = walk()
    return [
        Row(work=f"mask + consume, first reply of a schema, {name}", ours=first, unit="µs/token"),
        Row(work=f"mask + consume, {name}", ours=min(walk() for _ in range(REPEATS)), unit="µs/token"),
    ]


class Decoding:
    """BATCH rows that decode, constrained or not, on the tiny model."""

    def __init__(self, runner: ModelRunner, constraint: str | None, first_slot: int) -> None:
        self.runner, self.constraint, self.slot, self.step, self.position = runner, constraint, first_slot, 0, 0
        self.prompt = tuple(Tokenizer.tiny().encode("q" * 8))

    def run(self) -> float:
        """Seconds of the next step."""
        rows, new = [], []
        count = len(self.prompt) if self.position == 0 else 1
        pages = range(-(-self.position // PAGE), -(-(self.position + count) // PAGE))
        each = -(-(len(self.prompt) + STEPS) // PAGE)
        for i in range(BATCH):
            own = tuple((self.slot + i) * each + page for page in pages)
            rows.append(RowStep(row=self.slot + i, start=self.position, count=count, new_pages=own, output=Output.SAMPLE))
            if self.position == 0:
                sampling = SamplingParams(seed=i)
                new.append(
                    NewRow(
                        row=self.slot + i,
                        tokens=self.prompt,
                        prompt_len=len(self.prompt),
                        slot=self.slot + i,
                        pages=(),
                        sampling=sampling,
                        constraint=self.constraint,
                        constraint_from=len(self.prompt),
                    )
                )
        plan = StepPlan(step=self.step, groups=(GroupPlan(new_rows=tuple(new), rows=tuple(rows)),))
        begin = time.thread_time()
        self.runner.run(plan)
        self.step, self.position = self.step + 1, self.position + count
        return time.thread_time() - begin


def step_row() -> Row:
    tokenizer = Tokenizer.tiny()
    constraint = constraint_for(Conversation(messages=[{"role": "user", "content": "q"}], response_format=SCHEMA), "response")
    assert constraint is not None
    runner = build_runner(
        ensure_default_model(),
        Mesh.single(),
        device="cpu",
        dtype=torch.float32,
        page_size=PAGE,
        num_pages=2 * BATCH * (STEPS // PAGE + 2),
        num_slots=2 * BATCH,
        matchers=MatcherFactory(tokenizer).create,
    )
    free, bound = Decoding(runner, None, 0), Decoding(runner, constraint.to_json(), BATCH)
    times = [(free.run(), bound.run()) for _ in range(STEPS)][10:]  # in turns, as in `best`
    floor, ours = (sorted(t)[len(times) // 2] * 1e3 for t in zip(*times, strict=True))
    return Row(
        work=f"tiny model's step at batch {BATCH}, all rows constrained", floor=floor, ours=ours, target=floor * 1.05, unit="ms/step"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--tokenizer", help="directory of a checkpoint's tokenizer files")
    directory = arguments.parse_args().tokenizer
    torch.set_num_threads(1)
    vocabularies = {"tiny vocabulary": Tokenizer.tiny()}
    if directory:
        vocabularies["published vocabulary"] = Tokenizer.from_dir(directory)
    rows = [row for name, tokenizer in vocabularies.items() for row in (*text_rows(tokenizer, name), *mask_rows(tokenizer, name))]
    publish(
        "chat_cost",
        [*rows, step_row()],
        packages=("tiktoken", "llguidance", "torch"),
        notes=f"processor time of one thread, best of {REPEATS}; the step: median of {STEPS - 10}",
    )


if __name__ == "__main__":
    main()
