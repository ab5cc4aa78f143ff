"""HTTP without meaning: reading a body within its limit, and a response that stops its work when the client goes away."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.answer import Answer, Stream
from app.errors import BodyTooLarge, Failure, describe
from engine.errors import InvalidRequest

REQUEST_ID = "x-request-id"
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one API spells frames and errors."""

    error: Callable[[Failure], dict[str, Any]]
    frame: Callable[[dict[str, Any]], bytes]
    error_frame: Callable[[Failure], bytes]
    done: bytes = b""  # ends a stream that went well

    def batch(self, frames: Sequence[dict[str, Any]], place: int | None) -> bytes:
        """Frames that leave together. `place`: how many tokens they end behind, as the SSE id of the last one."""
        spelt = [self.frame(frame) for frame in frames]
        if place is not None and spelt:
            spelt[-1] = b"id: %d\n" % place + spelt[-1]
        return b"".join(spelt)


class Reply(Response):
    """Runs `work` while watching the client. A disconnect cancels it at once, whether or not it streams.

    Until the first byte an error is an ordinary response; after it, the stream's last frame. The request's body must have been read.
    """

    def __init__(self, work: Callable[[], Awaitable[Answer | Stream]], dialect: Dialect) -> None:
        self._work = work
        self._dialect = dialect
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._run(send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)
        if not working.cancelled():
            working.result()

    async def _run(self, send: Send) -> None:
        try:
            result = await self._work()
            whole = json_response(result.body, 200, result.headers) if isinstance(result, Answer) else None
        except Exception as error:
            failure = describe(error)
            whole = json_response(self._dialect.error(failure), failure.status, failure.headers)
        if whole is not None:
            await whole.send(send)
            return
        assert isinstance(result, Stream)
        try:
            await self._stream(result, send)
        finally:
            await result.aclose()

    async def _stream(self, stream: Stream, send: Send) -> None:
        sse = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        await send({"type": "http.response.start", "status": 200, "headers": _raw({**sse, **stream.headers})})
        while True:
            try:
                frames = await anext(stream.frames, None)
                data = self._dialect.done if frames is None else self._dialect.batch(frames, stream.updates.place)
            except Exception as error:
                frames, data = None, self._dialect.error_frame(describe(error))
            await _send_body(send, data, more=frames is not None)
            if frames is None:
                return


@dataclass(frozen=True, slots=True)
class JsonResponse:
    """A response that is sent without Starlette's Response around it."""

    body: bytes
    status: int
    headers: Mapping[str, str]

    async def send(self, send: Send) -> None:
        plain = {"content-type": "application/json", "content-length": str(len(self.body))}
        await send({"type": "http.response.start", "status": self.status, "headers": _raw({**plain, **self.headers})})
        await _send_body(send, self.body, more=False)


def json_response(content: dict[str, Any], status: int, headers: Mapping[str, str]) -> JsonResponse:
    return JsonResponse(orjson.dumps(content), status, headers)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Raises BodyTooLarge before reading more than `max_bytes`, InvalidRequest for what is not JSON."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise InvalidRequest(f"the body is {encoding[:40]!r}-encoded: send it as it is", "content-encoding", "unsupported_encoding")
    raw = await read_body(request, max_bytes)
    try:
        raw.decode()
        body = orjson.loads(raw)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: byte {raw[error.start]:#04x} at {error.start}", None, "invalid_json") from None
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type(body).__name__}", None, "invalid_json")
    return body


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises BodyTooLarge before reading more than `max_bytes`."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(f"{announced} bytes", max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large("larger", max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(what: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is {what}, this server reads at most {limit} bytes here")


class RequestIds:
    """ASGI middleware: `scope["request_id"]` is the request's id, its own when that is a decent one; without one the response gets it.

    Ray Serve gives an id to every request without one and repeats it in the response, so behind it there is nothing to add.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value.decode("latin-1") for key, value in scope["headers"] if key == REQUEST_ID.encode()), "")
        request_id = sent if _SAFE_ID.fullmatch(sent) else f"req_{secrets.token_hex(12)}"
        scope["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and not sent:
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID.encode(), request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]
