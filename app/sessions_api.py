"""`/v1/sessions`: which path means which verb."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.auth import ApiKeys
from app.errors import describe, openai_error
from app.http import read_body, read_json
from app.session_desk import SessionDesk
from engine.errors import InvalidRequest

Verb = Callable[[SessionDesk, Request, str], Awaitable[dict[str, Any] | bytes]]


def session_routes(get_desk: Callable[[], SessionDesk], keys: ApiKeys, *, max_body_bytes: int, max_import_bytes: int) -> list[Route]:
    """Each verb gets the desk, the request and the caller's tenant. Errors have OpenAI's shape."""
    routes: list[Route] = []

    def add(method: str, path: str, verb: Verb) -> None:
        async def route(request: Request) -> Response:
            try:
                answer = await verb(get_desk(), request, keys.tenant(request.headers))
            except Exception as error:
                failure = describe(error)
                return Response(orjson.dumps(openai_error(failure)), failure.status, dict(failure.headers), "application/json")
            if isinstance(answer, bytes):
                return Response(answer, media_type="application/octet-stream")
            return Response(orjson.dumps(answer), media_type="application/json")

        routes.append(Route(path, route, methods=[method]))

    async def body(request: Request) -> dict[str, Any]:
        return await read_json(request, max_body_bytes)

    one = "/v1/sessions/{session}"
    add("GET", "/v1/sessions", lambda desk, request, tenant: desk.list(tenant, _limit(request)))
    add("POST", "/v1/sessions", lambda desk, request, tenant: _with(body(request), lambda b: desk.create(tenant, b)))
    add("GET", one, lambda desk, request, tenant: desk.get(tenant, _session(request)))
    add("DELETE", one, lambda desk, request, tenant: desk.delete(tenant, _session(request)))
    add("POST", f"{one}/fork", lambda desk, request, tenant: _with(body(request), lambda b: desk.fork(tenant, _session(request), b)))
    add("POST", f"{one}/mark", lambda desk, request, tenant: _with(body(request), lambda b: desk.mark(tenant, _session(request), b)))
    add("POST", f"{one}/pin", lambda desk, request, tenant: _with(body(request), lambda b: desk.pin(tenant, _session(request), b)))
    add("GET", f"{one}/export", lambda desk, request, tenant: desk.export(tenant, _session(request)))
    add(
        "POST",
        f"{one}/import",
        lambda desk, request, tenant: _with(read_body(request, max_import_bytes), lambda raw: desk.import_(tenant, _session(request), raw)),
    )
    return routes


async def _with(reading: Awaitable[Any], then: Callable[[Any], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    return await then(await reading)


def _session(request: Request) -> str:
    return str(request.path_params["session"])


def _limit(request: Request) -> int:
    asked = request.query_params.get("limit", "100")
    if not asked.isascii() or not asked.isdecimal() or len(asked) > 9:
        raise InvalidRequest("expected a whole number from 1 on", "limit")
    return int(asked)
