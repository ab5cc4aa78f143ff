"""All that crosses between the deciding engine and the computing shards.

A `StepPlan` carries only what changed: shards keep each row's tokens, pages, slot and sampling parameters from the `NewRow` that
introduced it until the row is listed in `dropped`. Tokens that a shard sampled are already known to it, so they never travel back.

A shard executes plans strictly in order, and each `GroupPlan` in this order: `dropped`, `copies`, `new_rows`, then the forward pass
over `rows`, with the `checkpoints` of a row written while it passes their position, and the sampling of the rows that ask for it.
Because of that order the engine may free a page or slot and hand it to somebody else in the next plan while this one still runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from engine.types import SamplingParams, TokenLogprob


class Output(IntEnum):
    """What a row wants from the head."""

    NONE = 0  # prefill in progress
    SAMPLE = 1  # draw a token from the last position
    LOGITS = 2  # return the raw fp32 logits of every position of this step (`k3 score`)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """Introduces a row: a running sequence's place in the shards. `row` ids are small, reused after they were dropped."""

    row: int
    tokens: tuple[int, ...]  # everything known: prompt + generated
    prompt_len: int  # tokens[:prompt_len] is the prompt (penalties, prompt log-probs)
    slot: int  # KDA state slot, written by this row alone
    pages: tuple[int, ...]  # page ids that hold positions [0, start)
    sampling: SamplingParams
    choice: int = 0
    constraint: str | None = None
    constraint_from: int = 0  # index into tokens where the generated text (and the grammar) begins


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """Consume tokens[start : start + count] of a row. start == 0 means: begin from the zero state, whatever the slot holds."""

    row: int
    start: int
    count: int
    new_pages: tuple[int, ...] = ()  # appended to the row's page table before the step
    checkpoints: tuple[
        tuple[int, int], ...
    ] = ()  # (position, slot): when exactly `position` tokens are consumed, write the state to `slot`
    output: Output = Output.NONE
    prompt_logprobs: bool = False  # also return log-probs of the tokens that follow each position of this step, inside the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Device-side copies made before the step, in the order listed. A slot copy copies the whole recurrent state, a page copy one page."""

    kind: str  # "slot" | "page"
    src: int
    dst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One data-parallel group's part of a step. Empty = the group computes nothing but joins every collective."""

    dropped: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    rows: tuple[RowStep, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)

    @property
    def empty(self) -> bool:
        return not (self.rows or self.dropped or self.copies or self.new_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of all groups, in lockstep. `step` counts up by one."""

    step: int
    groups: tuple[GroupPlan, ...]

    @property
    def num_tokens(self) -> int:
        return sum(g.num_tokens for g in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a row's step gave: a token when it sampled, log-probs when it asked."""

    row: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens at positions start+1 .. start+count, inside the prompt
    logits: bytes | None = None  # Output.LOGITS: fp32 [count, vocab], C order


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    rows: tuple[RowResult, ...] = ()  # rows with something to say; a row of Output.NONE may be absent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: int
    groups: tuple[GroupResult, ...]
    seconds: float = 0.0  # wall time of the forward pass on rank 0
