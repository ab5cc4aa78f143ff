"""Updates → /v1/chat/completions: the frames of a stream, or the one body. The streaming contract is Moonshot's vendor test.

A stream, per choice: a frame with the role · frames of one kind each (reasoning, answer, tool call) · one frame of empty reasoning where
the thinking ends · a frame with an empty delta, the finish reason and the choice's usage. Frames of several choices interleave.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.choice import Finish, Piece, ReasoningEnd, Update
from app.logprobs import chat_logprobs
from app.openai import ChatRequest, StreamOptions
from app.transcript import Transcript
from app.usage import Bill, Meter, Tokens, openai_usage
from chat.tokenizer import Tokenizer
from chat.types import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart


@dataclass(frozen=True, slots=True)
class Head:
    """What every frame of one completion repeats."""

    id: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, model: str, separator: str = "-") -> Head:
        """`PREFIX-` and 24 hex digits that begin with the time, so that ids sort by age."""
        now = int(time.time())
        return cls(f"{prefix}{separator}{now:08x}{secrets.token_hex(8)}", model, now)


class ChatWriter:
    """The frames of one stream."""

    ping_every_s: float | None = None  # the contract has no frame that means nothing

    def __init__(self, head: Head, request: ChatRequest, prompt_ids: Sequence[int], tokenizer: Tokenizer, meter: Meter, bill: Bill) -> None:
        self._head = {"id": head.id, "object": "chat.completion.chunk", "created": head.created, "model": head.model}
        self._options = request.stream_options or StreamOptions()
        self._token_ids = bool(request.return_token_ids)
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._meter = meter
        self._bill = bill
        self._begun: set[int] = set()

    def begin(self) -> list[dict[str, Any]]:
        return []

    def ping(self) -> list[dict[str, Any]]:
        return []

    def frames(self, update: Update) -> list[dict[str, Any]]:
        self._meter.count(update)
        frames = []
        if update.choice not in self._begun:
            first = self._frame(update.choice, {"role": "assistant", "content": ""})
            if self._token_ids and not self._begun:
                first["prompt_token_ids"] = list(self._prompt_ids)
            self._begun.add(update.choice)
            frames.append(first)
        frames += [self._increment(update.choice, piece) for piece in update.pieces if not isinstance(piece.delta, ToolCallEnd)]
        if update.finish is not None:
            frames += self._end_of_choice(update.choice, update.finish)
        return frames

    def end(self) -> list[dict[str, Any]]:
        """After every choice has ended."""
        if not self._options.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": final_usage(self._meter.total(), self._bill)}]

    def _frame(self, choice: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        frame = {**self._head, "choices": [{"index": choice, "delta": delta, "finish_reason": finish, **more}]}
        if self._options.continuous_usage_stats:
            frame["usage"] = openai_usage(self._meter.total())
        return frame

    def _increment(self, choice: int, piece: Piece) -> dict[str, Any]:
        delta = _delta(piece)
        if self._options.include_internal_content and piece.token_ids:
            delta["internal_content"] = {"token_ids": piece.token_ids}
        return self._frame(choice, delta, **self._beside(piece))

    def _end_of_choice(self, choice: int, finish: Finish) -> list[dict[str, Any]]:
        frames = []
        if self._options.include_internal_content and finish.token_ids:
            frames.append(self._frame(choice, {"internal_content": {"token_ids": finish.token_ids}}))
        usage = final_usage(self._meter.of_choice(choice), self._bill)
        frames.append(self._frame(choice, {}, finish.reason, usage=usage, **self._beside(finish)))
        return frames

    def _beside(self, tokens: Piece | Finish) -> dict[str, Any]:
        """What stands next to a delta: log-probabilities and, for vLLM's clients, token ids."""
        beside: dict[str, Any] = {}
        if tokens.logprobs:
            beside["logprobs"] = {"content": chat_logprobs(tokens.logprobs, self._tokenizer)}
        if self._token_ids:
            beside["token_ids"] = tokens.token_ids
        return beside


def final_usage(tokens: Tokens, bill: Bill) -> dict[str, Any]:
    return openai_usage(tokens) | bill.extras(tokens)


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.delta:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ReasoningEnd():
            return {"reasoning_content": ""}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallStart(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": piece.call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
    raise AssertionError(piece)


def chat_body(
    head: Head,
    request: ChatRequest,
    prompt_ids: Sequence[int],
    transcripts: Sequence[Transcript],
    tokenizer: Tokenizer,
    meter: Meter,
    bill: Bill,
    *,
    thinking: bool,
) -> dict[str, Any]:
    """The answer of a request that does not stream."""
    choices = []
    for index, transcript in enumerate(transcripts):
        assert transcript.finish is not None, "read to its end"
        choice: dict[str, Any] = {
            "index": index,
            "message": chat_message(transcript, thinking=thinking),
            "logprobs": {"content": chat_logprobs(transcript.logprobs, tokenizer)} if request.logprobs else None,
            "finish_reason": transcript.finish.reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = transcript.token_ids
        choices.append(choice)
    body = {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": final_usage(meter.total(), bill),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = list(prompt_ids)
    return body


def chat_message(transcript: Transcript, *, thinking: bool) -> dict[str, Any]:
    """Empty reasoning of a thinking reply is "" and not left out: clients send it back, and so keep the history complete."""
    reply = transcript.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if thinking:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(transcript.call_ids, reply.tool_calls, strict=False)
        ]
    return message
