"""A session store in this process, and what sessions look like from the edge."""

from __future__ import annotations

import itertools
import json
from typing import Any

from app.past import unpack_tokens
from cluster.sessions import SessionStore
from engine.session import SessionRecord


def store() -> SessionStore:
    """The real store, without Ray. Call it inside the event loop."""
    return SessionStore(3600.0, list_holders=list)


async def record(sessions: SessionStore, session: str, tenant: str = "") -> SessionRecord:
    return await sessions.get(tenant, session)


def tokens(found: SessionRecord) -> tuple[int, ...]:
    return unpack_tokens(found.tokens)


def messages(found: SessionRecord) -> list[dict[str, Any]]:
    return json.loads(found.messages)


def check(found: SessionRecord) -> None:
    """What holds of every record: turns end in order, within what is there, and after a reply; marks name some of them."""
    ends = found.ends
    assert all(a.messages < b.messages and (a.tokens < b.tokens or not a.tokens) for a, b in itertools.pairwise(ends))
    said = messages(found)
    for end in ends:
        assert end.messages <= len(said)
        assert said[end.messages - 1]["role"] == "assistant"
        assert end.tokens <= found.num_tokens
    assert not ends or (ends[-1].messages == len(said) and ends[-1].tokens in (0, found.num_tokens))
    assert set(found.marks.values()) <= set(ends)
