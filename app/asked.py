"""A request whose answer is on its way to a session, kept so that the answer can be had again when the connection or the ingress is lost.

The answer is not kept, it is generated again: same tokens, from the states that the first attempt left behind. What of it was received is
skipped by counting tokens: streams of sessions number their frames (SSE `id:`) by the tokens generated so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from app.adapter import Caller
from chat.history import HistoryPolicy
from engine.errors import InvalidRequest, SessionBusy

T = TypeVar("T")
Kind = Literal["chat", "completions", "messages"]
LEASE_OUT_S = 20.0  # longest wait for the turn of an ingress that died to be given up
RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    kind: Kind
    body: Mapping[str, Any]
    seed: int  # what was drawn for it
    history: str | None = None  # the policy in its headers

    @classmethod
    def of(cls, kind: Kind, body: Mapping[str, Any], caller: Caller) -> Asked:
        return cls(kind=kind, body=body, seed=caller.seed, history=caller.history)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def caller(self, caller: Caller, raw: bytes) -> Caller:
        """Whoever asked, asking again. `raw`: this, encoded."""
        history = None if self.history is None else HistoryPolicy(self.history)
        return replace(caller, seed=self.seed, history=history, again=raw)


def decode_asked(raw: bytes) -> Asked:
    return msgspec.json.decode(raw, type=Asked)


async def when_free(work: Callable[[], Awaitable[T]]) -> T:
    """Tries again while the session's turn still belongs to an ingress that may be dead. Raises SessionBusy when it is alive."""
    deadline = time.monotonic() + LEASE_OUT_S
    while True:
        try:
            return await work()
        except SessionBusy:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_S)


def read_place(text: str | None) -> int:
    """A number of tokens that were received. Raises InvalidRequest."""
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequest(f"expected a number of tokens, as in the `id:` of the last frame, got {text[:40]!r}", "after")
    return int(text)
