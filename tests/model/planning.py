"""Writes legal step plans by hand: pages and slots handed out in order and never again, all groups in lockstep.

Plans do not depend on what is sampled, so every process of a test can write the same ones without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.plan import Copy, GroupPlan, NewRow, Output, RowStep, StepPlan, StepResult
from engine.types import SamplingParams

GREEDY = SamplingParams(temperature=0)


@dataclass
class Planned:
    """A row as its planner sees it."""

    group: int
    row: int
    slot: int
    known: int  # tokens known, drawn ones included
    computed: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass
class Planner:
    groups: int = 1
    page_size: int = 16
    plans: list[StepPlan] = field(default_factory=list)
    next_row: int = 0
    next_slot: int = 0
    next_page: int = 0
    pending: list[GroupPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = [GroupPlan()] * self.groups

    def slot(self) -> int:
        self.next_slot += 1
        return self.next_slot - 1

    def page(self) -> int:
        self.next_page += 1
        return self.next_page - 1

    def add(
        self,
        tokens: Sequence[int],
        *,
        group: int = 0,
        sampling: SamplingParams = GREEDY,
        prompt_len: int | None = None,
        choice: int = 0,
        computed: int = 0,
        slot: int | None = None,
        pages: Sequence[int] = (),
    ) -> Planned:
        planned = Planned(group, self.next_row, self.slot() if slot is None else slot, len(tokens), computed, list(pages))
        self.next_row += 1
        new = NewRow(
            row=planned.row,
            tokens=tuple(tokens),
            prompt_len=len(tokens) if prompt_len is None else prompt_len,
            slot=planned.slot,
            pages=tuple(pages),
            sampling=sampling,
            choice=choice,
        )
        self._extend(group, new_rows=(new,))
        return planned

    def copy(self, kind: str, src: int, dst: int, group: int = 0) -> None:
        self._extend(group, copies=(Copy(kind=kind, src=src, dst=dst),))

    def drop(self, planned: Planned) -> None:
        self._extend(planned.group, dropped=(planned.row,))

    def consume(
        self,
        planned: Planned,
        count: int,
        output: Output = Output.NONE,
        checkpoints: tuple[tuple[int, int], ...] = (),
        prompt_logprobs: bool = False,
    ) -> None:
        """Put a row's next `count` tokens into the step being written."""
        pages = -(-(planned.computed + count) // self.page_size) - len(planned.pages)
        new_pages = tuple(self.page() for _ in range(pages))
        planned.pages += new_pages
        step = RowStep(
            row=planned.row,
            start=planned.computed,
            count=count,
            new_pages=new_pages,
            checkpoints=checkpoints,
            output=output,
            prompt_logprobs=prompt_logprobs,
        )
        self._extend(planned.group, rows=(step,))
        planned.computed += count
        planned.known += output is Output.SAMPLE

    def flush(self) -> StepPlan:
        """End the step being written."""
        plan = StepPlan(step=len(self.plans), groups=tuple(self.pending))
        self.plans.append(plan)
        self.pending = [GroupPlan()] * self.groups
        return plan

    def consume_all(self, planned: Planned, chunk: int, output: Output = Output.NONE) -> None:
        """The row's known tokens in chunks, one a step."""
        while planned.computed < planned.known:
            self.consume(planned, min(chunk, planned.known - planned.computed), output)
            self.flush()

    def generate(self, rows: Sequence[Planned], tokens: int) -> None:
        """`tokens` steps in which every row consumes what it knows and draws one."""
        for _ in range(tokens):
            for row in rows:
                self.consume(row, row.known - row.computed, Output.SAMPLE)
            self.flush()

    def _extend(self, group: int, **parts: tuple[object, ...]) -> None:
        before = self.pending[group]
        self.pending[group] = replace(before, **{key: getattr(before, key) + value for key, value in parts.items()})


def tokens_of(results: Sequence[StepResult], planned: Planned) -> list[int]:
    """What the row drew, in order."""
    rows = [row for result in results for row in result.groups[planned.group].rows if row.row == planned.row]
    return [row.token for row in rows if row.token is not None]


def logits_of(results: Sequence[StepResult], planned: Planned, vocab: int) -> Tensor:
    """The row's logits of all its steps [T, vocab]."""
    rows = [row for result in results for row in result.groups[planned.group].rows if row.row == planned.row and row.logits]
    return torch.cat([torch.frombuffer(bytearray(row.logits or b""), dtype=torch.float32).view(-1, vocab) for row in rows])
