"""Figures of the engine. One accounting object feeds usage, logs and metrics, so they cannot contradict each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step of all groups."""

    step: int
    rows: int
    tokens: int
    sampled: int  # tokens delivered
    seconds: float  # of the forward pass, as the executor says


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot: counters since the start and levels of now, of one group or summed over groups."""

    # counters
    steps: int = 0  # plans with work
    tokens_prefilled: int = 0  # consumed from prompts, or again after a preemption
    tokens_decoded: int = 0  # consumed one by one behind the prompt
    tokens_generated: int = 0  # delivered
    tokens_cached: int = 0  # prompt tokens whose computation was skipped; the sum of usage.cached_tokens
    tokens_resumed: int = 0  # tokens whose recomputation after a preemption or a move was skipped
    tokens_recomputed: int = 0  # tokens to be computed again after a preemption or a move
    hits: int = 0  # first admissions that resumed from a checkpoint; hits + misses = first admissions
    misses: Mapping[str, int] = field(default_factory=dict)  # by reason
    waits: int = 0  # admissions put off because another request was about to write the prefix
    preemptions: int = 0
    checkpoints: int = 0  # taken
    checkpoints_skipped: int = 0  # no slot to be had
    evictions: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)  # by reason
    refused: int = 0
    # levels
    running: int = 0
    waiting: int = 0
    paused: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_leased: int = 0  # of running rows; what is neither free nor leased is cache
    slots_total: int = 0
    slots_free: int = 0
    slots_cached: int = 0
    last: StepStats | None = None

    def without_levels(self) -> EngineStats:
        """The counters of an engine that is no more."""
        levels = ("running", "waiting", "paused", "pages_total", "pages_free", "pages_leased", "slots_total", "slots_free", "slots_cached")
        return replace(self, **dict.fromkeys(levels, 0), last=None)  # type: ignore[arg-type]

    @staticmethod
    def total(parts: Sequence[EngineStats], *, steps: int, last: StepStats | None) -> EngineStats:
        """The sum over groups, which step together."""
        out: dict[str, object] = {}
        for f in fields(EngineStats):
            values = [getattr(part, f.name) for part in parts]
            if f.name in ("steps", "last"):
                continue
            out[f.name] = dict(sum((Counter(v) for v in values), Counter())) if f.name in ("misses", "finished") else sum(values)
        return EngineStats(**out, steps=steps, last=last)  # type: ignore[arg-type]


@dataclass(slots=True)
class Counters:
    """The scheduler's own, mutable."""

    steps: int = 0
    tokens_prefilled: int = 0
    tokens_decoded: int = 0
    tokens_generated: int = 0
    tokens_cached: int = 0
    tokens_resumed: int = 0
    tokens_recomputed: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    preemptions: int = 0
    checkpoints: int = 0
    checkpoints_skipped: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    def snapshot(self) -> dict[str, object]:
        """Keyword arguments of `EngineStats`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"misses": dict(self.misses), "finished": dict(self.finished)}
