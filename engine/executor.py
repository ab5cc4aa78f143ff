"""The one protocol between deciding and computing: real shards, a one-process runner, or a fake."""

from __future__ import annotations

from typing import Protocol

from engine.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs steps strictly in the order submitted.

    `run` may be awaited concurrently for consecutive steps (the loop keeps at most `run_ahead` beyond the oldest); results
    come back in order. Raises `ShardLost` when a shard died or hung; after that the executor is unusable.
    """

    async def run(self, plan: StepPlan) -> StepResult: ...
