"""Updates → the events of the Responses API, or the one response object. A stream's last event holds that same object.

Output items in order: reasoning, message, one function_call each. Items and their parts are added, grow, and are done, one at a time.
"""

from __future__ import annotations

import secrets
from typing import Any

from app.choice import Finish, Piece, ReasoningEnd, Update
from app.logprobs import chat_logprobs
from app.openai import ChatRequest
from app.openai_chat import Head
from app.responses import ResponsesRequest, seal
from app.transcript import Transcript
from app.usage import Bill, Meter
from chat.tokenizer import Tokenizer
from chat.types import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

Event = dict[str, Any]


class ResponseWriter:
    """Builds the output items; `frames` gives the events of a stream, `body` the finished response."""

    ping_every_s: float | None = None

    def __init__(
        self,
        head: Head,
        asked: ResponsesRequest,
        request: ChatRequest,
        tokenizer: Tokenizer,
        meter: Meter,
        bill: Bill,
        *,
        stored: bool,
        conversation: str | None,
    ) -> None:
        self._head = head
        self._stored = stored
        self._conversation = conversation
        self._asked = asked
        self._effort = request.reasoning_effort
        self._tokenizer = tokenizer
        self._meter = meter
        self._bill = bill
        self._output: list[dict[str, Any]] = []
        self._open = ""  # type of the item that grows
        self._text: list[str] = []  # its text or arguments so far
        self._logprobs: list[dict[str, Any]] = []
        self._sequence = 0
        self._finish: Finish | None = None

    def begin(self) -> list[Event]:
        return [self._event(f"response.{name}", response=self._response("in_progress")) for name in ("created", "in_progress")]

    def ping(self) -> list[Event]:
        return []

    def frames(self, update: Update) -> list[Event]:
        self._meter.count(update)
        events: list[Event] = []
        for piece in update.pieces:
            events += self._piece(piece)
        if update.finish is not None:
            self._finish = update.finish
        return events

    def end(self) -> list[Event]:
        assert self._finish is not None, "the stream ended"
        events = self._close(complete=self._finish.reason != "length" and self._open != "function_call")
        status = "incomplete" if self._finish.reason == "length" else "completed"
        return [*events, self._event(f"response.{status}", response=self._response(status))]

    def body(self, transcript: Transcript) -> dict[str, Any]:
        """The response of a request that does not stream, from the same pieces."""
        for piece in transcript.pieces:
            self._piece(piece)
        self._finish = transcript.finish
        return self.end()[-1]["response"]

    # -- items ---------------------------------------------------------------------------------------------------------

    def _piece(self, piece: Piece) -> list[Event]:
        match piece.delta:
            case ReasoningDelta(text):
                events = self._item("reasoning", "rs", summary=[], content=[])
                if not self._item_now["content"]:
                    events += self._part({"type": "reasoning_text", "text": ""})
                self._text.append(text)
                return [*events, self._grow("response.reasoning_text.delta", content_index=0, delta=text)]
            case ContentDelta(text):
                events = self._item("message", "msg", role="assistant", content=[])
                if not self._item_now["content"]:
                    events += self._part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
                entries = chat_logprobs(piece.logprobs, self._tokenizer)
                self._text.append(text)
                self._logprobs += entries
                return [*events, self._grow("response.output_text.delta", content_index=0, delta=text, logprobs=entries)]
            case ToolCallStart(_, name):
                return [*self._close(), *self._item("function_call", "fc", call_id=piece.call_id, name=name, arguments="")]
            case ToolCallArguments(_, fragment):
                self._text.append(fragment)
                return [self._grow("response.function_call_arguments.delta", delta=fragment)]
            case ReasoningEnd():
                return [*self._item("reasoning", "rs", summary=[], content=[]), *self._close()]
            case ToolCallEnd():
                return self._close()
        raise AssertionError(piece)

    @property
    def _item_now(self) -> dict[str, Any]:
        return self._output[-1]

    def _item(self, kind: str, prefix: str, **fields: Any) -> list[Event]:
        """Opens an item unless one of that kind is open."""
        if self._open == kind:
            return []
        closed = self._close()
        self._open = kind
        self._output.append({"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields})
        return [*closed, self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(self._item_now))]

    def _part(self, part: dict[str, Any]) -> list[Event]:
        self._item_now["content"].append(part)
        return [self._grow("response.content_part.added", content_index=0, part=_copy(part))]

    def _close(self, *, complete: bool = True) -> list[Event]:
        """Ends the open item: its part or arguments are done, then the item."""
        if not self._open:
            return []
        item, text, events = self._item_now, "".join(self._text), []
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "function_call":
            item["arguments"] = text
            if complete:
                events.append(self._grow("response.function_call_arguments.done", name=item["name"], arguments=text))
        for part in item.get("content", ()):
            part["text"] = text
            with_logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            part.update(with_logprobs)
            events.append(self._grow(f"response.{part['type']}.done", content_index=0, text=text, **with_logprobs))
            events.append(self._grow("response.content_part.done", content_index=0, part=part))
        if item["type"] == "reasoning" and self._asked.encrypted_reasoning:
            item["encrypted_content"] = seal(text)
        self._open, self._text, self._logprobs = "", [], []
        return [*events, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]

    # -- events --------------------------------------------------------------------------------------------------------

    def _grow(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item_now["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._asked
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "conversation": {"id": self._conversation} if self._conversation else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._head.model,
            "output": [item for item in self._output if self._whole(item)],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": self._effort, "summary": None},
            "store": self._stored,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": None,
        }

    def _whole(self, item: dict[str, Any]) -> bool:
        """A call that was cut off is not given out: its arguments are no JSON."""
        return item["type"] != "function_call" or item["status"] == "completed"

    def _usage(self) -> dict[str, Any]:
        tokens = self._meter.total()
        return {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.prompt + tokens.completion,
        } | self._bill.extras(tokens)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: the item goes on growing after its event left."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})
