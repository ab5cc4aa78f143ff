"""Updates → Anthropic's events, or the one message. Each content block starts and stops exactly once, before the next one starts.

A thinking block ends with a signature: without it Claude Code throws the reply away. Any signature is accepted back. Thinking that was
empty is a block too: sent back, it tells a history that is complete from one that lost its thinking.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from app.choice import Finish, ReasoningEnd, Update
from app.transcript import Transcript
from app.usage import Bill, Meter, Tokens
from chat.types import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def stop_reason(finish: Finish) -> str:
    return "stop_sequence" if finish.stop_string is not None else STOP_REASONS[finish.reason]


def anthropic_usage(tokens: Tokens) -> dict[str, Any]:
    """`input_tokens` leaves out what was cached, as Anthropic counts."""
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_read_input_tokens": tokens.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": tokens.completion,
        "output_tokens_details": {"thinking_tokens": tokens.reasoning},
    }


def signature(thinking: str) -> str:
    """Opaque to clients."""
    return "k3-" + hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


class MessageWriter:
    """The events of one stream."""

    ping_every_s: float | None = 10.0  # clients give up on a silent connection during a long prefill

    def __init__(self, message_id: str, model: str, meter: Meter, bill: Bill) -> None:
        self._message = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._meter = meter
        self._bill = bill
        self._index = -1  # of the open or last block
        self._kind = ""  # of the open block
        self._thought: list[str] = []
        self._finish: Finish | None = None

    def begin(self) -> list[dict[str, Any]]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": anthropic_usage(self._meter.total())}
        return [{"type": "message_start", "message": self._message | empty}]

    def ping(self) -> list[dict[str, Any]]:
        return [{"type": "ping"}]

    def frames(self, update: Update) -> list[dict[str, Any]]:
        self._meter.count(update)
        events: list[dict[str, Any]] = []
        for piece in update.pieces:
            match piece.delta:
                case ReasoningDelta(text):
                    events += self._block("thinking", {"thinking": "", "signature": ""})
                    events.append(self._delta("thinking_delta", thinking=text))
                    self._thought.append(text)
                case ContentDelta(text):
                    events += self._block("text", {"text": ""})
                    events.append(self._delta("text_delta", text=text))
                case ToolCallStart(_, name):
                    events += self._stop()
                    events += self._block("tool_use", {"id": piece.call_id, "name": name, "input": {}})
                case ToolCallArguments(_, fragment):
                    events.append(self._delta("input_json_delta", partial_json=fragment))
                case ReasoningEnd():
                    events += [*self._block("thinking", {"thinking": "", "signature": ""}), *self._stop()]
                case ToolCallEnd():
                    events += self._stop()
        self._finish = update.finish
        return events

    def end(self) -> list[dict[str, Any]]:
        assert self._finish is not None, "the stream ended"
        delta = {"stop_reason": stop_reason(self._finish), "stop_sequence": self._finish.stop_string}
        usage = anthropic_usage(self._meter.total()) | self._bill.extras(self._meter.total())
        return [*self._stop(), {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _block(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Opens a block unless one of that kind is open."""
        if self._kind == kind:
            return []
        closed = self._stop()
        self._index += 1
        self._kind = kind
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}]

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}

    def _stop(self) -> list[dict[str, Any]]:
        if not self._kind:
            return []
        events = [self._delta("signature_delta", signature=signature("".join(self._thought)))] if self._kind == "thinking" else []
        self._kind = ""
        return [*events, {"type": "content_block_stop", "index": self._index}]


def message_body(message_id: str, model: str, transcript: Transcript, meter: Meter, bill: Bill) -> dict[str, Any]:
    assert transcript.finish is not None, "read to its end"
    reply = transcript.reply
    content: list[dict[str, Any]] = []
    if transcript.reasoned:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature(reply.reasoning)})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    content += [
        {"type": "tool_use", "id": call_id, "name": call.name, "input": orjson.Fragment(call.arguments)}
        for call_id, call in zip(transcript.call_ids, reply.tool_calls, strict=False)
    ]
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason(transcript.finish),
        "stop_sequence": transcript.finish.stop_string,
        "usage": anthropic_usage(meter.total()) | bill.extras(meter.total()),
    }
