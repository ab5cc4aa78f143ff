"""Computing that costs nothing, so that deciding, moving and serving are what is measured."""

from __future__ import annotations

import asyncio
import time

from engine.plan import GroupResult, Output, RowResult, StepPlan, StepResult

TOKEN = 72  # ordinary text in the tiny vocabulary


def answer(plan: StepPlan) -> StepResult:
    """A token for every row that samples."""
    groups = tuple(
        [GroupResult(rows=tuple([RowResult(row=r.row, token=TOKEN) for r in g.rows if r.output is Output.SAMPLE])) for g in plan.groups]
    )
    return StepResult(step=plan.step, groups=groups)


class InstantExecutor:
    """Answers at once; each step still gives the event loop a turn, as waiting for real shards does."""

    async def run(self, plan: StepPlan) -> StepResult:
        await asyncio.sleep(0)
        return answer(plan)


class PacedExecutor:
    """A step takes `seconds`, however many rows it has; steps queue behind one another."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free_at = 0.0

    async def run(self, plan: StepPlan) -> StepResult:
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + self._seconds
        await asyncio.sleep(self._free_at - now)
        return answer(plan)


class InstantRunner:
    """A shard's runner that computes nothing: the plan still went to every rank, and rank 0 answers."""

    def __init__(self) -> None:
        self.model = Weightless()

    def run(self, plan: StepPlan) -> StepResult:
        return answer(plan)


class Weightless:
    def parameters(self) -> tuple[()]:
        return ()


def build_instant(model_dir: str, mesh: object, **sizes: object) -> InstantRunner:
    """In the place of `deployments.load.build_runner`."""
    return InstantRunner()
