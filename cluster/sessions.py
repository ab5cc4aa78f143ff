"""`SessionStore`: session → record, and lineage → which holders have the bundle. One detached actor; names only, never ObjectRefs.

A pickled ref pins its object for ever, and a store that owned state would take it along when it dies. This one can die at any time: after
its restart it rebuilds the bundle index from the holders, and the sessions from the copies of its records that two holders keep, or from
the durable tier.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray

from cluster.bundle_index import BundleIndex, Found
from cluster.durable import manifest_key, open_blobs
from cluster.durable_records import DurableRecords
from cluster.holder_actors import NAMESPACE, holders
from cluster.sweep import Swept, sweep
from engine.bundle import StateBundle
from engine.errors import DurableError, SessionBusy, SessionExists, UnknownMark, UnknownSession
from engine.session import BundleAt, SessionRecord, TurnEnd, cut, marks_within

SWEEP_S = 3600.0
MAX_DELETED = 10_000  # deleted sessions that are remembered as such
MAX_BUNDLES = 64  # resumable positions that one session remembers
COPIES = 2  # holders that keep a copy of a record
HOLDERS_S = 5.0  # how long the list of holders is believed
REBUILD_S = 10.0  # longest wait for one holder after a restart


@dataclass(slots=True)
class _Turn:
    """The one running turn of a session: leased, so that a dead ingress does not lock a session for ever."""

    owner: str
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    sessions: int
    bundles: int
    running_turns: int
    expired: int
    durable_failures: int


class SessionStore:
    def __init__(
        self,
        ttl_s: float,
        durable_url: str | None = None,
        endpoint_url: str | None = None,
        list_holders: Callable[[], Sequence[str]] | None = None,
        sweep_s: float = SWEEP_S,
    ) -> None:
        """`list_holders`: names of the holders to rebuild from and to copy records to; None asks Ray. `sweep_s`: between looks at
        whether the durable tier has to be cleared up."""
        self._ttl = ttl_s
        self._list_holders = list_holders or holders
        self._blobs = open_blobs(durable_url, endpoint_url) if durable_url else None
        self._durable = DurableRecords(self._blobs) if self._blobs is not None else None
        self._records: OrderedDict[tuple[str, str], SessionRecord] = OrderedDict()  # least recently used first
        self._turns: dict[tuple[str, str], _Turn] = {}
        self._deleted: OrderedDict[tuple[str, str], None] = OrderedDict()  # a while ago: their last states may still be on their way
        self._bundles = BundleIndex()
        self._holders: tuple[str, ...] = ()
        self._holders_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweep_s, self._swept, self._unswept = sweep_s, time.time(), False
        self._started = time.time()
        self._expired = self._failures = 0
        self._ready = asyncio.Event()
        self._beside(self._rebuild())
        if self._blobs is not None:
            self._beside(self._sweeping())

    # -- turns ---------------------------------------------------------------------------------------------------------

    async def begin(self, tenant: str, session: str, owner: str, lease_s: float) -> SessionRecord:
        """Starts a turn; a session that does not exist begins empty. Raises SessionBusy while another turn's lease lasts."""
        await self._ready.wait()
        key, now = (tenant, session), time.time()
        turn = self._turns.get(key)
        if turn is not None and turn.owner != owner and turn.until > now:
            raise SessionBusy(f"session {session!r} is answering another request; wait for its end or fork it")
        self._turns[key] = _Turn(owner, now + lease_s)
        self._deleted.pop(key, None)
        return await self._load(key) or SessionRecord(tenant=tenant, session=session, created=now, updated=now)

    async def renew(self, tenant: str, session: str, owner: str, lease_s: float) -> bool:
        """False when the lease was lost to somebody else."""
        turn = self._turns.get((tenant, session))
        if turn is None or turn.owner != owner:
            return False
        turn.until = time.time() + lease_s
        return True

    async def finish(
        self,
        tenant: str,
        session: str,
        owner: str,
        *,
        tokens: bytes,
        messages: bytes,
        cost: float,
        ends: Sequence[TurnEnd] = (),
        rendering: str = "",
    ) -> bool:
        """The turn's outcome. False, and nothing changes, when the lease was lost: somebody else's turn is the session's truth now.

        Asked again, because the answer was lost on its way, it changes nothing and is True.
        """
        key = (tenant, session)
        turn = self._turns.get(key)
        record = await self._load(key)
        if record is not None and record.ended_by == owner:
            return True
        if turn is None and record is not None and record.updated > self._started:
            return False
        if turn is not None and turn.owner != owner:
            return False
        self._turns.pop(key, None)  # absent when this store was restarted in the middle of the turn
        record = record or SessionRecord(tenant=tenant, session=session, created=time.time())
        turns, total = record.turns + 1, record.cost + cost
        record = replace(record, tokens=tokens, messages=messages, ends=tuple(ends), rendering=rendering)
        record = replace(record, turns=turns, cost=total, ended_by=owner, asked=b"")
        await self._save(replace(record, marks=marks_within(record), updated=time.time()))
        return True

    async def remember(self, tenant: str, session: str, owner: str, asked: bytes) -> bool:
        """What the running turn was asked. False when the lease was lost."""
        key = (tenant, session)
        turn, record, now = self._turns.get(key), await self._load(key), time.time()
        if turn is None or turn.owner != owner:
            return False
        await self._save(replace(record or SessionRecord(tenant=tenant, session=session, created=now, updated=now), asked=asked))
        return True

    async def attach(self, tenant: str, session: str, at: BundleAt) -> bool | None:
        """A replica published one more resumable position of the session; whether that is pinned, None when it was deleted meanwhile.

        Which of them fit a prompt is for its lineage to say.
        """
        if (tenant, session) in self._deleted:
            return None
        record = await self._load((tenant, session)) or SessionRecord(
            tenant=tenant, session=session, created=time.time(), updated=time.time()
        )
        others = [b for b in record.bundles if b.lineage != at.lineage]
        newest = [at, *others][:MAX_BUNDLES]
        await self._save(replace(record, bundles=tuple(sorted(newest, key=lambda b: -b.position))))
        return record.pinned

    async def abandon(self, tenant: str, session: str, owner: str) -> None:
        """Ends a turn without an outcome. Idempotent."""
        turn = self._turns.get((tenant, session))
        if turn is not None and turn.owner == owner:
            del self._turns[(tenant, session)]

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def get(self, tenant: str, session: str) -> SessionRecord:
        """Raises UnknownSession, also for a session of another tenant."""
        await self._ready.wait()
        record = await self._load((tenant, session))
        if record is None:
            raise UnknownSession(f"there is no session {session[:128]!r}")
        return record

    async def list(self, tenant: str, limit: int = 100) -> list[SessionRecord]:
        """Newest first, without tokens and messages."""
        await self._ready.wait()
        mine = [r for (t, _), r in reversed(self._records.items()) if t == tenant]
        return [replace(r, tokens=b"", messages=b"[]", asked=b"") for r in mine[:limit]]

    async def create(self, record: SessionRecord) -> None:
        """A new session with that content (import). Raises SessionExists when the name is taken."""
        await self._ready.wait()
        if await self._load((record.tenant, record.session)) is not None:
            raise SessionExists(f"session {record.session!r} exists already; delete it or choose another name")
        await self._save(record)

    async def fork(self, tenant: str, session: str, new: str, mark: str | None = None) -> SessionRecord:
        """Another record that points at the same bundles: no state is copied. `mark` forks from the end of a marked turn."""
        source = await self.get(tenant, session)
        now = time.time()
        forked = replace(source, session=new, parent=session, created=now, updated=now, marks={}, pinned=False, cost=0.0, asked=b"")
        if mark is not None:
            if mark not in source.marks:
                raise UnknownMark(f"session {session!r} has no mark {mark!r}; it has {sorted(source.marks) or 'none'}")
            forked = cut(forked, source.marks[mark])
        await self.create(forked)
        return forked

    async def mark(self, tenant: str, session: str, name: str) -> SessionRecord:
        """Names the end of the last turn."""
        record = await self.get(tenant, session)
        if not record.ends:
            raise UnknownMark(f"session {session!r} has no finished turn to mark yet")
        marked = replace(record, marks={**record.marks, name: record.ends[-1]})
        await self._save(marked)
        return marked

    async def pin(self, tenant: str, session: str, pinned: bool) -> SessionRecord:
        """A pinned session does not expire."""
        record = replace(await self.get(tenant, session), pinned=pinned)
        await self._save(record)
        return record

    async def delete(self, tenant: str, session: str) -> SessionRecord:
        """Forgets the record and the states that no other session knows of; the sweep takes what is left of them in the durable tier.

        Raises UnknownSession, SessionBusy.
        """
        key = (tenant, session)
        record = await self.get(tenant, session)
        turn = self._turns.get(key)
        if turn is not None and turn.until > time.time():
            raise SessionBusy(f"session {session!r} is answering a request; delete it when that has ended")
        self._records.pop(key, None)
        self._turns.pop(key, None)
        self._deleted[key] = None
        if len(self._deleted) > MAX_DELETED:
            self._deleted.popitem(last=False)
        self._copy("forget_record", key, tenant, session)
        if self._durable is not None:
            self._durable.write(*key, None)
        used = {at.lineage for other in self._records.values() if other.tenant == tenant for at in other.bundles}
        self._beside(self._drop([at.lineage for at in record.bundles if at.lineage not in used]))
        return record

    # -- where bundles are ---------------------------------------------------------------------------------------------

    async def register(self, bundle: StateBundle, holder: str) -> None:
        """A holder has the bundle in memory."""
        self._bundles.add(bundle, holder)

    async def forget(self, lineage: str, holder: str) -> None:
        """It turned out not to have it."""
        self._bundles.discard(lineage, holder)

    async def where(self, lineages: Sequence[str]) -> dict[str, Sequence[str]]:
        """lineage → holders that have the bundle in memory, for those known."""
        await self._ready.wait()
        return {lineage: names for lineage in lineages if (names := self._bundles.holders(lineage))}

    async def find(self, anchors: Sequence[str], tenant: str, session: str | None, limit: int = 64) -> Sequence[Found]:
        """Bundles that may fit a prompt with these lineages after its full blocks, and those that the session knows; longest first.

        Which of them do fit is for the prompt's lineage at their position to say.
        """
        await self._ready.wait()
        found: dict[str, BundleAt] = {}
        record = await self._load((tenant, session)) if session is not None else None
        if record is not None:
            found = {at.lineage: at for at in record.bundles}
        for at in self._bundles.near(anchors):
            found.setdefault(at.lineage, at)
        best = sorted(found.values(), key=lambda at: -at.position)[:limit]
        return [Found(at, self._bundles.holders(at.lineage)) for at in best]

    async def sweep(self) -> Swept | None:
        """Removes from the durable tier what nothing names any more; None when there is no such tier or it fails."""
        if self._blobs is None:
            return None
        self._swept, self._unswept = time.time(), False
        try:
            return await asyncio.to_thread(sweep, self._blobs, self._ttl, self._swept)
        except DurableError:
            self._failures += 1
            return None

    async def flush(self) -> None:
        """Waits until what is known is in the durable tier, or failed to be."""
        if self._durable is not None:
            await self._durable.flush()

    async def stats(self) -> StoreStats:
        return StoreStats(
            sessions=len(self._records),
            bundles=len(self._bundles),
            running_turns=len(self._turns),
            expired=self._expired,
            durable_failures=self._failures + (self._durable.failures if self._durable is not None else 0),
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _load(self, key: tuple[str, str]) -> SessionRecord | None:
        if key not in self._records and self._durable is not None and (found := await self._durable.read(*key)) is not None:
            self._records.setdefault(key, found)
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    async def _save(self, record: SessionRecord) -> None:
        key = (record.tenant, record.session)
        self._records[key] = record
        self._records.move_to_end(key)
        self._deleted.pop(key, None)
        self._expire()
        self._copy("keep_record", key, record)
        if self._durable is not None:
            self._durable.write(*key, record)

    async def _drop(self, lineages: Sequence[str]) -> None:
        for lineage in lineages:
            for name in self._bundles.remove(lineage):
                await _tell(name, "drop", (lineage,))
            if self._blobs is not None:
                try:
                    await asyncio.to_thread(self._blobs.delete, manifest_key(lineage))
                except DurableError:
                    self._failures += 1  # left to the sweep
        self._unswept = self._unswept or bool(lineages)

    async def _sweeping(self) -> None:
        """Clears the durable tier up from time to time, when something was deleted or may have expired there."""
        assert self._blobs is not None
        while True:
            await asyncio.sleep(self._sweep_s)
            if self._unswept or time.time() - self._swept > self._ttl:
                await self.sweep()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _copy(self, method: str, key: tuple[str, str], *args: Any) -> None:
        """Safety copies in the memory of a few holders, for the time after this actor's death."""
        if time.monotonic() > self._holders_until:
            self._holders, self._holders_until = tuple(self._list_holders()), time.monotonic() + HOLDERS_S
        names = sorted(self._holders, key=lambda name: hashlib.sha256(f"{key}{name}".encode()).digest())[:COPIES]
        for name in names:
            self._beside(_tell(name, method, args))

    def _expire(self) -> None:
        limit = time.time() - self._ttl
        for key, record in list(self._records.items()):
            if record.updated >= limit:
                break
            if not record.pinned and key not in self._turns:
                del self._records[key]
                self._expired += 1

    async def _rebuild(self) -> None:
        for name in self._list_holders():
            try:
                holder = ray.get_actor(name, namespace=NAMESPACE)
                for bundle in await asyncio.wait_for(_value(holder.bundles.remote()), REBUILD_S):
                    await self.register(bundle, name)
                for record in await asyncio.wait_for(_value(holder.records.remote()), REBUILD_S):
                    key = (record.tenant, record.session)
                    if key not in self._records or self._records[key].updated < record.updated:
                        self._records[key] = record
            except (ray.exceptions.RayError, ValueError, TimeoutError):
                continue  # a holder that is gone or hangs has nothing to tell
        self._ready.set()


async def _value(ref: Any) -> Any:
    return await ref


async def _tell(holder: str, method: str, args: tuple[Any, ...]) -> None:
    with suppress(ray.exceptions.RayError, ValueError):  # it is gone; another copy or the durable tier has the record
        await getattr(ray.get_actor(holder, namespace=NAMESPACE), method).remote(*args)


def session_store(ttl_s: float, durable_url: str | None, endpoint_url: str | None) -> Any:
    """The store actor of this cluster: made on first use, detached, restarted when it dies."""
    return (
        ray.remote(SessionStore)
        .options(name="k3-sessions", namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1)
        .remote(ttl_s, durable_url, endpoint_url)
    )
