"""What a client can do with its sessions beside talking in them: the verbs behind `/v1/sessions` and the Python handle."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson
from pydantic import Field

from app.openai import Wire
from app.session_file import Arrays, SessionFiles
from app.turn import Sessions, checked_name
from chat.types import Conversation
from chat.validate import validate
from engine.bundle import StateBundle
from engine.errors import InvalidRequest, SessionExists, UnknownSession, Unsupported
from engine.session import BundleAt, SessionRecord

MAX_LISTED = 1000


class BundlePort(Protocol):
    """Stored states by lineage. All raise EngineFailure."""

    async def read(self, lineage: str) -> tuple[StateBundle, Arrays] | None: ...
    async def write(self, bundle: StateBundle, arrays: Arrays) -> None: ...
    async def mirror(self, lineage: str) -> None: ...


class NewSession(Wire):
    session_id: str | None = None
    messages: list[dict[str, Any]] | None = None


class Fork(Wire):
    session_id: str | None = None
    mark: str | None = None


class Mark(Wire):
    name: str = Field(min_length=1, max_length=128)


class Pin(Wire):
    pinned: bool = True


class SessionDesk:
    """`sessions` None: this server keeps none. `files` None: no export_key, so nothing is exported or imported. `mirrored`: which
    bundles of a session that gets pinned are copied to another node; None copies none."""

    def __init__(
        self,
        sessions: Sessions | None,
        bundles: BundlePort | None = None,
        files: SessionFiles | None = None,
        *,
        mirrored: Callable[[SessionRecord], Sequence[BundleAt]] | None = None,
    ) -> None:
        self._store = sessions
        self._bundles = bundles
        self._files = files
        self._mirrored = mirrored

    async def list(self, tenant: str, limit: int = 100) -> dict[str, Any]:
        """Newest first, those that are in memory."""
        if not 1 <= limit <= MAX_LISTED:
            raise InvalidRequest(f"expected 1 to {MAX_LISTED}", "limit")
        records = await self._sessions.list(tenant, limit)
        return {"object": "list", "data": [card(record, sizes=False) for record in records]}

    async def get(self, tenant: str, session: str) -> dict[str, Any]:
        """With the conversation. Raises UnknownSession, also for another tenant's."""
        record = await self._sessions.get(tenant, session)
        return card(record) | {"messages": orjson.loads(record.messages)}

    async def create(self, tenant: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An empty session, or one with a conversation that was held elsewhere. Raises SessionExists for a name that is taken."""
        asked = NewSession.model_validate(body)
        if asked.messages:
            validate(Conversation(messages=asked.messages))
        now = time.time()
        messages = orjson.dumps(asked.messages or [])
        record = SessionRecord(tenant=tenant, session=_name(asked.session_id), messages=messages, created=now, updated=now)
        await self._sessions.create(record)
        return card(record)

    async def fork(self, tenant: str, session: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = Fork.model_validate(body)
        return card(await self._sessions.fork(tenant, session, _name(asked.session_id), asked.mark))

    async def mark(self, tenant: str, session: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Names the end of the last turn, to fork from there later."""
        return card(await self._sessions.mark(tenant, session, Mark.model_validate(body).name))

    async def pin(self, tenant: str, session: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A pinned session does not expire. The state that its next turn goes on from is mirrored at once, later ones as they come."""
        record = await self._sessions.pin(tenant, session, Pin.model_validate(body).pinned)
        if self._mirrored is not None and record.pinned and self._bundles is not None:
            for at in await asyncio.to_thread(self._mirrored, record):
                await self._bundles.mirror(at.lineage)
        return card(record)

    async def delete(self, tenant: str, session: str) -> dict[str, Any]:
        """With the states that no other session knows of. Raises SessionBusy while a turn runs."""
        await self._sessions.delete(tenant, session)
        return {"id": session, "object": "session.deleted", "deleted": True}

    async def export(self, tenant: str, session: str) -> bytes:
        """One safetensors file: `app.session_file`. With the longest stored state of its tokens, or without one when there is none."""
        files, store = self._signing, self._sessions
        record = await store.get(tenant, session)
        found = None
        for at in await asyncio.to_thread(files.fitting, record) if self._bundles is not None else ():
            found = await self._bundles.read(at.lineage) if self._bundles is not None else None
            if found is not None:
                break
        bundle, arrays = found if found is not None else (None, {})
        return await asyncio.to_thread(files.pack, record, bundle, arrays)

    async def import_(self, tenant: str, session: str, raw: bytes) -> dict[str, Any]:
        """Raises InvalidRequest naming the wrong part, SessionExists for a name that is taken; nothing is kept then."""
        files, store, now = self._signing, self._sessions, time.time()
        name = checked_name(session, "session_id")
        record, bundle, arrays = await asyncio.to_thread(files.unpack, raw, tenant)
        try:
            await store.get(tenant, name)
        except UnknownSession:
            pass
        else:
            raise SessionExists(f"session {name!r} exists already; delete it or choose another name")
        if bundle is not None and self._bundles is not None:
            await self._bundles.write(bundle, arrays)
        imported = replace(record, session=name, parent=None, pinned=False, created=now, updated=now, asked=b"")
        await store.create(imported)
        return card(imported)

    @property
    def _sessions(self) -> Sessions:
        if self._store is None:
            raise Unsupported("this server keeps no sessions (state_store is off)")
        return self._store

    @property
    def _signing(self) -> SessionFiles:
        if self._files is None:
            raise Unsupported("sessions are exported and imported with a key: start the server with export_key=file:PATH")
        return self._files


def card(record: SessionRecord, *, sizes: bool = True) -> dict[str, Any]:
    """A session without its conversation. `sizes`: the record came with its tokens."""
    shown: dict[str, Any] = {
        "id": record.session,
        "object": "session",
        "turns": record.turns,
        "position": record.bundles[0].position if record.bundles else 0,
        "bundles": [{"position": at.position, "lineage": at.lineage} for at in record.bundles],
        "marks": {name: {"turn_of": end.response, "messages": end.messages, "tokens": end.tokens} for name, end in record.marks.items()},
        "pinned": record.pinned,
        "open_answer": bool(record.asked),
        "parent": record.parent,
        "cost": record.cost,
        "created": record.created,
        "updated": record.updated,
    }
    return shown | {"tokens": record.num_tokens} if sizes else shown


def _name(asked: str | None) -> str:
    return checked_name(asked, "session_id") if asked is not None else f"sess-{secrets.token_hex(12)}"
