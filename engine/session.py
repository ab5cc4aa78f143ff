"""What a session is to the store: names and tokens, never state. The state is in bundles, the bundles are in the holders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleAt:
    """A resumable position of a session: valid for exactly the tokens whose lineage this is."""

    position: int
    lineage: str  # hex


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """Where a turn ended: the next one's prompt begins with `tokens` of the session's tokens, which spell `messages` of its messages."""

    tokens: int  # 0 = another rendering stands in the record by now; the messages have to be rendered again
    messages: int
    response: str = ""  # id of the answer, unique: clients may come back to it by that name


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One conversation. Immutable: a turn, a fork or a mark makes another record, which shares the big fields."""

    tenant: str
    session: str
    tokens: bytes = b""  # little-endian u32: what the next turn's prompt begins with, the reply included
    messages: bytes = b"[]"  # JSON: the conversation as the chat endpoints see it, replies with their reasoning included
    bundles: tuple[BundleAt, ...] = ()  # longest first
    ends: tuple[TurnEnd, ...] = ()  # of every turn that is part of the conversation, in order
    rendering: str = ""  # digest of what else shaped `tokens`: tools, thinking, effort
    marks: dict[str, TurnEnd] = field(default_factory=dict)
    pinned: bool = False
    turns: int = 0
    asked: bytes = b""  # the request whose answer is on its way, or was when the connection broke; empty after the turn's end
    ended_by: str = ""  # owner of the turn that ended last
    parent: str | None = None  # session that this one was forked from
    created: float = 0.0  # seconds since the epoch
    updated: float = 0.0
    cost: float = 0.0  # USD, by the price table, of all turns

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


def cut(record: SessionRecord, end: TurnEnd) -> SessionRecord:
    """The conversation up to the end of one of its turns."""
    messages = msgspec.json.decode(record.messages, type=list[msgspec.Raw])[: end.messages]
    return replace(
        record,
        tokens=record.tokens[: 4 * end.tokens],
        messages=msgspec.json.encode(messages),
        ends=tuple(e for e in record.ends if e.messages <= end.messages),
        bundles=tuple(b for b in record.bundles if b.position <= end.tokens),
    )


def marks_within(record: SessionRecord) -> dict[str, TurnEnd]:
    """The marks of turns that are still part of the conversation: an edit takes those after it along."""
    ends = {end.response: end for end in record.ends}
    return {name: ends[end.response] for name, end in record.marks.items() if end.response in ends}
