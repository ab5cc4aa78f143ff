"""The HTTP edge without Ray: an app over a scripted engine, and a reader of its streams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from app.adapter import Limits, ServedModel
from app.auth import ApiKeys
from app.pricing import LIST_PRICES
from app.routes import build_api
from app.service import Service
from app.session_desk import BundlePort, SessionDesk
from app.session_file import SessionFiles
from app.turn import Sessions
from chat.tokenizer import Tokenizer
from engine.session import BundleAt, SessionRecord
from engine.types import GenerateRequest
from tests.fakes import FakeEngineClient, Reply, toy

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HI: dict[str, Any] = {"model": "kimi-k3", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = HI | {"thinking": {"type": "disabled"}}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.tiny()


def reply() -> Reply:
    return Reply(tokenizer())


def says(ids: Sequence[int], **options: Any) -> FakeEngineClient:
    """An engine that always gives these ids."""
    return FakeEngineClient(script=lambda request: ids, **options)


def toys() -> FakeEngineClient:
    """An engine whose ids depend on prompt, seed and choice."""
    return FakeEngineClient(script=toy)


@dataclass
class Edge:
    """An app and how to ask it. Use as a context manager."""

    engine: FakeEngineClient
    with_tokenizer: bool = True
    max_model_len: int = 4096
    vocab_size: int = 1024
    keys: Sequence[str] = ()
    max_body_bytes: int = 1 << 20
    limits: Limits = field(default_factory=Limits)
    aliases: tuple[str, ...] = ()
    sessions: Sessions | None = None
    bundles: BundlePort | None = None
    files: SessionFiles | None = None
    mirrored: Callable[[SessionRecord], Sequence[BundleAt]] | None = None
    max_import_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        t = tokenizer()
        model = ServedModel(
            name="kimi-k3", aliases=self.aliases, max_model_len=self.max_model_len, vocab_size=self.vocab_size, stop_ids=t.stop_ids
        )
        self.service = Service(
            engine=self.engine,
            tokenizer=t if self.with_tokenizer else None,
            model=model,
            limits=self.limits,
            prices=LIST_PRICES,
            sessions=self.sessions,
        )
        self.desk = SessionDesk(self.sessions, self.bundles, self.files, mirrored=self.mirrored)
        self.api = build_api(
            lambda: self.service,
            keys=ApiKeys(self.keys),
            max_body_bytes=self.max_body_bytes,
            max_import_bytes=self.max_import_bytes,
            get_desk=lambda: self.desk,
        )

    async def __aenter__(self) -> Edge:
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api), base_url="http://edge")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        assert self.engine.open == 0, "a stream was left open"

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, headers=headers)
        return await self.http.post(path, json=body, headers=headers)

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    async def frames(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """The frames of a stream that ends well."""
        response = await self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        return read_sse(response)

    @property
    def asked(self) -> GenerateRequest:
        return self.engine.requests[-1]


_ID = re.compile(r"^id: \d+\n")


def read_sse(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event's data, after checking the framing: only `data: ` lines (and ids in sessions), `[DONE]` last."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [_ID.sub("", event) for event in response.text.split("\n\n")]
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def deltas(frames: Sequence[dict[str, Any]], choice: int = 0) -> list[dict[str, Any]]:
    """Deltas of a choice, the first (role) and the last (end) left out."""
    mine = [frame["choices"][0] for frame in frames if frame["choices"] and frame["choices"][0]["index"] == choice]
    return [entry["delta"] for entry in mine[1:] if entry["finish_reason"] is None]


def joined(frames: Sequence[dict[str, Any]], key: str, choice: int = 0) -> str:
    return "".join(delta.get(key, "") for delta in deltas(frames, choice))


def joined_calls(frames: Sequence[dict[str, Any]], choice: int = 0) -> list[dict[str, Any]]:
    """Tool calls put together from a stream as clients do."""
    calls: list[dict[str, Any]] = []
    for delta in deltas(frames, choice):
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return calls
