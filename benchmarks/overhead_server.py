"""One server for `serve_overhead`, in a process of its own: Serve's modes are switches that Ray reads when it starts.

    python -m benchmarks.overhead_server bare|default|throughput|haproxy

Prints its base URL when it is ready and ends when standard input closes. `/instant/v1` generates at once, `/paced/v1` one token a stream
every PACE_S. `bare` is uvicorn and Starlette with nothing behind them: the least that streaming the same frames can cost.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route

from benchmarks.instant import TOKEN, InstantExecutor, PacedExecutor

PACE_S = 0.02
MODES = ("bare", "default", "throughput", "haproxy")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ready(port: int) -> None:
    print(f"http://127.0.0.1:{port}", flush=True)


# -- the floor


async def _frames(count: int, chat: bool, pace_s: float) -> AsyncIterator[bytes]:
    """A frame a token, of the shape and size that our server sends."""
    head = {"id": "chatcmpl-0123456789abcdef01234567", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "kimi-k3"}
    for place in range(count):
        await asyncio.sleep(pace_s)
        text = {"delta": {"reasoning_content": "i"}} if chat else {"text": "i", "logprobs": None, "stop_reason": None}
        finish = "length" if place == count - 1 else None
        yield b"data: " + orjson.dumps({**head, "choices": [{"index": 0, **text, "finish_reason": finish, "token_ids": [TOKEN]}]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def bare_app() -> Starlette:
    def route(path: str, pace_s: float) -> Route:
        async def answer(request: Request) -> StreamingResponse:
            body = orjson.loads(await request.body())
            return StreamingResponse(_frames(body["max_tokens"], "messages" in body, pace_s), media_type="text/event-stream")

        return Route(path, answer, methods=["POST"])

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(
        routes=[Mount(f"/{name}", routes=[route(p, pace) for p in paths]) for name, pace in (("instant", 0.0), ("paced", PACE_S))]
    )


def serve_bare() -> None:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(bare_app(), port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        threading.Event().wait(0.05)
    ready(port)
    sys.stdin.read()
    server.should_exit = True
    thread.join()


# -- ours


def serve_ours(mode: str) -> None:
    from app import serve_modes

    serve_modes.switch_on(mode)  # before Ray is imported

    import ray
    from ray import serve

    from app.config import ServiceConfig
    from app.ingress import Ingress
    from app.resolve import resolve
    from deployments.engine import EngineReplica

    port = free_port()
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=128 << 20, namespace="serve", log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    config = ServiceConfig(max_running=64, max_queued=1024, max_model_len=2048, num_pages=4096, num_slots=512, device="cpu")
    plan = resolve(config, gpus=0)
    try:
        for name, executor in (("instant", InstantExecutor()), ("paced", PacedExecutor(PACE_S))):
            engine = serve.deployment(EngineReplica).options(name="engine", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.1})
            ingress = Ingress.options(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.1})
            serve.run(ingress.bind(engine.bind(plan.engine, executor), config, plan.served), name=name, route_prefix=f"/{name}")
        ready(port)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    [chosen] = sys.argv[1:]
    if chosen == "bare":
        serve_bare()
    else:
        serve_ours(chosen)
