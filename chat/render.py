"""Messages and tools → prompt ids, segment by segment, exactly as K3 was trained (Moonshot's encoder is the reference).

Order of a prompt: tool declaration, thinking effort, the conversation, tool choice, response format, generation prompt. The first two
sit at the very front, so changing them invalidates every cached prefix; tool choice and response format vanish from the next turn's
prompt, so the position before them is marked in `Prompt.boundaries`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from chat.messages import (
    Call,
    is_prefill,
    read_calls,
    read_messages,
    read_name,
    read_parts,
    read_reasoning,
    read_role,
)
from chat.response_format import read_response_format
from chat.segments import SegmentWriter
from chat.tokenizer import Tokenizer
from chat.tool_results import in_call_order, result_name
from chat.types import Channel, ChatError, Conversation, ImageSlot, Prompt

EFFORTS = ("low", "high", "max")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_REQUIRED = "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
_NONE = "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
_JSON = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def render(conversation: Conversation, tokenizer: Tokenizer) -> Prompt:
    """The prompt of `conversation`. Raises `ChatError` for what cannot be rendered; further rules of a request are in `chat.validate`."""
    try:
        return _Renderer(conversation, tokenizer).render()
    except RecursionError as error:
        raise ChatError("JSON nested too deeply", "messages") from error


class _Renderer:
    def __init__(self, conversation: Conversation, tokenizer: Tokenizer) -> None:
        self.conversation = conversation
        self.messages = read_messages(conversation.messages)
        self.writer = SegmentWriter(tokenizer)
        self.images: list[ImageSlot] = []
        self.starts = [0] * len(self.messages)
        self.calls: list[Call] = []  # of the most recent assistant message
        self.results = 0  # tool results since then

    def render(self) -> Prompt:
        chat, writer = self.conversation, self.writer
        prefill = chat.generation_prompt and is_prefill(chat)
        if chat.tools:
            self._system("tool-declare", _TOOLS.format(_compact(chat.tools)))
        if chat.thinking and chat.effort is not None:
            if chat.effort not in EFFORTS:
                raise ChatError(f"unknown thinking effort {chat.effort!r}, expected one of {', '.join(EFFORTS)}", "thinking.effort")
            self._system("thinking-effort", _EFFORT.format(chat.effort))
        for i, tool in in_call_order(self.messages[: len(self.messages) - prefill]):
            self.starts[i] = len(writer.ids)
            self._message(i, tool)
        tail = len(writer.ids)
        self._tail()
        boundaries = (tail,) if len(writer.ids) > tail else ()
        opened: Channel = "think" if chat.thinking else "response"
        if prefill:
            self.starts[-1] = len(writer.ids)
            opened = self._prefill(len(self.messages) - 1)
        elif chat.generation_prompt:
            writer.open("message", role="assistant")
            writer.open(opened)
        return Prompt(
            ids=tuple(writer.ids),
            segments=tuple(writer.segments),
            opened=opened,
            starts=(*self.starts, tail),
            boundaries=boundaries,
            images=tuple(self.images),
        )

    def _message(self, i: int, tool: str | None) -> None:
        message, path, writer = self.messages[i], f"messages[{i}]", self.writer
        role = read_role(message, path)
        if role == "assistant":
            self._assistant(i)
        elif role == "tool":
            self.results += 1
            tool = tool or result_name(message, path, self.results, self.calls)
            writer.open("message", role=role, tool=tool, index=str(self.results))
            self._content(i)
            writer.end_message()
        elif role == "system" and message.get("tools"):
            self._system("tool-declare", _MORE_TOOLS.format(_compact(message["tools"])))
        else:
            name = read_name(message, "name", path)
            writer.open("message", role=role, **({"name": name} if name else {}))
            self._content(i)
            writer.end_message()

    def _assistant(self, i: int) -> None:
        writer, path = self.writer, f"messages[{i}]"
        self.calls, self.results = read_calls(self.messages[i], path), 0
        writer.open("message", role="assistant")
        if self.conversation.thinking:
            writer.open("think")
            writer.text(read_reasoning(self.messages[i], path))
            writer.close("think")
        writer.open("response")
        self._content(i)
        writer.close("response")
        if self.calls:
            writer.open("tools")
            for index, call in enumerate(self.calls, start=1):
                self._call(call, index)
            writer.close("tools")
        writer.end_message()

    def _call(self, call: Call, index: int) -> None:
        writer = self.writer
        writer.open("call", tool=call.name, index=str(index))
        if isinstance(call.arguments, str):
            writer.open("json", type="object")
            writer.text(call.arguments)
            writer.close("json")
        else:
            for key, value in call.arguments.items():
                writer.open("argument", key=key, type=_json_type(value))
                writer.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                writer.close("argument")
        writer.close("call")

    def _content(self, i: int) -> None:
        for part, text in read_parts(self.messages[i], f"messages[{i}]"):
            if text is not None:
                self.writer.text(text)
                continue
            image = self.conversation.images.get((i, part))
            if image is None:
                raise ChatError("images are not accepted here", f"messages[{i}].content[{part}]")
            start = self.writer.image(image)
            self.images.append(ImageSlot(message=i, part=part, start=start, pads=image.pads, width=image.width, height=image.height))

    def _system(self, kind: str, body: str) -> None:
        self.writer.open("message", role="system", type=kind)
        self.writer.text(body)
        self.writer.end_message()

    def _tail(self) -> None:
        match self.conversation.tool_choice:
            case "none":
                self._system("tool-choice", _NONE)
            case "required" | Mapping():  # a named function has no words of its own
                self._system("tool-choice", _REQUIRED)
        form = read_response_format(self.conversation.response_format)
        if form.kind != "text":
            shown = "" if form.schema is None else _SCHEMA.format(_compact(form.schema))
            self._system("response-format", _JSON.format(form.kind) + shown)

    def _prefill(self, i: int) -> Channel:
        """The unfinished last message, left open where it stops; its content alone skips the think channel."""
        writer, path = self.writer, f"messages[{i}]"
        content = any(text or text is None for _, text in read_parts(self.messages[i], path))
        reasoning = read_reasoning(self.messages[i], path) if self.conversation.thinking else ""
        writer.open("message", role="assistant")
        if self.conversation.thinking and (reasoning or not content):
            writer.open("think")
            writer.text(reasoning)
            if not content:
                return "think"
            writer.close("think")
        writer.open("response")
        self._content(i)
        return "response"


def _compact(value: Any) -> str:
    """Sorted keys, no spaces, non-ASCII kept: how schemas are shown to the model."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _json_type(value: Any) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case Mapping():
            return "object"
    return "array"
