"""The routes: which path means what. Each reads a body, asks the service, and answers in its dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.adapter import Caller
from app.answer import Answer, Stream
from app.asked import read_place
from app.auth import ApiKeys
from app.errors import Failure, anthropic_error, describe, openai_error
from app.http import Dialect, Reply, RequestIds, read_json
from app.service import Service
from app.session_desk import SessionDesk
from app.sessions_api import session_routes
from chat.history import HistoryPolicy
from engine.errors import InvalidRequest

Ask = Callable[[Service, dict[str, Any], Caller], Awaitable[Answer | Stream]]
Hook = Callable[[], Awaitable[Response]]


def _data(frame: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(frame) + b"\n\n"


def _event(frame: dict[str, Any]) -> bytes:
    return b"event: " + frame["type"].encode() + b"\ndata: " + orjson.dumps(frame) + b"\n\n"


def _response_error(failure: Failure) -> dict[str, Any]:
    return {"type": "error", "code": failure.code, "message": failure.message, "param": failure.param, "sequence_number": 0}


OPENAI = Dialect(error=openai_error, frame=_data, error_frame=lambda failure: _data(openai_error(failure)), done=b"data: [DONE]\n\n")
RESPONSES = Dialect(error=openai_error, frame=_event, error_frame=lambda failure: _event(_response_error(failure)))
ANTHROPIC = Dialect(error=anthropic_error, frame=_event, error_frame=lambda failure: _event(anthropic_error(failure)))


def build_api(
    get_service: Callable[[], Service],
    *,
    keys: ApiKeys | None = None,
    max_body_bytes: int = 8 * 2**20,
    max_import_bytes: int = 2**31,
    get_desk: Callable[[], SessionDesk] | None = None,
    health: Hook | None = None,
    metrics: Hook | None = None,
) -> Starlette:
    """The HTTP application. `get_service` is called a request, so that the app can be built before its service lives.

    `get_desk` answers /v1/sessions; `health` and `metrics` answer /health and /metrics (404 without them). These two are open, everything
    else wants a key when there are keys.
    """
    routes: list[Route] = []
    known = keys or ApiKeys(())

    def post(path: str, ask: Ask, dialect: Dialect = OPENAI) -> None:
        async def route(request: Request) -> Response:
            try:
                caller = _caller(request, known.tenant(request.headers))
                body = await read_json(request, max_body_bytes)
            except Exception as error:
                return _error(error, dialect)
            return Reply(lambda: ask(get_service(), body, caller), dialect)

        routes.append(Route(path, route, methods=["POST"]))

    def get(path: str, ask: Callable[[Service, Request], Answer]) -> None:
        async def route(request: Request) -> Response:
            try:
                known.tenant(request.headers)
                return Response(orjson.dumps(ask(get_service(), request).body), media_type="application/json")
            except Exception as error:
                return _error(error, OPENAI)

        routes.append(Route(path, route, methods=["GET"]))

    post("/v1/chat/completions", lambda service, body, caller: service.chat(body, caller))
    post("/v1/completions", lambda service, body, caller: service.completions(body, caller))
    post("/v1/responses", lambda service, body, caller: service.responses(body, caller), RESPONSES)
    post("/v1/messages", lambda service, body, caller: service.messages(body, caller), ANTHROPIC)
    post("/v1/messages/count_tokens", lambda service, body, caller: service.count_tokens(body), ANTHROPIC)
    post("/tokenize", lambda service, body, caller: service.tokenize(body))
    post("/detokenize", lambda service, body, caller: service.detokenize(body))
    dialects = {"chat": OPENAI, "completions": OPENAI, "messages": ANTHROPIC}

    async def again(request: Request) -> Response:
        try:
            tenant, session = known.tenant(request.headers), request.path_params["session"]
            place = request.headers.get("last-event-id", request.query_params.get("after"))
            caller = Caller(request_id=request.scope["request_id"], tenant=tenant, session=session, after=read_place(place))
            asked, raw = await get_service().asked(tenant, session)
        except Exception as error:
            return _error(error, OPENAI)
        return Reply(lambda: get_service().again(asked, raw, caller), dialects[asked.kind])

    routes.append(Route("/v1/sessions/{session}/answer", again, methods=["GET"]))
    get("/v1/models", lambda service, request: service.models())
    get("/v1/models/{name:path}", lambda service, request: service.model(request.path_params["name"]))
    if get_desk is not None:
        routes += session_routes(get_desk, known, max_body_bytes=max_body_bytes, max_import_bytes=max_import_bytes)
    for path, hook in (("/health", health), ("/metrics", metrics)):
        if hook is not None:
            routes.append(_open(path, hook))
    return Starlette(routes=routes, middleware=[Middleware(RequestIds)], exception_handlers={HTTPException: _refused, Exception: _refused})


def _open(path: str, hook: Hook) -> Route:
    async def route(request: Request) -> Response:
        return await hook()

    return Route(path, route, methods=["GET"])


def _caller(request: Request, tenant: str) -> Caller:
    """Raises InvalidRequest for a policy that is none."""
    policy = request.headers.get("x-thinking-history")
    if policy is not None and policy not in list(HistoryPolicy):
        raise InvalidRequest(f"the header x-thinking-history is one of {', '.join(HistoryPolicy)}", "x-thinking-history")
    return Caller(
        request_id=request.scope["request_id"],
        tenant=tenant,
        session=request.headers.get("x-session-id"),
        history=None if policy is None else HistoryPolicy(policy),
    )


async def _refused(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, and whatever a hook raises."""
    return _error(error, OPENAI)


def _error(error: Exception, dialect: Dialect) -> Response:
    failure = describe(error)
    return Response(orjson.dumps(dialect.error(failure)), failure.status, dict(failure.headers), "application/json")
