"""Tools and `tool_choice` read once, for validation, the renderer and the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chat.types import ChatError, Conversation

_NAME = re.compile(r"[^\d\W][\w.\-]{0,255}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] | None
    strict: bool
    path: str  # where the request declares it


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required"]
    name: str | None = None  # of a named choice, whose mode is required


def read_tools(conversation: Conversation) -> list[Tool]:
    """Every tool that the model may call: the request's own and those that system messages add on the way."""
    tools: list[Tool] = []
    seen: set[str] = set()
    for path, value in _declared(conversation):
        tool = _read_tool(value, path)
        if tool.name in seen:
            raise ChatError(f"tool {tool.name!r} is declared twice", f"{path}.function.name")
        seen.add(tool.name)
        tools.append(tool)
    return tools


def read_tool_choice(value: Any, tools: Iterable[Tool]) -> ToolChoice:
    """`auto`, `none`, `required` or one function by name; absent means auto."""
    names = [tool.name for tool in tools]
    match value:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            if not names:
                raise ChatError("`required` needs at least one tool", "tool_choice")
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise ChatError(f"no tool is called {name!r}", "tool_choice.function.name")
            return ToolChoice("required", name)
    raise ChatError(
        f"unknown tool choice {value!r}, expected auto, none, required or {{'type': 'function', 'function': {{'name': …}}}}", "tool_choice"
    )


def _declared(conversation: Conversation) -> Iterable[tuple[str, Any]]:
    yield from _enumerate(conversation.tools, "tools")
    for i, message in enumerate(conversation.messages):
        if message.get("tools") is not None:
            yield from _enumerate(message["tools"], f"messages[{i}].tools")


def _enumerate(tools: Any, path: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ChatError("expected a list of tools", path)
    return ((f"{path}[{i}]", tool) for i, tool in enumerate(tools))


def _read_tool(value: Any, path: str) -> Tool:
    if not isinstance(value, Mapping):
        raise ChatError("expected {'type': 'function', 'function': {…}}", path)
    if value.get("type") != "function":
        raise ChatError(f"unsupported tool type {value.get('type')!r}, expected 'function'", f"{path}.type")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise ChatError("expected {'name': …, 'parameters': {…}}", f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ChatError(
            f"bad tool name {name!r}: expected 1–256 letters, digits, '_', '-' or '.', beginning with a letter or '_'",
            f"{path}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ChatError("expected a JSON schema object", f"{path}.function.parameters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ChatError("expected true or false", f"{path}.function.strict")
    return Tool(name, parameters, strict is True, path)
