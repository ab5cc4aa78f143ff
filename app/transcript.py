"""The whole of one choice, collected from the same updates that a stream sends."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from app.choice import Finish, Piece, ReasoningEnd, Update
from app.usage import Meter
from chat.reply import Reply, collect
from chat.types import ReasoningDelta
from engine.types import TokenLogprob


@dataclass(slots=True)
class Transcript:
    """All pieces of one choice, and how it ended."""

    pieces: list[Piece] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None

    def add(self, update: Update) -> None:
        self.pieces += update.pieces
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.finish is not None:
            self.finish = update.finish

    @property
    def reply(self) -> Reply:
        """A call that did not end is left out."""
        return collect(piece.delta for piece in self.pieces if not isinstance(piece.delta, ReasoningEnd))

    @property
    def reasoned(self) -> bool:
        """There was thinking, be it empty."""
        return any(isinstance(piece.delta, ReasoningDelta | ReasoningEnd) for piece in self.pieces)

    @property
    def call_ids(self) -> list[str]:
        """Of every call that began, so those of `reply.tool_calls` first."""
        return [piece.call_id for piece in self.pieces if piece.call_id is not None]

    @property
    def token_ids(self) -> list[int]:
        """Every generated token, structure included."""
        return [token_id for part in self._parts for token_id in part.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """One entry a token of `token_ids`; none when they were not asked for."""
        return [entry for part in self._parts for entry in part.logprobs]

    @property
    def _parts(self) -> list[Piece | Finish]:
        return [*self.pieces, *([self.finish] if self.finish else [])]


async def read(updates: AsyncIterable[Update], choices: int, meter: Meter) -> list[Transcript]:
    """Reads a request to its end."""
    transcripts = [Transcript() for _ in range(choices)]
    async for update in updates:
        meter.count(update)
        transcripts[update.choice].add(update)
    return transcripts
