"""The Responses dialect: /v1/responses as OpenAI's newer clients send it, translated into a `ChatRequest`.

Input items of one assistant turn (reasoning, message, function calls) become one assistant message; their texts are not touched.
`conversation` is a session's name. A stored response is a turn of a session, too, and its id tells which, so that
`previous_response_id` goes on from there. Instructions are for one request: a session does not keep them.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from app.anthropic import Translation
from app.openai import INT64, MAX_TOP_LOGPROBS, ChatRequest, SessionMode, ToolChoice, Wire
from app.turn import checked_name
from chat.types import ChatError
from engine.errors import InvalidRequest, UnknownResponse, Unsupported

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_SEALED = "k3-"


def _text_or_items(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        return value
    raise ValueError("expected a string or a non-empty list of items")


class ResponsesRequest(Wire):
    """/v1/responses."""

    input: Annotated[Any, AfterValidator(_text_or_items)]  # str | list[mapping]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = None  # str | mapping
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    store: bool | None = None
    background: bool | None = None
    prompt: Any = None
    session_id: str | None = None
    session_mode: SessionMode | None = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def encrypted_reasoning(self) -> bool:
        return ENCRYPTED in (self.include or ())


def translate(request: ResponsesRequest) -> Translation:
    """Raises ChatError or Unsupported with the path of what has no meaning here."""
    if request.prompt is not None:
        raise Unsupported("prompt: this server keeps no prompts; send the whole input", "prompt")
    if request.background:
        raise Unsupported("background: responses are answered while you wait", "background")
    turns = _Turns()
    if request.instructions:
        turns.add({"role": "system", "content": request.instructions}, "instructions")
    if isinstance(request.input, str):
        turns.add({"role": "user", "content": request.input}, "input")
    else:
        for i, item in enumerate(request.input):
            _item(item, f"input[{i}]", turns)
    return Translation(
        ChatRequest.model_validate(
            {
                "model": request.model,
                "messages": turns.messages,
                "max_tokens": request.max_output_tokens,
                "stream": request.stream,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())],
                "tool_choice": _tool_choice(request.tool_choice),
                "parallel_tool_calls": request.parallel_tool_calls,
                "reasoning_effort": (request.reasoning or {}).get("effort"),
                "response_format": _format((request.text or {}).get("format")),
                "logprobs": request.logprobs,
                "top_logprobs": request.top_logprobs if request.logprobs else None,
            }
        ),
        tuple(turns.origins),
        lead=1 if request.instructions else 0,
    )


def conversation_name(conversation: Any) -> str | None:
    """`conversation`: a name, or an object with it as `id`. Raises InvalidRequest."""
    name = conversation.get("id") if isinstance(conversation, Mapping) else conversation
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("expected a conversation's id, or an object with its id", "conversation")
    return None if name is None else checked_name(name, "conversation")


def response_id(session: str) -> str:
    """A new id of a turn of the session."""
    return f"resp_{base64.urlsafe_b64encode(session.encode()).decode().rstrip('=')}_{int(time.time()):08x}{secrets.token_hex(4)}"


def session_of(response: str) -> str:
    """The session that a response is a turn of. Raises UnknownSession for what is no such id."""
    sealed = response.removeprefix("resp_").rpartition("_")[0]
    try:
        name = base64.b64decode(sealed + "=" * (-len(sealed) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        name = ""
    if not name or not response.startswith("resp_"):
        raise UnknownResponse(f"there is no response {response[:80]!r}")
    return name


class _Turns:
    """Messages so far; the last one may be an assistant's turn that further items belong to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._open = False

    def add(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.origins.append(path)
        self._open = False

    def assistant(self, path: str, *, before: Sequence[str]) -> dict[str, Any]:
        """The open turn, or a new one when it already holds what must come later than the new item (`before`)."""
        if not self._open or any(key in self.messages[-1] for key in before):
            self.add({"role": "assistant"}, path)
            self._open = True
        return self.messages[-1]


def _item(item: Mapping[str, Any], path: str, turns: _Turns) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            turns.assistant(path, before=("content", "tool_calls"))["content"] = _content(item.get("content"), path)
        case "message":
            if item.get("role") not in ("user", "system", "developer"):
                raise ChatError(f"unknown role {item.get('role')!r}, expected user, system, developer or assistant", f"{path}.role")
            turns.add({"role": item["role"], "content": _content(item.get("content"), path)}, path)
        case "reasoning":
            turns.assistant(path, before=("reasoning_content", "content", "tool_calls"))["reasoning_content"] = _reasoning(item, path)
        case "function_call":
            calls = turns.assistant(path, before=()).setdefault("tool_calls", [])
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        case "function_call_output":
            output = item.get("output")
            content = _content(output, f"{path}.output") if isinstance(output, list) else output
            turns.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content}, path)
        case kind:
            raise ChatError(
                f"unsupported item {kind!r}, expected message, reasoning, function_call or function_call_output", f"{path}.type"
            )


def _content(content: Any, path: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError("expected a string or a list of parts", f"{path}.content")
    parts: list[dict[str, Any]] = []
    for j, part in enumerate(content):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                raise ChatError(f"unsupported part {kind!r}, expected input_text, output_text or input_image", f"{path}.content[{j}]")
    return parts


def seal(reasoning: str) -> str:
    """Reasoning for clients that keep only `encrypted_content`. It hides nothing: it is the client's own conversation."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def _reasoning(item: Mapping[str, Any], path: str) -> str:
    """The text as it was given out; another provider's sealed reasoning cannot be read and counts as none."""
    content, sealed = item.get("content"), item.get("encrypted_content")
    if content:
        if not isinstance(content, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ChatError("expected a list of reasoning_text parts", f"{path}.content")
        return "".join(part["text"] for part in content)
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode("utf-8", "surrogatepass")
        except (binascii.Error, UnicodeDecodeError):
            raise ChatError("this reasoning was altered", f"{path}.encrypted_content") from None
    return ""


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ChatError(
            f"unsupported tool type {tool.get('type')!r}: this server runs no tools itself, expected 'function'", f"{path}.type"
        )
    function: dict[str, Any] = {"name": tool.get("name"), "parameters": tool.get("parameters") or {}}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": kind}:
            raise ChatError(f"unsupported tool choice {kind!r}, expected auto, none, required or a function by name", "tool_choice.type")
    return choice


def _format(form: Any) -> Any:
    """The schema sits beside the type here, one level down in chat requests."""
    match form:
        case {"type": "json_schema"}:
            return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    return form
