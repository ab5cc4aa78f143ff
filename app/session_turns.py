"""Which session a request belongs to, in which dialect it ever came, and where in that session it goes on."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace

from app.adapter import Caller
from app.asked import Asked, decode_asked
from app.past import RAW, Past
from app.responses import ResponsesRequest, conversation_name, session_of
from app.turn import Sessions, Turn, checked_name, session_name
from engine.errors import InvalidRequest, NoOpenAnswer, SessionBusy, UnknownResponse, Unsupported
from engine.session import SessionRecord, cut


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that runs, and what it goes on from."""

    turn: Turn
    past: Past
    append: bool
    asked: bytes = b""  # the request, to be had again; none of the Responses API, whose answers have names of their own

    async def open(self) -> None:
        """The request was checked and is about to run."""
        if self.asked:
            await self.turn.open(self.asked)


@dataclass(frozen=True, slots=True)
class SessionTurns:
    """Begins turns. `store` None: this server keeps no sessions, and says so to whom asks for one."""

    store: Sessions | None

    async def of_request(self, caller: Caller, field: str | None, mode: str | None, asked: Asked | None = None) -> Begun | None:
        """A request that names its session, or none. Raises InvalidRequest, SessionBusy, EngineFailure; NoOpenAnswer when it repeats one
        that has been answered meanwhile."""
        session = session_name(caller.session, field)
        if session is None:
            if mode is not None:
                raise InvalidRequest("session_mode needs a session: send session_id or the header x-session-id", "session_mode")
            return None
        begun = await self._begin(caller.tenant, session, append=mode == "append", raw=asked is not None and asked.kind == "completions")
        if caller.again is not None and begun.turn.record.asked != caller.again:
            await begun.turn.abandon()
            raise no_open_answer(session)
        return begun if asked is None else replace(begun, asked=caller.again or asked.encode())

    async def asked(self, tenant: str, session: str) -> tuple[Asked, bytes]:
        """The request of a session that has not been answered. Raises UnknownSession, NoOpenAnswer."""
        record = await self._need_store("session_id").get(tenant, checked_name(session, "session_id"))
        if not record.asked:
            raise no_open_answer(session)
        return decode_asked(record.asked), record.asked

    async def of_response(self, caller: Caller, asked: ResponsesRequest) -> Begun | None:
        """A request of the Responses API; stored as a session of its own when it names none. Raises also UnknownSession."""
        conversation, previous = conversation_name(asked.conversation), asked.previous_response_id
        tenant, named = caller.tenant, session_name(caller.session, asked.session_id)
        if previous is not None:
            if conversation is not None or named is not None:
                raise InvalidRequest("previous_response_id names its session itself: leave the conversation out", "previous_response_id")
            if asked.store is False:
                raise Unsupported("store: a response that goes on from a stored one is stored", "store")
            return await self._after(tenant, previous)
        if conversation is not None:
            if named not in (None, conversation):
                raise InvalidRequest("the request names two different sessions", "conversation")
            return await self._begin(tenant, conversation, append=asked.session_mode != "full", param="conversation")
        if named is not None or asked.session_mode is not None or asked.store is False or self.store is None:
            return await self.of_request(caller, asked.session_id, asked.session_mode)
        return await self._begin(tenant, _new_name(), append=False)

    async def _begin(self, tenant: str, session: str, *, append: bool, raw: bool = False, param: str = "session_id") -> Begun:
        turn = await Turn.begin(self._need_store(param), tenant, session)
        try:
            _check_kind(turn.record, raw=raw, append=append)
            return Begun(turn, Past.of(turn.record), append)
        except BaseException:
            await turn.abandon()
            raise

    async def _after(self, tenant: str, response: str) -> Begun:
        """After the session's last turn in that session; after an earlier one, or beside a running turn, in a session of its own."""
        store, session = self._need_store("previous_response_id"), session_of(response)
        try:
            turn = await Turn.begin(store, tenant, session)
        except SessionBusy:
            record = await store.get(tenant, session)
        else:
            record = turn.record
            if record.ends and record.ends[-1].response == response:
                return Begun(turn, Past.of(record), append=True)
            await turn.abandon()
        end = next((end for end in record.ends if end.response == response), None)
        if end is None:
            raise UnknownResponse(f"there is no response {response[:80]!r}: it was never stored, or its conversation was edited or expired")
        branch = await Turn.begin(store, tenant, _new_name())
        return Begun(branch, Past.of(cut(record, end)), append=True)

    def _need_store(self, param: str) -> Sessions:
        if self.store is None:
            raise Unsupported("this server keeps no sessions (state_store is off): send the whole conversation with each request", param)
        return self.store


def no_open_answer(session: str) -> NoOpenAnswer:
    return NoOpenAnswer(f"session {session!r} has no answer on its way: what was said is in GET /v1/sessions/{session}")


def _check_kind(record: SessionRecord, *, raw: bool, append: bool) -> None:
    """Chat and plain prompts do not continue each other: one has messages, the other none."""
    if append and record.tokens and (record.rendering == RAW) != raw:
        kinds = ("plain prompts", "chat") if record.rendering == RAW else ("chat", "plain prompts")
        raise InvalidRequest(f"session {record.session!r} is one of {kinds[0]}: {kinds[1]} cannot be appended to it", "session_id")


def _new_name() -> str:
    return f"auto-{int(time.time()):08x}{secrets.token_hex(8)}"
