"""What a process remembers of its rows between plans, and how a group's plan becomes the segments of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.plan import GroupPlan, NewRow, Output, RowStep
from engine.types import SamplingParams
from model.batch import Segment
from model.sampler import Draw, needs_counts, needs_seen


class Matcher(Protocol):
    """A row's position in its grammar (injected: `chat.matcher`)."""

    def mask(self) -> np.ndarray | None:
        """Bit set of the ids that may come next, int32 [ceil(vocab / 32)]; None = any. Valid until the next call."""
        ...

    def consume(self, token_id: int) -> bool: ...


Matchers = Callable[[str], Matcher]  # constraint -> a matcher at the start of the reply


@dataclass(slots=True)
class Row:
    """A running sequence on this process. Tokens drawn here are appended here, so plans never carry them."""

    tokens: list[int]
    prompt_len: int
    slot: int
    pages: list[int]
    sampling: SamplingParams
    choice: int
    generated_counts: Tensor | None = None  # [vocab] int32
    seen: Tensor | None = None  # [vocab] bool
    matcher: Matcher | None = None  # on the rank that samples

    @classmethod
    def from_plan(cls, new: NewRow, vocab_size: int, device: torch.device | str, matchers: Matchers | None) -> Row:
        matcher = None
        if new.constraint is not None and matchers is not None:
            matcher = matchers(new.constraint)
            for token in new.tokens[new.constraint_from :]:  # a moved or preempted reply goes on where it was
                matcher.consume(token)
        counts = seen = None
        if needs_counts(new.sampling):
            generated = torch.tensor(new.tokens[new.prompt_len :], dtype=torch.int64, device=device)
            counts = torch.bincount(generated, minlength=vocab_size).int()
        if needs_seen(new.sampling):
            seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            seen[torch.tensor(new.tokens, dtype=torch.int64, device=device)] = True
        return cls(list(new.tokens), new.prompt_len, new.slot, list(new.pages), new.sampling, new.choice, counts, seen, matcher)

    def draw(self) -> Draw:
        allowed = self.matcher.mask() if self.matcher is not None else None
        return Draw(self.sampling, self.choice, len(self.tokens), self.generated_counts, self.seen, allowed)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.consume(token)
        if self.generated_counts is not None:
            self.generated_counts[token] += 1
        if self.seen is not None:
            self.seen[token] = True

    def segment(self, step: RowStep) -> Segment:
        """This step's part of the row. Raises `ValueError` for a step that breaks the contract of `engine.plan`."""
        stop = step.start + step.count
        if not 0 < stop <= len(self.tokens) or step.count < 1 or step.start < 0:
            raise ValueError(f"row {step.row}: tokens [{step.start}, {stop}) of {len(self.tokens)} known ones")
        if step.output is Output.SAMPLE and stop != len(self.tokens):
            raise ValueError(f"row {step.row}: a token was asked for after {stop}, but {len(self.tokens)} tokens are known")
        self.pages += step.new_pages
        if step.output is Output.LOGITS or (step.prompt_logprobs and step.start + 1 < self.prompt_len):
            logits = range(step.count)
        elif step.output is Output.SAMPLE:
            logits = range(step.count - 1, step.count)
        else:
            logits = range(0)
        return Segment(self.tokens[step.start : stop], step.start, self.slot, self.pages, step.checkpoints, logits)


@dataclass(slots=True)
class RowTable:
    """All rows of one data-parallel group, by their small ids."""

    vocab_size: int
    device: torch.device | str
    matchers: Matchers | None = None
    rows: dict[int, Row] = field(default_factory=dict)

    def drop(self, plan: GroupPlan) -> None:
        for row in plan.dropped:
            del self.rows[row]

    def add(self, plan: GroupPlan) -> None:
        for new in plan.new_rows:
            if new.row in self.rows:
                raise ValueError(f"row {new.row} is introduced again without being dropped")
            self.rows[new.row] = Row.from_plan(new, self.vocab_size, self.device, self.matchers)

    def ordered(self, plan: GroupPlan) -> list[RowStep]:
        """The plan's rows as a batch wants them: one-token steps first, otherwise in the plan's order."""
        return sorted(plan.rows, key=lambda step: step.count > 1)
