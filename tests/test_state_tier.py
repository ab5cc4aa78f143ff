"""Holders and the session store as real actors: what outlives whom, what is evicted, what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from cluster.holder import StateHolder
from cluster.holder_actors import holder_name
from cluster.sessions import SessionStore
from cluster.sweep import Swept
from engine.bundle import ExportPart, ObjectRef, Schema, StateBundle, digest
from engine.errors import DurableError, SessionBusy, StoreFull, UnknownSession
from engine.session import BundleAt, SessionRecord
from tests.cluster.s3 import BUCKET, Fault, running_store

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SCHEMA = Schema(kda_layers=1, heads=2, head_dim=4, conv_taps=4, mla_layers=1, latent_dim=8, state_dtype="float32", cache_dtype="float32")
KIB = 1024  # of every exported object


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=128 << 20, namespace="serve", log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0)
class Exporter:
    """Exports a KiB of its part's name."""

    def __init__(self) -> None:
        self.exported: list[str] = []

    @ray.method(num_returns=2)
    def export(self, part: ExportPart) -> tuple[dict[str, np.ndarray], ObjectRef]:
        self.exported.append(part.name)
        arrays = {"x": np.frombuffer(part.name.encode().ljust(KIB, b"."), np.uint8)}
        return arrays, ObjectRef(name=part.name, digest=digest(arrays), nbytes=KIB)

    def names(self) -> list[str]:
        return self.exported

    def pid(self) -> int:
        return os.getpid()


def draft(lineage: str, position: int = 10) -> StateBundle:
    return StateBundle(
        lineage=lineage, position=position, fingerprint="f", tenant="t", schema=SCHEMA, recurrent=(), segments=(), anchor="a" + lineage[:1]
    )


def parts(lineage: str, segments: tuple[str, ...] = ()) -> list[ExportPart]:
    latents = [ExportPart(name=name, nbytes=KIB, epoch=0, start=i, stop=i + 1) for i, name in enumerate(segments)]
    return [ExportPart(name=f"{lineage}.state", nbytes=KIB, epoch=0, heads=(0, 2), slot=1), *latents]


@ray.remote(num_cpus=0)
class Probe:
    def pid(self) -> int:
        return os.getpid()


KEYS = {"env_vars": {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}}


class Pidded(StateHolder):
    async def pid(self) -> int:
        return os.getpid()


class PiddedStore(SessionStore):
    async def pid(self) -> int:
        return os.getpid()


def holder(budget: int = 64 * KIB, ttl_s: float = 60, durable: str | None = None, name: str | None = None) -> Any:
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1}
    if name is not None:
        options |= {"name": name, "lifetime": "detached", "namespace": "serve"}
    return ray.remote(Pidded).options(**options).remote("n", budget, ttl_s, durable, None)


async def kill(actor: Any) -> None:
    """SIGKILL, and wait until it answers again or is gone."""
    os.kill(await actor.pid.remote(), signal.SIGKILL)
    for _ in range(100):
        await asyncio.sleep(0.1)
        try:
            await actor.pid.remote()
            return
        except ray.exceptions.ActorDiedError:
            return
        except ray.exceptions.RayActorError:
            continue


async def test_a_bundle_outlives_the_shard_that_made_it() -> None:
    h, shard = holder(), Exporter.remote()
    made = await h.take.remote(draft("b1"), [(shard, p) for p in parts("b1", ("s0", "s1"))])
    assert [(p.first, p.last) for p in made.recurrent] == [(0, 2)]
    assert [(s.start, s.stop) for s in made.segments] == [(0, 1), (1, 2)]
    ray.kill(shard)
    fetched = await h.fetch.remote("b1")
    assert fetched.bundle == made
    assert fetched.source == "store"
    arrays = {name: ray.get(ref) for name, [ref] in fetched.refs.items()}
    assert all(digest(arrays[meta.name]) == meta.digest for meta in made.objects)
    assert await h.fetch.remote("b2") is None


async def test_shared_segments_are_exported_and_counted_once() -> None:
    h, shard = holder(), Exporter.remote()
    for name in ("b1", "b2", "b3"):
        await h.take.remote(draft(name), [(shard, p) for p in parts(name, ("s0",))])
    assert sorted(await shard.names.remote()) == ["b1.state", "b2.state", "b3.state", "s0"]
    assert (await h.stats.remote()).bytes == 4 * KIB
    await h.drop.remote("b1")
    assert (await h.stats.remote()).bytes == 3 * KIB
    assert set((await h.fetch.remote("b2")).refs) == {"b2.state", "s0"}
    for name in ("b2", "b3", "b3"):
        await h.drop.remote(name)
    stats = await h.stats.remote()
    assert (stats.bytes, stats.objects, stats.bundles) == (0, 0, 0)


async def test_the_same_segment_pulled_twice_at_once() -> None:
    h, shard = holder(), Exporter.remote()
    await asyncio.gather(*(h.take.remote(draft(f"b{i}"), [(shard, p) for p in parts(f"b{i}", ("s0",))]) for i in range(6)))
    assert (await h.stats.remote()).bytes == 7 * KIB
    assert (await shard.names.remote()).count("s0") == 1


async def test_budget_pins_and_ttl() -> None:
    h, shard = holder(budget=3 * KIB), Exporter.remote()
    for name in ("b1", "b2", "b3"):
        await h.take.remote(draft(name), [(shard, p) for p in parts(name)])
    await h.pin.remote("b1")
    await h.fetch.remote("b2")
    await h.take.remote(draft("b4"), [(shard, p) for p in parts("b4")])
    assert {b.lineage for b in await h.bundles.remote()} == {"b1", "b2", "b4"}, "b1 is pinned, b2 was used later than b3"
    assert (await h.stats.remote()).never_hit == 1
    for name in ("b2", "b4"):
        await h.pin.remote(name)
    with pytest.raises(StoreFull, match="1,024 bytes do not fit"):
        await h.take.remote(draft("b5"), [(shard, p) for p in parts("b5")])
    await h.unpin.remote("b4")
    await h.take.remote(draft("b5"), [(shard, p) for p in parts("b5")])
    assert {b.lineage for b in await h.bundles.remote()} == {"b1", "b2", "b5"}
    brief = holder(budget=3 * KIB, ttl_s=0.2)
    await brief.take.remote(draft("b1"), [(shard, p) for p in parts("b1")])
    await asyncio.sleep(0.4)
    await brief.take.remote(draft("b2"), [(shard, p) for p in parts("b2")])
    assert [b.lineage for b in await brief.bundles.remote()] == ["b2"]


async def test_a_shard_that_dies_while_exporting_leaves_nothing() -> None:
    h, shard = holder(), Exporter.remote()
    ray.kill(shard)
    with pytest.raises(ray.exceptions.RayActorError):
        await h.take.remote(draft("b1"), [(shard, p) for p in parts("b1", ("s0",))])
    stats = await h.stats.remote()
    assert (stats.bytes, stats.objects, stats.bundles) == (0, 0, 0)


async def test_a_holders_death_loses_what_is_not_durable(tmp_path: Path) -> None:
    shard = Exporter.remote()
    plain, durable = holder(), holder(durable=f"file://{tmp_path}")
    for h in (plain, durable):
        await h.take.remote(draft("b1"), [(shard, p) for p in parts("b1", ("s0",))])
    await durable.flush.remote()
    assert ((await plain.stats.remote()).not_durable, (await durable.stats.remote()).not_durable) == (1, 0)
    before = (await plain.stats.remote()).started
    await asyncio.gather(kill(plain), kill(durable))
    assert await plain.fetch.remote("b1") is None
    assert (await plain.stats.remote()).started > before
    again = await durable.fetch.remote("b1")
    assert again.source == "durable"
    assert set(again.refs) == {"b1.state", "s0"}
    assert (await durable.fetch.remote("b1")).source == "store", "now in memory again"


async def test_a_mirror_outlives_the_holder_it_copied() -> None:
    shard, first, second = Exporter.remote(), holder(), holder()
    await first.take.remote(draft("b1"), [(shard, p) for p in parts("b1", ("s0",))])
    await second.copy.remote(await first.fetch.remote("b1"))
    await kill(first)
    fetched = await second.fetch.remote("b1")
    assert {name: bytes(ray.get(ref)["x"][:2]) for name, [ref] in fetched.refs.items()} == {"b1.state": b"b1", "s0": b"s0"}


async def test_a_holder_has_another_node_keep_a_mirror() -> None:
    """This holder says that it is of a node `n`; the other node is the one that is there."""
    first, lineage = holder(), "00ab"
    await first.take.remote(draft(lineage), [(Exporter.remote(), p) for p in parts(lineage, ("s0",))])
    assert await first.mirror.remote("ffff") is None
    bundle, name = await first.mirror.remote(lineage)
    second = ray.get_actor(name, namespace="serve")
    try:
        assert name == holder_name(ray.get_runtime_context().get_node_id())
        assert (await first.stats.remote()).hits == 0, "nobody asked for it yet"
        await kill(first)
        fetched = await second.fetch.remote(lineage)
        assert fetched.bundle == bundle
        assert set(fetched.refs) == {f"{lineage}.state", "s0"}
    finally:
        ray.kill(second)


async def test_a_deleted_sessions_states_go_and_those_that_a_fork_knows_stay(tmp_path: Path) -> None:
    keeper = holder(name="k3-holder-deleting", durable=f"file://{tmp_path}")
    store = ray.remote(SessionStore).options(num_cpus=0).remote(60.0, f"file://{tmp_path}")
    shard = Exporter.remote()
    try:
        await store.begin.remote("t", "s", "i", 30.0)
        for lineage, position in (("old", 10), ("own", 20)):
            bundle = await keeper.take.remote(draft(lineage, position), [(shard, p) for p in parts(lineage, ("s0",))])
            await store.register.remote(bundle, "k3-holder-deleting")
            await store.attach.remote("t", "s", BundleAt(position=position, lineage=lineage))
            if lineage == "old":
                await store.fork.remote("t", "s", "fork")
        await store.abandon.remote("t", "s", "i")
        await keeper.flush.remote()
        await store.delete.remote("t", "s")
        await store.flush.remote()
        assert await keeper.manifest.remote("own") is None
        assert await keeper.fetch.remote("own") is None, "nor from the durable tier"
        assert (await keeper.fetch.remote("old")).source == "store"
        assert await store.where.remote(["own", "old"]) == {"old": ("k3-holder-deleting",)}
        assert sorted(path.name for path in (tmp_path / "bundles").iterdir()) == ["old.json"]
        for path in (tmp_path / "objects").iterdir():
            os.utime(path, (0, 0))
        assert await store.sweep.remote() == Swept(manifests=0, objects=1)
        assert sorted(path.name for path in (tmp_path / "objects").iterdir()) == ["old.state.safetensors", "s0.safetensors"]
    finally:
        ray.kill(keeper)
        ray.kill(store)


async def test_what_a_failing_store_did_not_take_is_written_when_it_is_back() -> None:
    with running_store() as store:
        store.proxy.fault = lambda _: Fault(status=500)
        keeper = (
            ray.remote(Pidded)
            .options(num_cpus=0, runtime_env=KEYS)
            .remote("n", 64 * KIB, 60.0, f"s3://{BUCKET}/states", store.proxy.url, 0.2)
        )
        await keeper.take.remote(draft("b1"), [(Exporter.remote(), p) for p in parts("b1", ("s0",))])
        await keeper.flush.remote()
        stats = await keeper.stats.remote()
        assert (stats.not_durable, stats.durable_failures >= 1) == (1, True)
        assert (await keeper.fetch.remote("b1")).source == "store", "memory has it all the while"
        store.proxy.fault = lambda _: None
        for _ in range(200):
            if (await keeper.stats.remote()).not_durable == 0:
                break
            await asyncio.sleep(0.1)
        again = (
            ray.remote(StateHolder)
            .options(num_cpus=0, runtime_env=KEYS)
            .remote("m", 64 * KIB, 60.0, f"s3://{BUCKET}/states", store.proxy.url)
        )
        store.proxy.fault = lambda request: Fault(after=200) if "objects" in request.path else None
        with pytest.raises(DurableError, match="cut short"):
            await again.fetch.remote("b1")
        store.proxy.fault = lambda request: Fault(drip=(256, 0.01)) if "objects" in request.path else None
        fetched = await again.fetch.remote("b1")
        assert (fetched.source, set(fetched.refs)) == ("durable", {"b1.state", "s0"})
    ray.kill(keeper)
    ray.kill(again)


@pytest.mark.parametrize("fault", ["flipped", "cut", "absent", "manifest"])
async def test_a_damaged_durable_object_is_never_handed_out(tmp_path: Path, fault: str) -> None:
    h, shard = holder(durable=f"file://{tmp_path}"), Exporter.remote()
    await h.take.remote(draft("b1"), [(shard, p) for p in parts("b1", ("s0",))])
    await h.flush.remote()
    await kill(h)
    file = tmp_path / "objects" / "s0.safetensors"
    raw = file.read_bytes()
    if fault == "flipped":
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif fault == "cut":
        file.write_bytes(raw[:-10])
    elif fault == "absent":
        file.unlink()
    else:
        (tmp_path / "bundles" / "b1.json").write_bytes(b"{}")
    if fault == "absent":
        assert set((await h.fetch.remote("b1")).refs) == {"b1.state"}
    else:
        with pytest.raises((DurableError, ValueError)):
            await h.fetch.remote("b1")


async def test_an_upload_is_checked_part_by_part() -> None:
    h = holder()
    arrays = {"x": np.arange(4)}
    meta = ObjectRef(name="s0", digest=digest(arrays), nbytes=32)
    shard = Exporter.remote()
    made = await holder().take.remote(draft("b1"), [(shard, p) for p in parts("b1")])
    whole = replace(made, segments=(replace_segment(meta),))
    with pytest.raises(ValueError, match=r"b1\.state: missing"):
        await h.put.remote(whole, {"s0": arrays})
    state = {"x": np.frombuffer(b"b1.state".ljust(KIB, b"."), np.uint8)}
    with pytest.raises(ValueError, match="s0: its bytes do not match"):
        await h.put.remote(whole, {"b1.state": state, "s0": {"x": np.arange(5)}})
    await h.put.remote(whole, {"b1.state": state, "s0": arrays})
    assert set((await h.fetch.remote("b1")).refs) == {"b1.state", "s0"}


def replace_segment(meta: ObjectRef) -> Any:
    from engine.bundle import Segment

    return Segment(start=0, stop=10, object=meta)


async def test_turns_are_leased_and_survive_the_stores_death() -> None:
    keeper = holder(name="k3-holder-turns")
    store = ray.remote(PiddedStore).options(num_cpus=0, max_restarts=-1).remote(60.0)
    try:
        await store.begin.remote("t", "s", "ingress-1", 30.0)
        with pytest.raises(SessionBusy):
            await store.begin.remote("t", "s", "ingress-2", 30.0)
        await store.begin.remote("u", "s", "ingress-2", 30.0)  # another tenant's session of that name
        assert await store.finish.remote("t", "s", "ingress-1", tokens=b"1234", messages=b"[]", cost=1.0)
        assert await store.finish.remote("t", "s", "ingress-1", tokens=b"1234", messages=b"[]", cost=1.0), "the first answer was lost"
        assert not await store.finish.remote("t", "s", "ingress-0", tokens=b"5678", messages=b"[]", cost=1.0), "that turn is over"
        await store.attach.remote("t", "s", BundleAt(position=10, lineage="b1"))
        await store.begin.remote("t", "s", "ingress-3", 30.0)
        made = await keeper.take.remote(draft("b1"), [(Exporter.remote(), p) for p in parts("b1")])
        await kill(store)
        record = await store.get.remote("t", "s")
        assert (record.tokens, record.turns, record.bundles) == (b"1234", 1, (BundleAt(position=10, lineage="b1"),))
        [found] = await store.find.remote([made.anchor], "t", "s")
        assert (found.at, found.holders) == (BundleAt(position=10, lineage="b1"), ("k3-holder-turns",))
        assert await store.finish.remote("t", "s", "ingress-3", tokens=b"12345678", messages=b"[]", cost=1.0), "the turn went on meanwhile"
        with pytest.raises(UnknownSession):
            await store.get.remote("nobody", "s")
    finally:
        ray.kill(keeper)


async def test_find_by_anchor_and_forget() -> None:
    store = ray.remote(SessionStore).options(num_cpus=0).remote(60.0)
    for lineage, position in (("x1", 70), ("x2", 100), ("y1", 130)):
        await store.register.remote(draft(lineage, position), "h")
    await store.register.remote(draft("x2", 100), "g")
    found = await store.find.remote(["ax", "az"], "t", None)
    assert [(f.at.lineage, f.holders) for f in found] == [("x2", ("g", "h")), ("x1", ("h",))]
    await store.forget.remote("x2", "h")
    await store.forget.remote("x1", "h")
    assert [(f.at.lineage, f.holders) for f in await store.find.remote(["ax"], "t", None)] == [("x2", ("g",))]


async def test_sessions_are_there_after_a_restart_of_everything(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    store = ray.remote(SessionStore).options(num_cpus=0).remote(60.0, url)
    for turn in range(20):
        await store.begin.remote("t", "s", f"i{turn}", 30.0)
        await store.finish.remote("t", "s", f"i{turn}", tokens=bytes([turn]) * 4, messages=b"[]", cost=0.5)
    await store.create.remote(SessionRecord(tenant="t", session="gone"))
    await store.delete.remote("t", "gone")
    await store.flush.remote()
    ray.kill(store)
    again = ray.remote(SessionStore).options(num_cpus=0).remote(60.0, url)
    record = await again.get.remote("t", "s")
    assert (record.tokens, record.turns, record.cost) == (bytes([19]) * 4, 20, 10.0)
    with pytest.raises(UnknownSession):
        await again.get.remote("t", "gone")
