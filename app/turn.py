"""One turn of a session: its lease while it runs, and what is recorded of it when it has ended.

A turn that fails, or whose client goes away, leaves the session as it was. Sending it again, with the same `seed` where tokens are sampled,
gives the same tokens, from the states that the first attempt left behind.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Protocol

from app.choice import Update
from app.past import Outcome
from app.transcript import Transcript
from app.usage import Bill, Meter
from engine.errors import EngineFailure, InvalidRequest, SessionBusy
from engine.session import BundleAt, SessionRecord, TurnEnd

LEASE_S = 15.0  # a session whose ingress died is free again after this
_NAME = re.compile(r"[A-Za-z0-9._:+=@-]{1,128}")


class Sessions(Protocol):
    """What the edge needs of `cluster.sessions.SessionStore`. Raises UnknownSession, SessionBusy; EngineFailure when it does not answer."""

    async def begin(self, tenant: str, session: str, owner: str, lease_s: float) -> SessionRecord: ...
    async def renew(self, tenant: str, session: str, owner: str, lease_s: float) -> bool: ...
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
    ) -> bool: ...
    async def remember(self, tenant: str, session: str, owner: str, asked: bytes) -> bool: ...
    async def abandon(self, tenant: str, session: str, owner: str) -> None: ...
    async def get(self, tenant: str, session: str) -> SessionRecord: ...
    async def list(self, tenant: str, limit: int = 100) -> list[SessionRecord]: ...
    async def create(self, record: SessionRecord) -> None: ...
    async def fork(self, tenant: str, session: str, new: str, mark: str | None = None) -> SessionRecord: ...
    async def mark(self, tenant: str, session: str, name: str) -> SessionRecord: ...
    async def pin(self, tenant: str, session: str, pinned: bool) -> SessionRecord: ...
    async def attach(self, tenant: str, session: str, at: BundleAt) -> None: ...
    async def delete(self, tenant: str, session: str) -> SessionRecord: ...


class Turn:
    """A begun turn. Ends by `finish` or `abandon`."""

    def __init__(self, store: Sessions, tenant: str, session: str, owner: str, lease_s: float, record: SessionRecord) -> None:
        self._store, self._key, self._lease = store, (tenant, session, owner), lease_s
        self.session = session
        self.record = record
        self._renewing: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._renew())

    @classmethod
    async def begin(cls, store: Sessions, tenant: str, session: str, lease_s: float = LEASE_S) -> Turn:
        """Raises SessionBusy while another turn of the session runs."""
        owner = secrets.token_hex(12)
        return cls(store, tenant, session, owner, lease_s, await store.begin(tenant, session, owner, lease_s))

    async def open(self, asked: bytes) -> None:
        """The request was checked and is about to run: from here on its answer can be had again."""
        await self._store.remember(*self._key, asked)

    async def finish(self, outcome: Outcome, cost: float) -> None:
        """Raises SessionBusy when the lease was lost: then another turn's outcome is the session's."""
        if not self._stop_renewing():
            return
        kept = await self._store.finish(
            *self._key,
            tokens=outcome.tokens,
            messages=outcome.messages,
            cost=cost,
            ends=outcome.ends,
            rendering=outcome.rendering,
        )
        if not kept:
            raise SessionBusy(f"session {self.session!r} was taken over by another request; this answer is not part of it")

    async def abandon(self) -> None:
        """The session stays as it was. Does nothing after `finish`."""
        if self._stop_renewing():
            with suppress(EngineFailure):  # then the lease runs out
                await self._store.abandon(*self._key)

    def _stop_renewing(self) -> bool:
        task, self._renewing = self._renewing, None
        if task is not None:
            task.cancel()
        return task is not None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            with suppress(EngineFailure):  # the next time may be in time
                await self._store.renew(*self._key, self._lease)


class Recorder:
    """Looks at the updates of a turn as they pass. The first choice is the one that the session remembers.

    The outcome is stored before the last update is passed on: whoever has seen the end of an answer can send the next turn.
    """

    def __init__(self, turn: Turn, outcome: Callable[[Transcript], Awaitable[Outcome]], choices: int, meter: Meter, bill: Bill) -> None:
        self._turn = turn
        self._outcome = outcome
        self._running = choices
        self._meter = meter
        self._bill = bill
        self._first = Transcript()

    async def follow(self, source: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
        try:
            async with aclosing(source):
                async for update in source:
                    self._meter.count(update)
                    if update.choice == 0:
                        self._first.add(update)
                    self._running -= update.finish is not None
                    if not self._running:
                        await self._turn.finish(await self._outcome(self._first), self._bill.cost(self._meter.total()) or 0.0)
                    yield update
        finally:
            await self.close()

    async def close(self) -> None:
        await self._turn.abandon()


def session_name(header: str | None, field: str | None) -> str | None:
    """The session of a request, from header or body. Raises InvalidRequest for a name that is none, or for two."""
    if header and field and header != field:
        raise InvalidRequest("the header x-session-id and the field session_id name different sessions", "session_id")
    name = header or field
    return None if name is None else checked_name(name, "session_id")


def checked_name(name: str, param: str) -> str:
    """Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest("a session's name is 1 to 128 letters, digits and ._:+=@-", param)
    return name
