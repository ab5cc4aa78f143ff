"""What a step costs without a model: scheduler and loop over an executor that returns at once, and the way to real shards and back.

    python -m benchmarks.engine_step

Floor of deciding: an asyncio task a step, and one plan row, result and chunk a running sequence, built and thrown away. Of the way: one
actor call (`benchmarks.shard_step`).
"""

from __future__ import annotations

import asyncio
import gc
import time

from benchmarks.instant import InstantExecutor
from benchmarks.report import Row, publish
from benchmarks.shard_step import shard_rows
from engine.config import EngineConfig
from engine.errors import K3Error
from engine.loop import EngineLoop
from engine.plan import GroupPlan, GroupResult, Output, RowResult, RowStep, StepPlan, StepResult
from engine.types import GenerateRequest, SamplingParams, TokenChunk

STEPS = 100
REPEATS = 8
ROUNDS = 6
CONTEXT = 1000  # tokens of each prompt


class StepWatch:
    """Times runs of STEPS steps, from the moment that every sequence decodes."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._steps = 0
        self._begin = 0.0
        self.times: list[float] = []
        self.done = asyncio.Event()

    def deliver(self, chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        if len(chunks) < self._rows:
            return
        if self._steps % STEPS == 0:
            now = time.thread_time()
            if self._steps:
                self.times.append((now - self._begin) / STEPS * 1e3)
            self._begin = now
            if len(self.times) == REPEATS:
                self.done.set()
        self._steps += 1


async def floor_ms(rows: int) -> float:
    async def task(step: int) -> StepResult:
        results = tuple([RowResult(row=i, token=7) for i in range(rows)])
        return StepResult(step=step, groups=(GroupResult(rows=results),))

    begin = time.thread_time()
    for step in range(STEPS):
        steps = tuple([RowStep(row=i, start=step, count=1, output=Output.SAMPLE) for i in range(rows)])
        StepPlan(step=step, groups=(GroupPlan(rows=steps),))
        result = await asyncio.create_task(task(step))
        [TokenChunk(request_id="r", token_ids=(r.token or 0,)) for r in result.groups[0].rows]
    return (time.thread_time() - begin) / STEPS * 1e3


async def decode_ms(rows: int, run_ahead: int) -> float:
    """Milliseconds a step while `rows` sequences decode."""
    tokens = CONTEXT + 64 + STEPS * (REPEATS + 1)
    config = EngineConfig(
        max_model_len=tokens,
        num_pages=rows * (tokens // 64 + 2),
        num_slots=4 * rows + 8,
        max_running=rows,
        max_batched_tokens=4096,
        run_ahead=run_ahead,
    )
    watch = StepWatch(rows)
    loop = EngineLoop(config, InstantExecutor(), deliver=watch.deliver)
    loop.start()
    for i in range(rows):
        prompt = tuple(range(i, i + CONTEXT))
        loop.submit(GenerateRequest(request_id=str(i), prompt=prompt, max_tokens=tokens, sampling=SamplingParams(), tenant=str(i % 8)))
    await watch.done.wait()
    await loop.stop()
    return min(watch.times)


def main() -> None:
    rows = []
    for count in (1, 64, 256):
        floors, ahead, behind = [], [], []
        for _ in range(ROUNDS):  # in turns, so that a busy neighbour is not one figure's alone
            gc.collect()
            floors.append(asyncio.run(floor_ms(count)))
            ahead.append(asyncio.run(decode_ms(count, 1)))
            behind.append(asyncio.run(decode_ms(count, 0)))
        target = {64: 1.0}.get(count)
        rows.append(Row(work=f"{count} decoding", floor=min(floors), ours=min(ahead), target=target, unit="ms/step"))
        rows.append(Row(work=f"{count} decoding, no run-ahead", floor=min(floors), ours=min(behind), target=target, unit="ms/step"))
    rows += shard_rows()
    notes = (
        f"decoding: scheduler + loop, processor time of the event loop; best of {ROUNDS} x {REPEATS} x {STEPS} steps, "
        f"{CONTEXT}-token prompts. To shards: wall time, best median of a round"
    )
    publish("engine_step", rows, packages=("ray", "torch", "msgspec"), notes=notes)


if __name__ == "__main__":
    main()
