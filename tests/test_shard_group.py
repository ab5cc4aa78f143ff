"""Real shard actors: the golden logits through them, and how a group fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from app.score import score
from deployments.shard_group import ShardGroup
from deployments.spec import ShardSpec
from engine.errors import CheckpointError, ConfigError, ShardLost
from engine.plan import GroupPlan, NewRow, Output, RowStep, StepPlan
from engine.types import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow]
GOLDEN = Path(__file__).parent / "data" / "k3"


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, namespace="serve", log_to_driver=False)
    yield
    ray.shutdown()


def spec(model: Path, *, tp: int, shards: int, **changes: object) -> ShardSpec:
    values: dict[str, object] = dict(
        model_dir=str(model),
        vocab_size=512,
        tokenizer_dir=None,
        tp=tp,
        shards=shards,
        device="cpu",
        dtype="float32",
        page_size=16,
        num_pages=16,
        num_slots=4,
        num_cpus=0.1,
        threads=1,
        step_timeout_s=30.0,
        heartbeat_s=0.5,
        ping_timeout_s=5.0,
    )
    return ShardSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "tp", "shards"), [("tiny-a", 2, 4), ("tiny-c", 1, 2)])
async def test_golden_logits_through_actors(name: str, tp: int, shards: int) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    prompts = {key.removesuffix(".input_ids"): tuple(ids.tolist()) for key, ids in expected.items() if key.endswith(".input_ids")}
    s = spec(GOLDEN / name / "model", tp=tp, shards=shards)
    group = await ShardGroup.start(s)
    try:
        logits = await score(group, prompts, groups=s.num_groups, page_size=s.page_size, chunk=50)
    finally:
        await group.close()
    for prompt, rows in logits.items():
        np.testing.assert_allclose(rows, expected[f"{prompt}.logits"], atol=2e-3, rtol=0, err_msg=prompt)


def endless(step: int, groups: int) -> StepPlan:
    """One row a group, one token a step."""
    row = NewRow(row=0, tokens=(1, 2, 3), prompt_len=3, slot=0, pages=(), sampling=SamplingParams(temperature=0))
    count = 3 if step == 0 else 1
    start = 0 if step == 0 else 2 + step
    pages = (start // 16,) if step == 0 or start % 16 == 0 else ()
    return StepPlan(
        step=step,
        groups=(
            GroupPlan(
                new_rows=(row,) if step == 0 else (),
                rows=(RowStep(row=0, start=start, count=count, new_pages=pages, output=Output.SAMPLE),),
            ),
        )
        * groups,
    )


async def run_on(group: ShardGroup, steps: range) -> None:
    for step in steps:
        await group.run(endless(step, 2))


@pytest.mark.parametrize("victim", [0, 3])
async def test_killing_one_of_four_fails_the_group_at_once(victim: int) -> None:
    s = spec(GOLDEN / "tiny-a" / "model", tp=2, shards=4)
    group = await ShardGroup.start(s)
    try:
        pids = await group.pids()
        for step in range(5):
            await group.run(endless(step, 2))
        os.kill(pids[victim], signal.SIGKILL)
        async with asyncio.timeout(s.step_timeout_s / 2):  # not the transport's timeout
            with pytest.raises(ShardLost):
                await run_on(group, range(5, 200))
        assert isinstance(group.lost, ShardLost)
        with pytest.raises(ShardLost):
            await group.run(endless(200, 2))
    finally:
        group.kill()


async def test_an_error_inside_one_rank_unblocks_the_others() -> None:
    """Group 1's plan is refused by its ranks alone, while group 0's are inside a collective with them."""
    s = spec(GOLDEN / "tiny-a" / "model", tp=2, shards=4)
    group = await ShardGroup.start(s)
    try:
        good = endless(0, 2)
        bad = GroupPlan(rows=(RowStep(row=7, start=0, count=1, output=Output.SAMPLE),))  # a row that nobody introduced
        async with asyncio.timeout(s.step_timeout_s / 2):
            with pytest.raises(ShardLost, match="shard"):
                await group.run(StepPlan(step=0, groups=(good.groups[0], bad)))
    finally:
        group.kill()


async def test_a_stopped_shard_is_a_hang_within_the_bound() -> None:
    s = spec(GOLDEN / "tiny-a" / "model", tp=1, shards=2, ping_timeout_s=2.0)
    group = await ShardGroup.start(s)
    pids = await group.pids()
    try:
        os.kill(pids[1], signal.SIGSTOP)
        async with asyncio.timeout(15):
            while group.lost is None:  # noqa: ASYNC110 the group has no event for it: nobody else waits
                await asyncio.sleep(0.1)
        assert "ping_timeout_s=2" in str(group.lost)
    finally:
        os.kill(pids[1], signal.SIGCONT)
        group.kill()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_group_is_formed_again_in_place(sig: signal.Signals) -> None:
    """The dead or hung rank gets a new actor, the others read none of their weights again, and steps give the same tokens."""
    group = await ShardGroup.start(spec(GOLDEN / "tiny-a" / "model", tp=2, shards=4, ping_timeout_s=2.0))
    try:
        pids, read = await group.pids(), group.bytes_loaded
        assert all(read)
        first = [await group.run(endless(step, 2)) for step in range(3)]
        lost = asyncio.Event()
        group.on_lost = lambda error: lost.set()
        os.kill(pids[2], sig)
        async with asyncio.timeout(30):
            await lost.wait()
        await group.reform()
        assert group.lost is None
        assert (group.epoch, group.replaced) == (1, 1)
        assert group.bytes_loaded == [0, 0, read[2], 0]
        again = await group.pids()
        assert [a == b for a, b in zip(pids, again, strict=True)] == [True, True, False, True]
        second = [await group.run(endless(step, 2)) for step in range(3)]
        assert [r.groups for r in second] == [r.groups for r in first]
    finally:
        await group.close()


async def test_an_idle_group_outlives_the_step_timeout() -> None:
    s = spec(GOLDEN / "tiny-a" / "model", tp=1, shards=2, step_timeout_s=3.0, heartbeat_s=0.5)
    group = await ShardGroup.start(s)
    try:
        await group.run(endless(0, 2))
        await asyncio.sleep(4.5)
        assert group.lost is None
        assert (await group.run(endless(1, 2))).step == 1
    finally:
        await group.close()


async def test_what_the_operator_must_mend_keeps_its_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        await ShardGroup.start(spec(tmp_path, tp=1, shards=1))
    model = tmp_path / "model"
    model.mkdir()
    for file in (GOLDEN / "tiny-a" / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    last = sorted(model.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=last.name):
        await ShardGroup.start(spec(model, tp=1, shards=2))
