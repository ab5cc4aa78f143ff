"""`StateHolder`: owns the stored objects of one node, so that they outlive the shards and replicas that made them.

In Ray the caller of an actor method owns what it returns. So the holder calls the shard's export: the bytes stay where the shard put
them, in its node's object store, and the owner is this detached actor. Killing a holder loses what it alone owned; a mirror on another
node therefore makes its own `ray.put`.

Memory is bounded by a byte budget: expired bundles go first, then the least recently used unpinned one, a durable one before one that is
not. When everything left is pinned, a bundle is refused with StoreFull; the sessions concerned go on and are prefilled again if they move.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from cluster.durable import Blobs, manifest_key, object_key, open_blobs, pack, unpack
from cluster.holder_actors import holder_name, mirror_node, node_holder
from engine.bundle import ExportPart, ObjectRef, RecurrentPart, Segment, StateBundle, decode_bundle, digest, encode_bundle
from engine.errors import DurableError, StoreFull
from engine.session import SessionRecord

RETRY_S = 15.0  # between attempts to write what the durable tier did not take
WRITES = 2  # bundles written to the durable tier at a time
RECORDS = 100_000  # copies of session records kept for the store


@dataclass(slots=True)
class _Held:
    """An object of this node. `ref` is never pickled on its own: a pickled ref pins its bytes for ever."""

    meta: ObjectRef
    ref: Any
    durable: bool = False
    bundles: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    bundle: StateBundle
    used: float
    hits: int = 0
    durable: bool = False
    pins: int = 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A bundle with refs of its objects, each inside a list so that it stays a ref on its way; absent ones are absent."""

    bundle: StateBundle
    refs: dict[str, list[Any]]
    source: str  # "store", or "durable" when something had to be read from there


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderStats:
    node: str
    started: float  # seconds since the epoch: another value means that it died in between
    bundles: int
    objects: int
    bytes: int
    budget: int
    pinned: int
    not_durable: int  # bundles that die with this holder
    taken: int
    hits: int
    evicted: int
    never_hit: int  # evicted without ever having been fetched
    refused: int
    durable_bytes: int  # written
    durable_failures: int


class StateHolder:
    """One per node, detached. Methods are coroutines: object-store and disk work runs in threads, so a slow tier never blocks a lookup."""

    def __init__(
        self,
        node: str,
        budget_bytes: int,
        ttl_s: float,
        durable_url: str | None = None,
        endpoint_url: str | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._node = node
        self._settings: dict[str, Any] = {"ttl_s": ttl_s, "durable_url": durable_url, "endpoint_url": endpoint_url}
        self._budget = budget_bytes
        self._ttl = ttl_s
        self._blobs: Blobs | None = open_blobs(durable_url, endpoint_url) if durable_url else None
        self._started = time.time()
        self._objects: dict[str, _Held] = {}
        self._pulling: dict[str, asyncio.Future[_Held]] = {}
        self._users: Counter[str] = Counter()  # objects that a call in progress relies on
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by lineage, least recently used first
        self._records: OrderedDict[tuple[str, str], SessionRecord] = OrderedDict()
        self._bytes = self._reserved = 0
        self._count: Counter[str] = Counter()
        self._writing: set[asyncio.Task[None]] = set()
        self._write_slots = asyncio.Semaphore(WRITES)
        self._unwritten: set[str] = set()  # lineages
        self._retry_s = retry_s
        self._retrying: asyncio.Task[None] | None = None

    # -- bundles come --------------------------------------------------------------------------------------------------

    async def take(self, draft: StateBundle, jobs: Sequence[tuple[Any, ExportPart]]) -> StateBundle:
        """Calls each shard's export, keeps the results, and makes the bundle of them findable here. Raises StoreFull, RayError.

        Objects that are here already (segments shared with other bundles) are not exported again.
        """
        names = [part.name for _, part in jobs]
        need = sum(part.nbytes for _, part in jobs if part.name not in self._objects)
        self._users.update(names)
        try:
            self._make_room(need)
            self._reserved += need
            try:
                held = await asyncio.gather(*(self._pull(shard, part) for shard, part in jobs))
            finally:
                self._reserved -= need
            parts = [(part, h.meta) for (_, part), h in zip(jobs, held, strict=True)]
            bundle = replace(
                draft,
                recurrent=tuple(RecurrentPart(first=p.heads[0], last=p.heads[1], object=meta) for p, meta in parts if p.heads),
                segments=tuple(Segment(start=p.start, stop=p.stop, object=meta) for p, meta in parts if not p.heads),
            )
            self._publish(bundle)
        finally:
            self._let_go(names)
        self._count["taken"] += 1
        return bundle

    async def put(self, bundle: StateBundle, arrays: dict[str, dict[str, Any]]) -> None:
        """A bundle with all its arrays by object name (an upload). Raises StoreFull; ValueError naming the wrong part."""
        for meta in bundle.objects:
            if meta.name not in arrays:
                raise ValueError(f"{meta.name}: missing")
            if await asyncio.to_thread(digest, arrays[meta.name]) != meta.digest:
                raise ValueError(f"{meta.name}: its bytes do not match the digest in the manifest")
        self._make_room(sum(m.nbytes for m in bundle.objects if m.name not in self._objects))
        for meta in bundle.objects:
            if meta.name not in self._objects:
                self._keep(_Held(meta, ray.put(arrays[meta.name])))
        self._publish(bundle)

    async def copy(self, fetched: Fetched) -> None:
        """Another node's bundle in objects of this holder's own, so that it outlives that node. Raises StoreFull, RayError."""
        arrays = {name: await ref for name, [ref] in fetched.refs.items()}
        await self.put(fetched.bundle, arrays)

    async def mirror(self, lineage: str) -> tuple[StateBundle, str] | None:
        """Has another node keep a copy, too. The bundle and the holder that has it now; None without such a bundle or another node.

        Raises StoreFull of that holder, RayError.
        """
        node = mirror_node(self._node, lineage)
        fetched = await self._gather(lineage) if node is not None else None
        if node is None or fetched is None:
            return None
        try:
            await node_holder(node, budget_bytes=self._budget, **self._settings).copy.remote(fetched)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return fetched.bundle, holder_name(node)

    # -- bundles go ----------------------------------------------------------------------------------------------------

    async def fetch(self, lineage: str) -> Fetched | None:
        """The bundle from memory, what lacks from the durable tier, digests checked there. Raises DurableError, StoreFull."""
        fetched = await self._gather(lineage)
        if fetched is None:
            return None
        if (entry := self._entries.get(lineage)) is not None:
            entry.hits += 1
            self._touch(lineage)
        self._count["hits"] += 1
        return fetched

    async def _gather(self, lineage: str) -> Fetched | None:
        entry = self._entries.get(lineage)
        if entry is not None:
            bundle = entry.bundle
        elif self._blobs is None or (raw := await asyncio.to_thread(self._blobs.get, manifest_key(lineage))) is None:
            return None
        else:
            bundle = decode_bundle(raw)
        names = [meta.name for meta in bundle.objects]
        missing = [meta for meta in bundle.objects if meta.name not in self._objects]
        self._users.update(names)
        try:
            if missing and self._blobs is not None:
                await self._load(bundle, missing)
            refs = {name: [held.ref] for name in names if (held := self._objects.get(name)) is not None}
        finally:
            self._let_go(names)
        return Fetched(bundle, refs, "durable" if missing else "store")

    async def manifest(self, lineage: str) -> StateBundle | None:
        """The bundle as held in memory."""
        entry = self._entries.get(lineage)
        return None if entry is None else entry.bundle

    async def bundles(self) -> list[StateBundle]:
        """Every manifest held here: what a restarted SessionStore rebuilds its index from."""
        return [entry.bundle for entry in self._entries.values()]

    async def pin(self, lineage: str) -> bool:
        """Keeps a bundle until `unpin`. False when it is not here."""
        entry = self._entries.get(lineage)
        if entry is not None:
            entry.pins += 1
        return entry is not None

    async def unpin(self, lineage: str) -> None:
        entry = self._entries.get(lineage)
        if entry is not None and entry.pins:
            entry.pins -= 1

    async def drop(self, lineage: str) -> None:
        """Forgets a bundle and the objects that no other bundle here names. Idempotent."""
        self._remove(lineage)

    # -- the session store's safety copies -----------------------------------------------------------------------------

    async def keep_record(self, record: SessionRecord) -> None:
        key = (record.tenant, record.session)
        kept = self._records.get(key)
        if kept is None or kept.updated <= record.updated:
            self._records[key] = record
            self._records.move_to_end(key)
            while len(self._records) > RECORDS:
                self._records.popitem(last=False)

    async def forget_record(self, tenant: str, session: str) -> None:
        self._records.pop((tenant, session), None)

    async def records(self) -> list[SessionRecord]:
        return list(self._records.values())

    # -- looking after it ----------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Waits for the write-behind."""
        while self._writing:
            await asyncio.gather(*self._writing, return_exceptions=True)

    async def stats(self) -> HolderStats:
        entries = self._entries.values()
        counts = {name: self._count[name] for name in ("taken", "hits", "evicted", "never_hit", "refused")}
        return HolderStats(
            node=self._node,
            started=self._started,
            bundles=len(entries),
            objects=len(self._objects),
            bytes=self._bytes,
            budget=self._budget,
            pinned=sum(e.pins > 0 for e in entries),
            not_durable=sum(not e.durable for e in entries),
            durable_bytes=self._count["durable_bytes"],
            durable_failures=self._count["durable_failures"],
            **counts,
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _pull(self, shard: Any, part: ExportPart) -> _Held:
        held = self._objects.get(part.name)
        if held is not None:
            return held
        pulling = self._pulling.get(part.name)
        if pulling is None:
            pulling = self._pulling[part.name] = asyncio.ensure_future(self._export(shard, part))
            pulling.add_done_callback(lambda _: self._pulling.pop(part.name))
        return await asyncio.shield(pulling)

    async def _export(self, shard: Any, part: ExportPart) -> _Held:
        arrays, meta = shard.export.options(num_returns=2).remote(part)
        held = _Held(await meta, arrays)
        self._keep(held)
        return held

    async def _load(self, bundle: StateBundle, missing: Sequence[ObjectRef]) -> None:
        assert self._blobs is not None
        self._make_room(sum(meta.nbytes for meta in missing))
        for meta in missing:
            raw = await asyncio.to_thread(self._blobs.get, object_key(meta.name))
            if raw is None:
                continue
            arrays = await asyncio.to_thread(unpack, raw)
            if await asyncio.to_thread(digest, arrays) != meta.digest:
                raise DurableError(f"objects/{meta.name}: its bytes do not match the digest in the manifest")
            if meta.name not in self._objects:
                self._keep(_Held(meta, ray.put(arrays), durable=True))
        if all(meta.name in self._objects for meta in bundle.objects):
            self._enter(bundle)
            self._entries[bundle.lineage].durable = True

    async def _write(self, bundle: StateBundle) -> None:
        """Objects first, manifest last: a manifest in the durable tier means that all its objects are there."""
        assert self._blobs is not None
        async with self._write_slots:
            try:
                for meta in bundle.objects:
                    held = self._objects.get(meta.name)
                    if held is None:
                        return  # evicted meanwhile
                    if not held.durable:
                        raw = await asyncio.to_thread(pack, await held.ref)
                        await asyncio.to_thread(self._blobs.put, object_key(meta.name), raw)
                        held.durable = True
                        self._count["durable_bytes"] += len(raw)
                if bundle.lineage not in self._entries:
                    return  # dropped meanwhile
                await asyncio.to_thread(self._blobs.put, manifest_key(bundle.lineage), encode_bundle(bundle))
            except (DurableError, ray.exceptions.RayError):
                self._count["durable_failures"] += 1
                self._unwritten.add(bundle.lineage)
                if self._retrying is None or self._retrying.done():
                    self._retrying = asyncio.create_task(self._write_again())
                return
        if (entry := self._entries.get(bundle.lineage)) is not None:
            entry.durable = True

    async def _write_again(self) -> None:
        """What the durable tier did not take, until it does or the bundle is gone."""
        while self._unwritten:
            await asyncio.sleep(self._retry_s)
            again, self._unwritten = self._unwritten, set()
            await asyncio.gather(*(self._write(entry.bundle) for name in again if (entry := self._entries.get(name)) is not None))

    def _publish(self, bundle: StateBundle) -> None:
        self._enter(bundle)
        if self._blobs is not None and not self._entries[bundle.lineage].durable:
            task = asyncio.create_task(self._write(bundle))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def _enter(self, bundle: StateBundle) -> None:
        if bundle.lineage not in self._entries:
            self._entries[bundle.lineage] = _Entry(bundle, time.monotonic())
            for meta in bundle.objects:
                self._objects[meta.name].bundles.add(bundle.lineage)
        self._touch(bundle.lineage)

    def _touch(self, lineage: str) -> None:
        self._entries.move_to_end(lineage)
        self._entries[lineage].used = time.monotonic()

    def _keep(self, held: _Held) -> None:
        self._objects[held.meta.name] = held
        self._bytes += held.meta.nbytes

    def _let_go(self, names: Iterable[str]) -> None:
        """A call no longer relies on these objects; those of no bundle are forgotten."""
        for name in names:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._forget_unused(name)

    def _forget_unused(self, name: str) -> None:
        held = self._objects.get(name)
        if held is not None and not held.bundles and name not in self._users:
            del self._objects[name]
            self._bytes -= held.meta.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Evicts expired, then durable, then least recently used bundles until `nbytes` fit. Raises StoreFull."""
        now = time.monotonic()
        for lineage in [k for k, e in self._entries.items() if now - e.used > self._ttl and not e.pins]:
            self._evict(lineage)
        while self._bytes + self._reserved + nbytes > self._budget:
            free = [k for k, e in self._entries.items() if not e.pins]
            victim = next((k for k in free if self._entries[k].durable), free[0] if free else None)
            if victim is None:
                self._count["refused"] += 1
                raise StoreFull(
                    f"holder of node {self._node}: {nbytes:,} bytes do not fit: "
                    f"{self._bytes + self._reserved:,} of {self._budget:,} are used and pinned"
                )
            self._evict(victim)

    def _evict(self, lineage: str) -> None:
        self._count["evicted"] += 1
        self._count["never_hit"] += not self._entries[lineage].hits
        self._remove(lineage)

    def _remove(self, lineage: str) -> None:
        entry = self._entries.pop(lineage, None)
        for meta in entry.bundle.objects if entry else ():
            if (held := self._objects.get(meta.name)) is not None:
                held.bundles.discard(lineage)
                self._forget_unused(meta.name)
