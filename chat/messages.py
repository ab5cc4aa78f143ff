"""What a message means: its text, reasoning, calls and their ids, read from plain OpenAI-shaped mappings.

The one place that knows the spelling of fields. Every reader raises `ChatError` with the path of what it could not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chat.types import ChatError, Conversation

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the history. `arguments` is the decoded object, or the raw text when the client's string is not JSON."""

    id: str | None
    name: str
    arguments: Mapping[str, Any] | str


def read_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ChatError(f"expected a list of messages, got {_kind(messages)}", "messages")
    for i, message in enumerate(messages):
        read_role(message, f"messages[{i}]")
    return messages


def read_role(message: Any, path: str) -> str:
    if not isinstance(message, Mapping):
        raise ChatError(f"expected an object, got {_kind(message)}", path)
    role = message.get("role")
    if role not in ROLES:
        raise ChatError(f"unknown role {role!r}, expected one of {', '.join(ROLES)}", f"{path}.role")
    return "system" if role == "developer" else role


def read_name(message: Mapping[str, Any], key: str, path: str) -> str:
    """An optional string field; "" when absent or null."""
    value = message.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ChatError(f"expected a string, got {_kind(value)}", f"{path}.{key}")
    return value


def read_parts(message: Mapping[str, Any], path: str) -> Iterator[tuple[int, str | None]]:
    """(index, text) of each content part; text None = an image part. A string is one part, null or absent is none."""
    content = message.get("content")
    if content is None:
        return
    if isinstance(content, str):
        yield 0, content
        return
    if not isinstance(content, Sequence):
        raise ChatError(f"expected a string or a list of parts, got {_kind(content)}", f"{path}.content")
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        if not isinstance(part, Mapping):
            raise ChatError(f"expected a part like {{'type': 'text', 'text': …}}, got {_kind(part)}", where)
        if part.get("type") == "image_url":
            yield i, None
        elif isinstance(part.get("text"), str):
            yield i, part["text"]
        else:
            raise ChatError(f"unsupported content part of type {part.get('type')!r}, expected text or image_url", where)


def read_text(message: Mapping[str, Any], path: str) -> str:
    """All text of the content joined, images left out."""
    return "".join(text for _, text in read_parts(message, path) if text)


def read_reasoning(message: Mapping[str, Any], path: str) -> str:
    """The first non-empty of `reasoning_content` and `reasoning`; white space alone counts as none, anything else is kept byte for byte."""
    text = read_name(message, "reasoning_content", path) or read_name(message, "reasoning", path)
    return text if text.strip() else ""


def read_calls(message: Mapping[str, Any], path: str) -> list[Call]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ChatError(f"expected a list of tool calls, got {_kind(calls)}", f"{path}.tool_calls")
    return [_read_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _read_call(call: Any, path: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError("expected {'id': …, 'type': 'function', 'function': {'name': …, 'arguments': …}}", path)
    name = read_name(function, "name", f"{path}.function")
    if not name:
        raise ChatError("a tool call needs the name of its function", f"{path}.function.name")
    arguments = read_arguments(function.get("arguments"), f"{path}.function.arguments")
    return Call(read_name(call, "id", path) or None, name, arguments)


def read_arguments(value: Any, path: str) -> Mapping[str, Any] | str:
    """The arguments object: null and blank mean none, a string is decoded, one that is not JSON stays a string."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
    if not isinstance(value, Mapping):
        raise ChatError(f"expected arguments that are a JSON object, got {_kind(value)}", path)
    return value


def is_prefill(conversation: Conversation) -> bool:
    """Does the reply continue the last message instead of beginning a new one (`partial: true`)?"""
    last = conversation.messages[-1] if conversation.messages else {}
    return last.get("role") == "assistant" and last.get("partial") is True


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
