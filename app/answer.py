"""What the service gives back: a whole answer, or a stream of frames that a dialect's writer spells."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.choice import Update
from app.updates import Updates
from app.usage import Bill, Meter

# A stream's status and usage headers wait for the engine's first word, so that a refusal is an ordinary error response. When the first
# word takes longer than this (a long prefill), the response begins without it.
FIRST_WORD_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """Frames that leave together come together. Close it, also when it was never read: that cancels the generation."""

    frames: AsyncGenerator[list[dict[str, Any]], None]
    headers: Mapping[str, str]
    updates: Updates

    async def aclose(self) -> None:
        await self.frames.aclose()
        await self.updates.aclose()


class Writer(Protocol):
    """A dialect's stream: what it says first, for each update, when nothing came for `ping_every_s` (None = nothing then), and last."""

    ping_every_s: float | None

    def begin(self) -> list[dict[str, Any]]: ...

    def frames(self, update: Update) -> list[dict[str, Any]]: ...

    def ping(self) -> list[dict[str, Any]]: ...

    def end(self) -> list[dict[str, Any]]: ...


async def start_stream(updates: Updates, meter: Meter, bill: Bill, writer: Writer) -> Stream:
    try:
        first = await updates.ready(FIRST_WORD_S)
    except BaseException:
        await updates.aclose()
        raise
    if first is not None:
        meter.count(first)
    sent = bill.headers(meter.total(), final=False)
    if not meter.admitted:
        del sent["x-msh-usage-cached-tokens"]  # rather none than a wrong one
    return Stream(frames_of(updates, writer), sent, updates)


async def frames_of(updates: Updates, writer: Writer) -> AsyncGenerator[list[dict[str, Any]], None]:
    if first := writer.begin():
        yield first
    every = writer.ping_every_s
    async for update in updates if every is None else updates.with_pauses(every):
        if frames := writer.ping() if update is None else writer.frames(update):
            yield frames
    if last := writer.end():
        yield last
