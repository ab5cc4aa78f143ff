"""The whole of one choice, collected from the same updates that a stream sends."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from app.choice import Finish, ReasoningEnd, Update
from app.usage import Meter
from chat.reply import Reply, collect
from chat.types import ChatDelta
from engine.types import TokenLogprob


@dataclass(slots=True)
class Transcript:
    """`token_ids` and `logprobs` are of every generated token, structure included."""

    deltas: list[ChatDelta] = field(default_factory=list)
    reasoned: bool = False  # the think channel was closed, or had text
    call_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None

    def add(self, update: Update) -> None:
        for piece in update.pieces:
            if isinstance(piece.delta, ReasoningEnd):
                self.reasoned = True
            else:
                self.deltas.append(piece.delta)
            if piece.call_id is not None:
                self.call_ids.append(piece.call_id)
            self.token_ids += piece.token_ids
            self.logprobs += piece.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.finish is not None:
            self.finish = update.finish
            self.token_ids += update.finish.token_ids
            self.logprobs += update.finish.logprobs

    @property
    def reply(self) -> Reply:
        """A call that did not end is left out. `call_ids` begin with the ids of the calls that did."""
        return collect(self.deltas)


async def read(updates: AsyncIterable[Update], choices: int, meter: Meter) -> list[Transcript]:
    """Reads a request to its end."""
    transcripts = [Transcript() for _ in range(choices)]
    async for update in updates:
        meter.count(update)
        transcripts[update.choice].add(update)
    return transcripts
