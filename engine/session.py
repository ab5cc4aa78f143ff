"""What a session is to the store: names and tokens, never state. The state is in bundles, the bundles are in the holders."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleAt:
    """A resumable position of a session: valid for exactly the tokens whose lineage this is."""

    position: int
    lineage: str  # hex


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One conversation. Immutable: a turn, a fork or a mark makes another record, which shares the big fields."""

    tenant: str
    session: str
    tokens: bytes = b""  # little-endian u32: what the next turn's prompt begins with, the reply included
    messages: bytes = b"[]"  # JSON: the conversation as the chat endpoints see it, replies with their reasoning included
    bundles: tuple[BundleAt, ...] = ()  # longest first
    marks: dict[str, BundleAt] = field(default_factory=dict)
    pinned: bool = False
    turns: int = 0
    parent: str | None = None  # session that this one was forked from
    created: float = 0.0  # seconds since the epoch
    updated: float = 0.0
    cost: float = 0.0  # USD, by the price table, of all turns

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4
