"""Weights through real actors from a real S3 server: the golden logits, each byte once a node, and a shard killed on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from app.score import score
from cluster.checkpoint import Checkpoint, read_checkpoint
from cluster.weight_plan import plan_node
from cluster.weight_reader import LoadSettings
from deployments.loading import Loading
from deployments.shard import Shard
from deployments.shard_group import ShardGroup
from deployments.spec import ShardSpec
from engine.errors import CheckpointError
from tests.cluster.s3 import Fault, Store, running_store

pytestmark = [pytest.mark.ray, pytest.mark.slow]
GOLDEN = Path(__file__).parent / "data" / "k3" / "tiny-a"
TP, SHARDS, THREADS = 2, 4, 2


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with running_store() as running:  # first: workers find the credentials in the environment
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, namespace="serve", log_to_driver=False
        )
        yield running
        ray.shutdown()


@pytest.fixture
def checkpoint(store: Store) -> Checkpoint:
    store.proxy.fault = lambda _: None
    found = read_checkpoint(store.upload(GOLDEN / "model", "golden"), store.proxy.url)
    store.proxy.log.clear()
    return found


def spec(checkpoint: Checkpoint, **changes: object) -> ShardSpec:
    values: dict[str, object] = dict(
        model_dir=checkpoint.url,
        model_endpoint_url=checkpoint.endpoint_url,
        checkpoint=checkpoint,
        loading=LoadSettings(buffer_bytes=64 << 20, threads=THREADS, patience_s=60),
        vocab_size=512,
        tokenizer_dir=None,
        tp=TP,
        shards=SHARDS,
        device="cpu",
        dtype="float32",
        page_size=16,
        num_pages=16,
        num_slots=4,
        num_cpus=0.1,
        threads=1,
        step_timeout_s=60.0,
        heartbeat_s=0.5,
        ping_timeout_s=30.0,
    )
    return ShardSpec(**{**values, **changes})  # type: ignore[arg-type]


async def check_golden(group: ShardGroup) -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    prompts = {key.removesuffix(".input_ids"): tuple(ids.tolist()) for key, ids in expected.items() if key.endswith(".input_ids")}
    logits = await score(group, prompts, groups=SHARDS // TP, page_size=16, chunk=64)
    for name, found in logits.items():
        np.testing.assert_allclose(found, expected[f"{name}.logits"], atol=2e-3, rtol=1e-3)


async def test_golden_logits_and_each_byte_once(checkpoint: Checkpoint, store: Store) -> None:
    s = spec(checkpoint)
    plan = plan_node(checkpoint, range(SHARDS), tp=TP, shards=SHARDS, block_bytes=s.loading.block_bytes)
    group = await ShardGroup.start(s)
    try:
        assert store.proxy.log.nbytes() == plan.nbytes <= 1.02 * plan.union
        await check_golden(group)
    finally:
        await group.close()


async def test_a_shard_killed_halfway_goes_on_with_what_its_node_holds(checkpoint: Checkpoint, store: Store) -> None:
    s = spec(checkpoint, loading=LoadSettings(buffer_bytes=64 << 20, threads=THREADS, patience_s=60, request_bytes=50_000))
    plan = plan_node(checkpoint, range(SHARDS), tp=TP, shards=SHARDS, block_bytes=s.loading.block_bytes)
    place = lambda rank: Shard.options(num_cpus=0.1).remote(s, rank)  # noqa: E731
    actors = [place(rank) for rank in range(SHARDS)]
    pids = await asyncio.gather(*(_value(actor.ping.remote()) for actor in actors))
    store.proxy.fault = lambda request: Fault(drip=(8_000, 0.01)) if request.stop else None  # slow enough to be met halfway
    loading = Loading(s, actors, place, None)
    task = asyncio.create_task(loading.run())
    while store.proxy.log.nbytes() < plan.nbytes / 2:
        assert not task.done()
        await asyncio.sleep(0.01)
    os.kill(pids[1], signal.SIGKILL)
    await task
    assert loading.replaced == 1
    times = Counter((path, start) for path, start, _ in store.proxy.log.sent)
    assert sum(n - 1 for n in times.values()) <= 2 * THREADS, (
        "only what had been granted to the killed one and not yet reported is read again"
    )
    group = ShardGroup(s, actors, None)
    try:
        await group.reform()
        await check_golden(group)
    finally:
        await group.close()


async def test_what_is_wrong_with_the_store_reaches_the_operator(checkpoint: Checkpoint, store: Store) -> None:
    store.proxy.fault = lambda request: Fault(status=503) if request.stop else None
    with pytest.raises(CheckpointError, match=r"s3://weights/golden/model-0000.*not a byte in"):
        await ShardGroup.start(spec(checkpoint, loading=LoadSettings(buffer_bytes=64 << 20, threads=THREADS, patience_s=0.5)))


async def _value(ref: object) -> object:
    return await ref  # type: ignore[misc]
