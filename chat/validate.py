"""What a chat request may say: the rules of K3's API that go beyond what the renderer can read.

The renderer is as lenient as the reference encoder, so that any conversation can be looked at; a server is stricter, because a
mistake that renders silently (a tool result nobody asked for, a tool declared twice) costs the client a bad answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chat.messages import read_calls, read_messages, read_name, read_parts, read_reasoning, read_role
from chat.response_format import read_response_format
from chat.tool_results import result_id
from chat.tools import read_tool_choice, read_tools
from chat.types import ChatError, Conversation


def validate(conversation: Conversation) -> None:
    """Raises `ChatError` with the path of the first offending field. Changes nothing."""
    messages = read_messages(conversation.messages)
    if not messages:
        raise ChatError("expected at least one message", "messages")
    for i, message in enumerate(messages):
        _message(message, f"messages[{i}]", last=i == len(messages) - 1)
    read_tool_choice(conversation.tool_choice, read_tools(conversation))
    _response_format(conversation.response_format)


def _message(message: Mapping[str, Any], path: str, *, last: bool) -> None:
    role = read_role(message, path)
    if role == "user" and message.get("content") is None:
        raise ChatError("expected a string or a list of content parts", f"{path}.content")
    for _ in read_parts(message, path):
        pass  # reading is checking
    read_name(message, "name", path)
    read_reasoning(message, path)
    if message.get("tools") is not None:
        _dynamic_tools(message, path, role)
    if role == "tool" and not result_id(message, path):
        raise ChatError("a tool message needs the id of the call that it answers", f"{path}.tool_call_id")
    if message.get("tool_calls") and role != "assistant":
        raise ChatError(f"only assistant messages make calls, not {role}", f"{path}.tool_calls")
    read_calls(message, path)
    if message.get("partial") is not None:
        _partial(message, path, role, last=last)


def _dynamic_tools(message: Mapping[str, Any], path: str, role: str) -> None:
    if role != "system":
        raise ChatError(f"only system messages may add tools, not {role}", f"{path}.tools")
    if not message["tools"]:
        raise ChatError("expected at least one tool", f"{path}.tools")
    if message.get("content"):
        raise ChatError("a message that adds tools has no content", f"{path}.content")


def _partial(message: Mapping[str, Any], path: str, role: str, *, last: bool) -> None:
    if not isinstance(message["partial"], bool):
        raise ChatError("expected true or false", f"{path}.partial")
    if not message["partial"]:
        return
    if role != "assistant" or not last:
        raise ChatError("only the last message, from the assistant, can be continued", f"{path}.partial")
    if message.get("tool_calls"):
        raise ChatError("a message with tool calls cannot be continued", f"{path}.tool_calls")


def _response_format(value: Any) -> None:
    if read_response_format(value).kind != "json_schema":
        return
    name = value["json_schema"].get("name")
    if not isinstance(name, str) or not name:
        raise ChatError("a schema needs a name", "response_format.json_schema.name")
