"""`k3 chat` without the terminal: one conversation with any OpenAI-compatible server, streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from engine.errors import EngineFailure, InvalidRequest

TIMEOUT = httpx.Timeout(600, connect=5)


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the reply. `kind` is the channel; a tool call comes as its name and then its arguments."""

    kind: Literal["reasoning", "content", "tool"]
    text: str


@dataclass(kw_only=True)
class Talk:
    """Keeps the history, thinking included, and sends it back whole; with a session the server keeps it and only the new turn is sent.

    `client` has the server's base URL (…/v1) and key. `usage` is that of the last reply.
    """

    client: httpx.AsyncClient
    model: str | None = None
    system: str | None = None
    session: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further fields of the request
    history: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None

    async def ask(self, text: str) -> AsyncGenerator[Said, None]:
        """One turn. Raises InvalidRequest or EngineFailure with the server's words; a turn that failed is not kept."""
        turn: list[dict[str, Any]] = [{"role": "user", "content": text}]
        if self.system is not None and not self.history:
            turn.insert(0, {"role": "system", "content": self.system})
        reply: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        async with aclosing(self._frames(turn)) as frames:
            async for frame in frames:
                self.usage = frame.get("usage") or self.usage
                for choice in frame["choices"]:
                    self.finish = choice.get("finish_reason") or self.finish
                    for said in _read(choice.get("delta") or {}, reply):
                        yield said
        self.history += [*turn, reply]

    async def _frames(self, turn: list[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
        sent = turn if self.session is not None else [*self.history, *turn]
        body = {"messages": sent, "stream": True, "stream_options": {"include_usage": True}, **self.options}
        if self.model is not None:
            body["model"] = self.model
        if self.session is not None:
            body |= {"session_id": self.session, "session_mode": "append"}
        self.usage, self.finish = {}, None
        try:
            async with self.client.stream("POST", "chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise InvalidRequest(f"the server answered {response.status_code}: {server_words(await response.aread())}")
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        frame = orjson.loads(line[6:])
                        if "error" in frame:
                            raise EngineFailure(f"the stream broke off: {frame['error'].get('message', 'no reason given')}")
                        yield frame
        except httpx.HTTPError as error:
            raise EngineFailure(f"no answer from {self.client.base_url}: {str(error) or type(error).__name__}") from None


def _read(delta: dict[str, Any], reply: dict[str, Any]) -> list[Said]:
    """What a delta says, added to the reply."""
    said: list[Said] = []
    if text := delta.get("reasoning_content"):
        reply["reasoning_content"] += text
        said.append(Said("reasoning", text))
    if text := delta.get("content"):
        reply["content"] += text
        said.append(Said("content", text))
    for part in delta.get("tool_calls") or ():
        calls = reply.setdefault("tool_calls", [])
        function = part.get("function") or {}
        if part["index"] == len(calls):
            calls.append({"id": part.get("id"), "type": "function", "function": {"name": function.get("name"), "arguments": ""}})
            said.append(Said("tool", f"{function.get('name')} "))
        if arguments := function.get("arguments"):
            calls[part["index"]]["function"]["arguments"] += arguments
            said.append(Said("tool", arguments))
    return said


def server_words(body: bytes) -> str:
    """The message of an error's body, or its beginning."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
