"""`k3 score`: teacher-forced logits of whole prompts, through the very shards that serve.

Useful to anyone who validates a deployment: compare two checkpoints, two shardings, two machines, or a run against reference logits.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from deployments.spec import ShardSpec
from engine.errors import InvalidRequest
from engine.executor import Executor
from engine.plan import GroupPlan, NewRow, Output, RowStep, StepPlan
from engine.types import SamplingParams

Prompts = Mapping[str, tuple[int, ...]]


def read_prompts(path: Path, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """`{name: [ids]}` or `{name: {"ids": [ids], …}}`. Raises InvalidRequest naming the prompt and what is wrong with it."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(raw, dict) or not raw:
        raise InvalidRequest(f"{path}: expected an object of name → token ids, with at least one prompt")
    prompts: dict[str, tuple[int, ...]] = {}
    for name, value in raw.items():
        ids = value.get("ids") if isinstance(value, dict) else value
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise InvalidRequest(f"{path}: prompt {name!r}: expected a non-empty list of token ids", param=name)
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"{path}: prompt {name!r}: token id {wrong} is outside the vocabulary [0, {vocab_size})", param=name)
        prompts[name] = tuple(ids)
    return prompts


def score_spec(base: ShardSpec, prompts: Prompts) -> ShardSpec:
    """The same shards with pools just large enough for one prompt a group at a time."""
    longest = max(len(ids) for ids in prompts.values())
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    return ShardSpec(**{**values, "num_pages": -(-longest // base.page_size), "num_slots": 2})


async def score(
    executor: Executor, prompts: Prompts, *, groups: int, page_size: int, chunk: int, progress: Callable[[int], None] = lambda tokens: None
) -> dict[str, np.ndarray]:
    """name → float32 logits [T, vocab]. One prompt a group at a time, `chunk` tokens a step, all groups in lockstep."""
    waiting = deque(sorted(prompts, key=lambda name: -len(prompts[name])))
    current: list[tuple[str, int] | None] = [None] * groups  # name and tokens done, by group
    parts: dict[str, list[np.ndarray]] = {name: [] for name in prompts}
    step = 0
    dropped: list[tuple[int, ...]] = [()] * groups
    while waiting or any(current):
        plans: list[GroupPlan] = []
        for g in range(groups):
            new_rows: tuple[NewRow, ...] = ()
            if current[g] is None and waiting:
                name = waiting.popleft()
                current[g] = (name, 0)
                new_rows = (
                    NewRow(row=0, tokens=prompts[name], prompt_len=len(prompts[name]), slot=0, pages=(), sampling=SamplingParams()),
                )
            rows: tuple[RowStep, ...] = ()
            if (at := current[g]) is not None:
                name, done = at
                count = min(chunk, len(prompts[name]) - done)
                pages = range(-(-done // page_size), -(-(done + count) // page_size))
                rows = (RowStep(row=0, start=done, count=count, new_pages=tuple(pages), output=Output.LOGITS),)
            plans.append(GroupPlan(dropped=dropped[g], new_rows=new_rows, rows=rows))
        dropped = [()] * groups
        result = await executor.run(StepPlan(step=step, groups=tuple(plans)))
        step += 1
        for g, group in enumerate(result.groups):
            for row in group.rows:
                at = current[g]
                assert at is not None
                assert row.logits is not None
                name, done = at
                count = plans[g].rows[0].count
                parts[name].append(np.frombuffer(row.logits, dtype=np.float32).reshape(count, -1))
                progress(count)
                finished = done + count == len(prompts[name])
                current[g] = None if finished else (name, done + count)
                dropped[g] = (0,) if finished else ()
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def write_logits(path: Path, logits: Mapping[str, np.ndarray]) -> None:
    """`logits.<name>` [T, vocab] float32, written beside the target and renamed, so that a partial file never has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
        pass
    save_file({f"logits.{name}": np.ascontiguousarray(rows) for name, rows in logits.items()}, scratch.name)
    Path(scratch.name).replace(path)
