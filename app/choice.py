"""One choice of a request: token chunks in, visible increments out. Every dialect, streaming or not, reads these same updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal, Protocol

from app.stop_strings import StopStrings
from chat.parse import OutputParser
from chat.tokenizer import IncrementalDecoder, Tokenizer
from chat.types import ChatDelta, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from engine.errors import EngineFailure
from engine.types import FinishReason, TokenChunk, TokenLogprob, Usage

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """The thinking is over, whatever follows. Comes once, before the first content or tool call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An increment of one kind, with the tokens that made it visible (structure tokens before it included)."""

    delta: ChatDelta | ReasoningEnd
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    call_id: str | None = None  # of a ToolCallStart


@dataclass(frozen=True, slots=True)
class Finish:
    reason: Reason
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()  # tokens that came after the last visible piece
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one chunk changed. Counts are of the whole choice so far."""

    choice: int
    pieces: tuple[Piece, ...] = ()
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None  # None = the engine has not said yet
    resume_source: str | None = None
    miss_reason: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None


class Choice(Protocol):
    def push(self, chunk: TokenChunk) -> Update:
        """After an update with `finish` the stream is over, also when the engine would go on."""
        ...


class _Tokens:
    """Tokens that no piece has taken along yet."""

    def __init__(self, index: int, stop_ids: Collection[int], nonce: int = 0) -> None:
        self.index = index
        self._nonce, self._calls = nonce, 0
        self._stop_ids = stop_ids
        self.count = 0
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.usage: Usage | None = None

    def add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.count += 1
        self.ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)

    def visible(self, chunk: TokenChunk) -> int:
        """How many ids of the chunk have text: a sampled stop token ends the stream and shows nothing."""
        shown = len(chunk.token_ids)
        if chunk.finish is FinishReason.STOP and shown and chunk.token_ids[-1] in self._stop_ids:
            shown -= 1
        return shown

    def share(self, deltas: Sequence[ChatDelta | ReasoningEnd]) -> list[Piece]:
        """One piece a delta. The last ones get a token each and the first gets the rest, so that no visible frame goes without while
        there are tokens, and all of them together are the stream."""
        takers = [delta for delta in deltas if not isinstance(delta, ToolCallEnd)]
        pieces = []
        for delta in deltas:
            take = 0
            if not isinstance(delta, ToolCallEnd):
                take = max(len(self.ids) - (len(takers) - 1), min(1, len(self.ids)))
                takers.pop()
            pieces.append(Piece(delta, *self.take(take), self._call_id() if isinstance(delta, ToolCallStart) else None))
        return pieces

    def _call_id(self) -> str:
        """Unique, and the same when the request is run again: the client may have it already."""
        self._calls += 1
        return "call_" + sha256(f"{self._nonce} {self.index} {self._calls}".encode()).hexdigest()[:24]

    def take(self, count: int | None = None) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        taken = tuple(self.ids[:count]), tuple(self.logprobs[:count])
        del self.ids[:count], self.logprobs[:count]
        return taken


class ChatChoice:
    """Parses channels and tool calls; stop strings look at the answer only, never at reasoning or arguments."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        stop_ids: Collection[int],
        stops: Sequence[str],
        thinking: bool,
        tools: bool,
        nonce: int,
    ) -> None:
        """`nonce`: the request's own random number; ids of tool calls come from it."""
        self._tokens = _Tokens(index, stop_ids, nonce)
        self._parser = OutputParser(tokenizer, opened="think" if thinking else "response", tools=tools)
        self._stops = StopStrings(stops)
        self._thinking = thinking

    def push(self, chunk: TokenChunk) -> Update:
        pieces: list[Piece] = []
        tokens = self._tokens
        visible = tokens.visible(chunk)
        for place, token_id in enumerate(chunk.token_ids):
            tokens.add(token_id, chunk.logprobs[place] if chunk.logprobs else None)
            if place < visible:
                _extend(pieces, tokens.share(self._shown(self._parser.push([token_id]))))
            if self._stops.matched is not None:
                return self._update(chunk, pieces, Finish("stop", self._stops.matched, *tokens.take()))
        if chunk.finish is None:
            return self._update(chunk, pieces, None)
        reason = self._reason(_check(chunk.finish))
        deltas = self._shown(self._parser.finish())
        if self._stops.matched is not None:
            reason = "stop"
        deltas += self._held()
        if self._thinking and reason != "length":
            deltas.append(ReasoningEnd())
        _extend(pieces, tokens.share(deltas))
        return self._update(chunk, pieces, Finish(reason, self._stops.matched, *tokens.take()))

    def _reason(self, finish: FinishReason) -> Reason:
        if finish is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self._parser.calls else "stop"

    def _shown(self, deltas: Sequence[ChatDelta]) -> list[ChatDelta | ReasoningEnd]:
        """The parser's deltas with the end of thinking marked and the answer passed through the stop strings."""
        shown: list[ChatDelta | ReasoningEnd] = []
        for delta in deltas:
            if self._thinking and not isinstance(delta, ReasoningDelta):
                self._thinking = False
                shown.append(ReasoningEnd())
            if isinstance(delta, ContentDelta):
                text = self._stops.push(delta.text)
                if text:
                    shown.append(ContentDelta(text))
                if self._stops.matched is not None:
                    break
            else:
                if isinstance(delta, ToolCallStart):
                    shown += self._held()
                shown.append(delta)
        return shown

    def _held(self) -> list[ChatDelta | ReasoningEnd]:
        held = self._stops.finish()
        return [ContentDelta(held)] if held else []

    def _update(self, chunk: TokenChunk, pieces: list[Piece], finish: Finish | None) -> Update:
        return _update(self._tokens, chunk, pieces, finish, self._parser.reasoning_tokens)


class TextChoice:
    """Plain text, for /v1/completions. Without a tokenizer there are ids but no text."""

    def __init__(
        self, index: int, tokenizer: Tokenizer | None, *, stop_ids: Collection[int], stops: Sequence[str], skip_special_tokens: bool = True
    ) -> None:
        self._tokens = _Tokens(index, stop_ids)
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer) if tokenizer else None
        self._stops = StopStrings(stops)
        self._skip_special = skip_special_tokens

    def push(self, chunk: TokenChunk) -> Update:
        """One piece a chunk that has tokens, also when they show nothing (yet): the ids may be all that was asked for."""
        tokens = self._tokens
        text = ""
        visible = tokens.visible(chunk)
        for place, token_id in enumerate(chunk.token_ids):
            tokens.add(token_id, chunk.logprobs[place] if chunk.logprobs else None)
            if place < visible:
                text += self._stops.push(self._text(token_id))
            if self._stops.matched is not None:
                break
        finish: Finish | None = None
        if self._stops.matched is not None:
            finish = Finish("stop", self._stops.matched)
        elif chunk.finish is not None:
            finish = Finish("length" if _check(chunk.finish) is FinishReason.LENGTH else "stop")
            text += self._stops.finish()
        pieces = [Piece(ContentDelta(text), *tokens.take())] if tokens.ids or text else []
        return _update(tokens, chunk, pieces, finish)

    def _text(self, token_id: int) -> str:
        if self._decoder is None or self._tokenizer is None or (self._skip_special and self._tokenizer.is_special(token_id)):
            return ""
        return self._decoder.push([token_id])


def _check(finish: FinishReason) -> FinishReason:
    if finish is FinishReason.CANCELLED:
        raise EngineFailure("the request was cancelled by the server")
    return finish


def _update(tokens: _Tokens, chunk: TokenChunk, pieces: list[Piece], finish: Finish | None, reasoning: int = 0) -> Update:
    if chunk.usage is not None:
        tokens.usage = chunk.usage
    said = tokens.usage
    return Update(
        choice=tokens.index,
        pieces=tuple(pieces),
        completion_tokens=tokens.count,
        reasoning_tokens=reasoning,
        cached_tokens=None if said is None else said.cached_tokens,
        resume_source=None if said is None else said.resume_source,
        miss_reason=None if said is None else said.miss_reason,
        prompt_logprobs=chunk.prompt_logprobs,
        finish=finish,
    )


def _extend(pieces: list[Piece], new: Sequence[Piece]) -> None:
    """Appends, joining with the last piece where both are text of the same kind: one frame a kind and chunk."""
    for piece in new:
        joined = _joined(pieces[-1].delta, piece.delta) if pieces else None
        if joined is None:
            pieces.append(piece)
        else:
            last = pieces[-1]
            pieces[-1] = replace(last, delta=joined, token_ids=last.token_ids + piece.token_ids, logprobs=last.logprobs + piece.logprobs)


def _joined(left: ChatDelta | ReasoningEnd, right: ChatDelta | ReasoningEnd) -> ChatDelta | None:
    match left, right:
        case ContentDelta(a), ContentDelta(b):
            return ContentDelta(a + b)
        case ReasoningDelta(a), ReasoningDelta(b):
            return ReasoningDelta(a + b)
        case ToolCallArguments(i, a), ToolCallArguments(j, b) if i == j:
            return ToolCallArguments(i, a + b)
    return None
