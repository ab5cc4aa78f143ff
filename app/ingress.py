"""The HTTP ingress as a Serve deployment, and the same service for Python programs through its handle.

handle = serve.get_app_handle("k3")
answer = await handle.chat.remote({"messages": [{"role": "user", "content": "Hi"}]})
async for chunk in handle.options(stream=True).generate.remote([1, 2, 3], max_tokens=8): ...
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from app.adapter import Caller
from app.answer import Stream
from app.auth import ApiKeys
from app.config import ServiceConfig
from app.health import Health
from app.resolve import Served
from app.routes import build_api
from app.service import Service
from app.session_actors import HolderBundles, SessionActor
from app.session_desk import SessionDesk
from app.session_file import SessionFiles, fitting, read_export_key
from chat.tokenizer import Tokenizer
from cluster.checkpoint import tokenizer_folder
from deployments.client import RoutedEngineClient
from engine.errors import InvalidRequest
from engine.types import GenerateRequest, SamplingParams, TokenChunk

OPEN = ""  # the tenant of an open server: programs inside the cluster have no key


@serve.deployment(name="ingress")
@serve.ingress()
class Ingress:
    """Holds no state that matters: conversations live in the engine and its stores."""

    async def __init__(self, engine: DeploymentHandle, config: ServiceConfig, served: Served) -> None:  # type: ignore[misc]  # Serve awaits it
        self._served = served
        self._config = config
        self._engine = RoutedEngineClient(engine, ray.util.get_node_ip_address(), config.failover_timeout_s)
        sessions = SessionActor.from_config(config) if config.state_store else None
        self._desk = SessionDesk(
            sessions,
            HolderBundles(config) if config.state_store else None,
            SessionFiles(read_export_key(config.export_key), served.fingerprint, prefixes=served.shared_prefixes)
            if config.export_key
            else None,
            mirrored=(lambda record: fitting(record, served.fingerprint, prefixes=served.shared_prefixes)[:1]) if config.mirror else None,
        )
        words = tokenizer_folder(served.tokenizer_dir, config.model_endpoint_url) if served.tokenizer_dir else None
        self._service = Service.from_config(
            config,
            engine=self._engine,
            tokenizer=Tokenizer.from_dir(words) if words else None,
            max_model_len=served.max_model_len,
            vocab_size=served.vocab_size,
            stop_ids=served.eos_token_ids,
            sessions=sessions,
        )
        self._health = Health(engine, config.served_model_name, self._service.histories)

    def __serve_build_asgi_app__(self) -> Starlette:
        return build_api(
            lambda: self._service,
            keys=ApiKeys.from_config(self._config.api_keys),
            max_body_bytes=int(self._config.max_body_bytes),
            max_import_bytes=int(self._config.max_import_bytes),
            get_desk=lambda: self._desk,
            health=self._health.report,
            metrics=self._health.metrics,
        )

    async def chat(self, body: dict[str, Any], *, session_id: str | None = None, session_mode: str | None = None) -> dict[str, Any]:
        """A chat completion: the body of POST /v1/chat/completions without `stream`, and its answer. Raises K3Error, ChatError."""
        answer = await self._service.chat(_in_session({**body, "stream": False}, session_id, session_mode), _caller())
        assert not isinstance(answer, Stream)
        return answer.body

    async def chat_stream(
        self, body: dict[str, Any], *, session_id: str | None = None, session_mode: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed chat completion. Use `handle.options(stream=True)`; close the generator to cancel."""
        stream = await self._service.chat(_in_session({**body, "stream": True}, session_id, session_mode), _caller())
        assert isinstance(stream, Stream)
        async with aclosing(stream):
            async for frames in stream.frames:
                for frame in frames:
                    yield frame

    async def sessions(self, limit: int = 100) -> dict[str, Any]:
        """GET /v1/sessions: those of the tenant of an open server."""
        return await self._desk.list(OPEN, limit)

    async def session(self, session_id: str) -> dict[str, Any]:
        """One session with its conversation. Raises UnknownSession."""
        return await self._desk.get(OPEN, session_id)

    async def fork(self, session_id: str, new: str | None = None, mark: str | None = None) -> dict[str, Any]:
        """Another session that goes on from this one's end or a marked turn. Raises UnknownSession, SessionBusy."""
        return await self._desk.fork(OPEN, session_id, {"session_id": new, "mark": mark})

    async def mark(self, session_id: str, name: str) -> dict[str, Any]:
        """Names the end of the last turn. Raises UnknownSession."""
        return await self._desk.mark(OPEN, session_id, {"name": name})

    async def pin(self, session_id: str, *, pinned: bool = True) -> dict[str, Any]:
        return await self._desk.pin(OPEN, session_id, {"pinned": pinned})

    async def delete_session(self, session_id: str) -> dict[str, Any]:
        return await self._desk.delete(OPEN, session_id)

    async def export_session(self, session_id: str) -> bytes:
        """One signed safetensors file. Raises Unsupported without an export_key."""
        return await self._desk.export(OPEN, session_id)

    async def import_session(self, session_id: str, file: bytes) -> dict[str, Any]:
        """Raises InvalidRequest naming the part that is wrong, SessionBusy for a name that is taken."""
        return await self._desk.import_(OPEN, session_id, file)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Token ids in, `TokenChunk`s out, the last one with `finish` and `usage`. Use `handle.options(stream=True)`.

        `stop_token_ids` None stops at the model's own end tokens. Raises InvalidRequest, ContextExceeded, QueueFull, EngineFailure.
        """
        vocab = self._served.vocab_size
        wrong = next((i for i in prompt if not 0 <= i < vocab), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary [0, {vocab})", "prompt")
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(seed=uuid.uuid4().int & (2**63 - 1)),
            stop_token_ids=tuple(self._served.eos_token_ids if stop_token_ids is None else stop_token_ids),
            priority=priority,
        )
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def __del__(self) -> None:
        await self._engine.close()


def _caller() -> Caller:
    return Caller(request_id=uuid.uuid4().hex)


def _in_session(body: dict[str, Any], session_id: str | None, session_mode: str | None) -> dict[str, Any]:
    given = {"session_id": session_id, "session_mode": session_mode}
    return body | {key: value for key, value in given.items() if value is not None}
