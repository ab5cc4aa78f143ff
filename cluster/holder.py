"""`StateHolder`: owns the stored objects of one node, so that they outlive the shards and replicas that made them.

In Ray the caller of an actor method owns what it returns. So the holder calls the shard's export: the bytes stay where the shard put
them, in its node's object store, and the owner is this detached actor. Killing a holder loses what it alone owned; a mirror on another
node therefore makes its own `ray.put`.

Memory is bounded by a byte budget: the least recently used unpinned bundle goes first, a durable one before one that is not. When
everything left is pinned, a pull is refused with StoreFull; the sessions concerned go on and are re-prefilled if they must move.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray

from cluster.durable import Blobs, open_blobs, pack, unpack
from engine.bundle import ObjectRef, StateBundle, decode_bundle, digest, encode_bundle
from engine.errors import DurableError, StoreFull


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPart:
    """What a shard is asked to export: a slot's recurrent state of its own heads, or a run of latents from pages."""

    name: str
    slot: int | None = None
    pages: tuple[int, ...] = ()  # pages that cover tokens [start, stop)
    start: int = 0
    stop: int = 0


@dataclass(slots=True)
class _Held:
    """An object of this node: `ref` is kept in a list, never pickled, so that dropping it frees the bytes at once."""

    meta: ObjectRef
    ref: Any
    durable: bool = False
    bundles: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderStats:
    node: str
    bundles: int
    objects: int
    bytes: int
    budget: int
    pinned: int
    not_durable: int  # bundles that die with this holder
    evicted: int
    refused: int
    durable_failures: int


class StateHolder:
    """One per node, detached. Methods are coroutines: object-store and disk work runs in threads, so a slow tier never blocks a lookup."""

    def __init__(self, node: str, budget_bytes: int, ttl_s: float, durable_url: str | None = None, endpoint_url: str | None = None) -> None:
        self._node = node
        self._budget = budget_bytes
        self._ttl = ttl_s
        self._blobs: Blobs | None = open_blobs(durable_url, endpoint_url) if durable_url else None
        self._objects: dict[str, _Held] = {}
        self._bundles: OrderedDict[str, StateBundle] = OrderedDict()  # least recently used first
        self._used: dict[str, float] = {}
        self._pins: dict[str, int] = {}
        self._bytes = 0
        self._evicted = self._refused = self._durable_failures = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._write_slots = asyncio.Semaphore(2)

    async def pull(self, jobs: list[tuple[Any, ExportPart]], nbytes: int) -> list[ObjectRef]:
        """Calls each shard's export and keeps the results. `nbytes`: an upper bound for all of them. Raises StoreFull.

        Objects that are here already (segments shared with other bundles) are not exported again.
        """
        await self.ensure_room(nbytes)
        metas: list[ObjectRef] = []
        made: list[str] = []
        try:
            for shard, part in jobs:
                held = self._objects.get(part.name)
                if held is None:
                    arrays, meta = shard.export.options(num_returns=2).remote(part)
                    held = _Held(await meta, arrays)
                    made.append(part.name)
                    self._keep(held)
                metas.append(held.meta)
        except BaseException:
            for name in made:
                self._forget(name)
            raise
        return metas

    async def put(self, meta: ObjectRef, arrays: dict[str, Any]) -> None:
        """Takes over an object's bytes (import, mirror, load). The caller has checked the digest. Raises StoreFull."""
        if meta.name not in self._objects:
            await self.ensure_room(meta.nbytes)
            self._keep(_Held(meta, ray.put(arrays)))

    async def publish(self, bundle: StateBundle, *, pin: bool = False) -> None:
        """Makes a bundle findable here once its objects of this node are held. Write-behind to the durable tier starts."""
        self._bundles[bundle.lineage] = bundle
        self._touch(bundle.lineage)
        for meta in bundle.objects:
            if (held := self._objects.get(meta.name)) is not None:
                held.bundles.add(bundle.lineage)
        if pin:
            self._pins[bundle.lineage] = self._pins.get(bundle.lineage, 0) + 1
        if self._blobs is not None:
            task = asyncio.create_task(self._write(bundle))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def find(self, lineage: str) -> StateBundle | None:
        """The bundle's manifest, from memory or the durable tier."""
        bundle = self._bundles.get(lineage)
        if bundle is not None:
            self._touch(lineage)
            return bundle
        raw = await self._durable_get(f"bundles/{lineage}.json")
        return decode_bundle(raw) if raw is not None else None

    async def refs(self, names: Iterable[str]) -> dict[str, list[Any]]:
        """name → [ref] of the objects held in memory here; absent names are absent. Refs travel inside lists so that they stay refs."""
        return {name: [held.ref] for name in names if (held := self._objects.get(name)) is not None}

    async def load(self, bundle: StateBundle) -> dict[str, list[Any]]:
        """Brings a durable bundle's missing objects back into memory, digests checked, and returns refs of what is whole."""
        for meta in bundle.objects:
            if meta.name not in self._objects:
                raw = await self._durable_get(f"objects/{meta.name}.safetensors")
                if raw is None:
                    continue
                arrays = await asyncio.to_thread(unpack, raw)
                if await asyncio.to_thread(digest, arrays) != meta.digest:
                    raise DurableError(f"objects/{meta.name}: its bytes do not match the digest in the manifest")
                await self.put(meta, arrays)
                self._objects[meta.name].durable = True
        await self._adopt(bundle)
        return await self.refs(meta.name for meta in bundle.objects)

    async def unpin(self, lineage: str) -> None:
        count = self._pins.get(lineage, 0) - 1
        self._pins.pop(lineage, None) if count <= 0 else self._pins.__setitem__(lineage, count)

    async def drop(self, lineage: str, *, durable: bool = False) -> None:
        """Forgets a bundle and the objects that no other bundle names. Idempotent."""
        bundle = self._bundles.get(lineage)
        self._remove(lineage)
        if durable and self._blobs is not None:
            names = [m.name for m in bundle.objects if m.name not in self._objects] if bundle else []
            for key in (f"bundles/{lineage}.json", *(f"objects/{n}.safetensors" for n in names)):
                await asyncio.to_thread(self._blobs.delete, key)

    async def bundles(self) -> list[StateBundle]:
        """Every manifest held here: what a restarted SessionStore rebuilds its index from."""
        return list(self._bundles.values())

    async def flush(self) -> None:
        """Waits for the write-behind."""
        while self._writing:
            await asyncio.gather(*self._writing, return_exceptions=True)

    async def stats(self) -> HolderStats:
        return HolderStats(
            node=self._node,
            bundles=len(self._bundles),
            objects=len(self._objects),
            bytes=self._bytes,
            budget=self._budget,
            pinned=len(self._pins),
            not_durable=sum(not self._is_durable(b) for b in self._bundles.values()),
            evicted=self._evicted,
            refused=self._refused,
            durable_failures=self._durable_failures,
        )

    async def ensure_room(self, nbytes: int) -> None:
        """Evicts expired, then durable, then least recently used bundles until `nbytes` fit. Raises StoreFull."""
        now = time.monotonic()
        for lineage in [name for name, used in self._used.items() if now - used > self._ttl and name not in self._pins]:
            self._remove(lineage)
        while self._bytes + nbytes > self._budget:
            free = [name for name in self._bundles if name not in self._pins]
            victim = next((name for name in free if self._is_durable(self._bundles[name])), free[0] if free else None)
            if victim is None:
                self._refused += 1
                raise StoreFull(
                    f"holder of node {self._node}: {nbytes:,} bytes do not fit: {self._bytes:,} of {self._budget:,} are used and pinned"
                )
            self._evicted += 1
            self._remove(victim)

    async def _write(self, bundle: StateBundle) -> None:
        """Objects first, manifest last: a manifest in the durable tier means that all its objects of this holder are there."""
        assert self._blobs is not None
        async with self._write_slots:
            try:
                for meta in bundle.objects:
                    held = self._objects.get(meta.name)
                    if held is None or held.durable:
                        continue
                    arrays = await held.ref
                    await asyncio.to_thread(self._blobs.put, f"objects/{meta.name}.safetensors", await asyncio.to_thread(pack, arrays))
                    held.durable = True
                await asyncio.to_thread(self._blobs.put, f"bundles/{bundle.lineage}.json", encode_bundle(bundle))
            except (DurableError, ray.exceptions.RayError):
                self._durable_failures += 1

    async def _durable_get(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._blobs.get, key) if self._blobs is not None else None

    async def _adopt(self, bundle: StateBundle) -> None:
        self._bundles[bundle.lineage] = bundle
        self._touch(bundle.lineage)
        for meta in bundle.objects:
            if (held := self._objects.get(meta.name)) is not None:
                held.bundles.add(bundle.lineage)

    def _is_durable(self, bundle: StateBundle) -> bool:
        return all(held.durable for m in bundle.objects if (held := self._objects.get(m.name)) is not None) and self._blobs is not None

    def _keep(self, held: _Held) -> None:
        self._objects[held.meta.name] = held
        self._bytes += held.meta.nbytes

    def _forget(self, name: str) -> None:
        held = self._objects.pop(name, None)
        if held is not None:
            self._bytes -= held.meta.nbytes

    def _touch(self, lineage: str) -> None:
        self._bundles.move_to_end(lineage)
        self._used[lineage] = time.monotonic()

    def _remove(self, lineage: str) -> None:
        bundle = self._bundles.pop(lineage, None)
        self._used.pop(lineage, None)
        self._pins.pop(lineage, None)
        for meta in bundle.objects if bundle else ():
            held = self._objects.get(meta.name)
            if held is not None:
                held.bundles.discard(lineage)
                if not held.bundles:
                    self._forget(meta.name)


def node_holder(node: str, *, budget_bytes: int, ttl_s: float, durable_url: str | None, endpoint_url: str | None) -> Any:
    """The holder actor of a node: made on first use, detached, pinned there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(StateHolder)
        .options(
            name=f"k3-holder-{node}",
            namespace="serve",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(node, budget_bytes, ttl_s, durable_url, endpoint_url)
    )
