"""Rows of `engine_step`: what a step costs between deciding and computing, plan → shard actors → result, with runners that compute nothing.

Floor: one call of one actor and its answer. Peer: what sending the plan to every shard by an actor call of its own takes. Wall time,
median of a round, the best of ROUNDS rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import ray

from app import serve_modes
from benchmarks.instant import build_instant
from benchmarks.report import Row
from deployments.shard_group import ShardGroup
from deployments.spec import ShardSpec
from deployments.wire import encode_plan
from engine.plan import GroupPlan, Output, RowStep, StepPlan

SHARDS = 4
ROUNDS = 6
STEPS = 200


@ray.remote
class Peer:
    """A shard that gets its plan by a call of its own."""

    def step(self, payload: bytes) -> int:
        return len(payload)


def decoding(step: int, rows: int) -> StepPlan:
    steps = tuple([RowStep(row=i, start=1000 + step, count=1, output=Output.SAMPLE) for i in range(rows)])
    return StepPlan(step=step, groups=(GroupPlan(rows=steps),))


async def median_ms(call: Callable[[int], Awaitable[object]]) -> float:
    times = []
    for step in range(STEPS):
        begin = time.perf_counter()
        await call(step)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


async def best_ms(call: Callable[[int], Awaitable[object]]) -> float:
    return min([await median_ms(call) for _ in range(ROUNDS)])


async def ahead_ms(group: ShardGroup, rows: int) -> float:
    """Per step, with the next step submitted before the last one's result is there, as the engine does."""
    begin = time.perf_counter()
    pending = asyncio.ensure_future(group.run(decoding(0, rows)))
    for step in range(1, STEPS):
        following = asyncio.ensure_future(group.run(decoding(step, rows)))
        await pending
        pending = following
    await pending
    return (time.perf_counter() - begin) / STEPS * 1e3


async def measure() -> list[Row]:
    spec = ShardSpec(
        model_dir="",
        vocab_size=1024,
        tokenizer_dir=None,
        tp=SHARDS,
        shards=SHARDS,
        device="cpu",
        dtype="float32",
        page_size=64,
        num_pages=1,
        num_slots=1,
        num_cpus=0.1,
        threads=1,
        step_timeout_s=60,
        heartbeat_s=1,
        ping_timeout_s=30,
    )
    group = await ShardGroup.start(spec, build=build_instant)
    peers = [Peer.options(num_cpus=0.1).remote() for _ in range(SHARDS)]  # type: ignore[attr-defined]
    rows = []
    try:
        for count in (1, 64, 256):

            async def fan_out(step: int, count: int = count) -> None:
                payload = encode_plan(decoding(step, count))
                await asyncio.gather(*[_value(peer.step.remote(payload)) for peer in peers])

            async def one_call(step: int) -> None:
                await _value(peers[0].step.remote(b""))

            async def step(number: int, count: int = count) -> None:
                await group.run(decoding(number, count))

            await median_ms(step)  # warm
            floor, all_calls, ours = await best_ms(one_call), await best_ms(fan_out), await best_ms(step)
            ahead = min([await ahead_ms(group, count) for _ in range(ROUNDS)])
            work = f"{count} decoding: plan to {SHARDS} shards, result back"
            rows.append(Row(work=work, floor=floor, peers={"a call per shard": all_calls}, ours=ours, unit="ms/step"))
            rows.append(Row(work=f"{work}, one step ahead", floor=floor, ours=ahead, unit="ms/step"))
    finally:
        await group.close()
    return rows


async def _value(ref: object) -> object:
    return await ref  # type: ignore[misc]


def shard_rows() -> list[Row]:
    serve_modes.switch_on("default")
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    try:
        return asyncio.run(measure())
    finally:
        ray.shutdown()
