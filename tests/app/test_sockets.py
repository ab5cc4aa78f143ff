"""The app behind a real HTTP server: frames leave one by one, and a closed socket cancels the request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from tests.app.edge import PLAIN, Edge, reply, says

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def served(edge: Edge) -> AsyncIterator[httpx.AsyncClient]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(edge.api, lifespan="off", ws="none", log_level="error"))
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        await running


async def test_frames_leave_one_by_one() -> None:
    gate = asyncio.Semaphore(0)
    async with (
        served(Edge(says(reply()("ab"), gate=gate))) as client,
        client.stream("POST", CHAT, json=PLAIN | {"stream": True}) as response,
    ):
        lines = (line async for line in response.aiter_lines() if line)
        assert '"role":"assistant"' in await anext(lines)
        gate.release()
        assert '"content":"a' in await anext(lines)
        for _ in range(50):
            gate.release()
        assert [line async for line in lines][-1] == "data: [DONE]"


@pytest.mark.parametrize("body", [PLAIN | {"stream": True}, PLAIN, PLAIN | {"n": 2}], ids=["stream", "whole", "two choices"])
async def test_a_closed_socket_cancels_the_request(body: dict[str, Any]) -> None:
    edge = Edge(says(reply()("a long answer"), gate=asyncio.Semaphore(0)))
    async with served(edge) as client:
        asking = asyncio.ensure_future(client.post(CHAT, json=body))
        await edge.engine.has_open(body.get("n", 1))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await edge.engine.has_open(0, exactly=True)
    assert edge.engine.cancelled == body.get("n", 1)


async def test_a_large_body_is_answered_before_it_is_read() -> None:
    async with served(Edge(says(()), max_body_bytes=1000)) as client:
        response = await client.post(CHAT, content=b"x" * 10_000_000)
        again = await client.get("/v1/models")
    assert response.status_code == 413
    assert again.status_code == 200
