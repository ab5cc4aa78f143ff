"""The Anthropic dialect: /v1/messages as clients such as Claude Code send it, translated into a `ChatRequest`.

Nothing is rewritten on the way: texts, thinking and tool inputs reach the chat format byte for byte. Two things are moved or left out:
tool results stand before the rest of their turn, as the chat format wants them, and the attribution line that Claude Code changes with
every session is dropped, since at the head of the prompt it would keep every prefix from being found again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from app.openai import INT64, ChatRequest, SessionMode, Wire
from chat.types import ChatError

ATTRIBUTION = "x-anthropic-billing-header"


def _text_or_blocks(value: Any) -> Any:
    if value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return value
    raise ValueError("expected a string or a list of content blocks")


TextOrBlocks = Annotated[Any, AfterValidator(_text_or_blocks)]  # str | list[mapping]


class CountRequest(Wire):
    """/v1/messages/count_tokens: any part of a messages request."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    system: TextOrBlocks = None
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    session_id: str | None = None
    session_mode: SessionMode | None = None


class MessagesRequest(CountRequest):
    """/v1/messages."""

    max_tokens: int = Field(ge=1, lt=INT64)


@dataclass(frozen=True, slots=True)
class Translation:
    """A request of another dialect as a chat request. `origins[i]` is where the client wrote what became `messages[i]`; the first `lead`
    of them are instructions for this request alone, which a session does not keep."""

    request: ChatRequest
    origins: tuple[str, ...]
    lead: int = 0

    def blame(self, error: ChatError) -> ChatError:
        """The same error with its path as the client knows it: the message it sits in, since the inside was spelled differently."""
        head, bracket, rest = (error.param or "").partition("messages[")
        index = rest.partition("]")[0]
        if head or not bracket or not index.isdecimal() or int(index) >= len(self.origins):
            return error
        return ChatError(str(error), self.origins[int(index)])


def translate(request: CountRequest) -> Translation:
    """Raises ChatError with the path of what has no meaning here."""
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if system := _system(request.system):
        messages.append({"role": "system", "content": system})
        origins.append("system")
    for i, message in enumerate(request.messages):
        path = f"messages[{i}]"
        for one in _message(message, path, last=i == len(request.messages) - 1):
            messages.append(one)
            origins.append(path)
    if not messages:
        raise ChatError("expected at least one message with content", "messages")
    choice = request.tool_choice or {}
    config = request.output_config or {}
    return Translation(
        ChatRequest.model_validate(
            {
                "model": request.model,
                "messages": messages,
                "max_tokens": request.max_tokens,
                "stop": request.stop_sequences,
                "stream": request.stream,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())],
                "tool_choice": _tool_choice(choice),
                "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
                "thinking": _thinking(request.thinking),
                "reasoning_effort": config.get("effort"),
                "response_format": _format(config.get("format")),
                "session_id": request.session_id,
                "session_mode": request.session_mode,
            }
        ),
        tuple(origins),
    )


def _system(system: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    if system is None or isinstance(system, str):
        return _without_attribution(system or "")
    parts = [_text(block, f"system[{i}]") for i, block in enumerate(system)]
    kept = [part | {"text": _without_attribution(part["text"])} for part in parts]
    return [part for part in kept if part["text"]]


def _without_attribution(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(ATTRIBUTION) else text


def _message(message: Mapping[str, Any], path: str, *, last: bool) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ChatError(f"unknown role {role!r}, expected user or assistant", f"{path}.role")
    if isinstance(content, str):
        blocks: Sequence[Any] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        blocks = content
    else:
        raise ChatError("expected a string or a list of content blocks", f"{path}.content")
    for j, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise ChatError("expected a content block", f"{path}.content[{j}]")
    if role == "assistant":
        return [_assistant(blocks, path, last=last)]
    results = [_tool_result(block, f"{path}.content[{j}]") for j, block in enumerate(blocks) if block.get("type") == "tool_result"]
    parts = [_part(block, f"{path}.content[{j}]") for j, block in enumerate(blocks) if block.get("type") != "tool_result"]
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str, *, last: bool) -> dict[str, Any]:
    """A turn of the history. As the last message it is one to be continued."""
    reasoning: list[str] = []
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        where = f"{path}.content[{j}]"
        match block.get("type"):
            case "thinking":
                if not isinstance(block.get("thinking"), str):
                    raise ChatError("expected a string", f"{where}.thinking")
                reasoning.append(block["thinking"])
            case "redacted_thinking":
                pass  # another provider's: nobody here can read it
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input", {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                content.append(_text(block, where))
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        turn["reasoning_content"] = "".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    elif last:
        turn["partial"] = True
    return turn


def _tool_result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{path}.content[{k}]") for k, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise ChatError("expected a string or a list of content blocks", f"{path}.content")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content or ""}


def _part(block: Any, path: str) -> dict[str, Any]:
    if not isinstance(block, dict) or block.get("type") != "image":
        return _text(block, path)
    source = block.get("source")
    match source:
        case {"type": "base64", "media_type": str(media), "data": str(data)}:
            url = f"data:{media};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise ChatError("expected a base64 or url source", f"{path}.source")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(block: Any, path: str) -> dict[str, Any]:
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "text"}:
            raise ChatError("expected a string", f"{path}.text")
        case {"type": kind}:
            raise ChatError(f"unsupported content block {kind!r} here", f"{path}.type")
    raise ChatError("expected a content block with a type", path)


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ChatError(f"this server runs no tools itself, {tool['type']!r} included; only client tools are supported", f"{path}.type")
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    match choice:
        case {"type": "auto"} | {"type": "none"}:
            return choice["type"]
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    if not choice:
        return None
    raise ChatError(f"unknown tool choice {choice.get('type')!r}, expected auto, any, tool (with a name) or none", "tool_choice.type")


def _thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`budget_tokens` has no counterpart: K3 is told an effort, not a number. It must be one all the same."""
    budget = (thinking or {}).get("budget_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise ChatError("expected a number of tokens from 1 on", "thinking.budget_tokens")
    return None if thinking is None else {"type": thinking.get("type"), "effort": thinking.get("effort")}


def _format(form: Any) -> dict[str, Any] | None:
    match form:
        case None:
            return None
        case {"type": "json_schema", "schema": schema}:
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    raise ChatError("expected {'type': 'json_schema', 'schema': {…}}", "output_config.format")
