"""A stream that goes on while what computes it is killed: `make demo-kill`.

Serves the embedded tiny K3 over two shards and streams one reply to an unmodified openai client three times: unbroken, then with a shard
killed in the middle, then with the whole engine replica killed. Prints the tokens as they come, and compares. Exit code 1 when one differs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable

from app import serve_modes

serve_modes.switch_on("throughput")  # Ray reads its switches when it is imported

import ray
from openai import AsyncOpenAI
from ray import serve
from rich.console import Console

from app import deployment
from app.config import ServiceConfig
from app.serving import local_ray

HOST, PORT = "127.0.0.1", 8765
TOKENS, KILL_AT = 300, 120
APP, ENGINE = "k3", "engine"
console = Console()


async def stream(client: AsyncOpenAI, kill: Callable[[], Awaitable[str]] | None) -> list[int]:
    """The reply's token ids; `kill` is called when KILL_AT of them have come."""
    ids: list[int] = []
    begin = last = time.monotonic()
    pause = 0.0
    reply = await client.completions.create(
        model="kimi-k3",
        prompt="Once upon a time",
        max_tokens=TOKENS,
        temperature=0.8,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in reply:
        pause, last = max(pause, time.monotonic() - last), time.monotonic()
        if not chunk.choices:
            continue
        ids += chunk.choices[0].model_extra.get("token_ids") or []  # type: ignore[union-attr]
        console.out(chunk.choices[0].text, end="", highlight=False)
        if kill is not None and len(ids) >= KILL_AT:
            console.print(f"\n[bold red]✗ {await kill()}[/] after {len(ids)} tokens")
            kill = None
    console.print(f"\n[green]{len(ids)} tokens in {time.monotonic() - begin:.1f} s, longest pause {pause:.1f} s[/]\n")
    return ids


async def kill_shard() -> str:
    pids = await serve.get_deployment_handle(ENGINE, APP).shard_pids.remote()
    os.kill(pids[-1], signal.SIGKILL)
    return f"shard 1 (pid {pids[-1]}) killed"


async def kill_replica() -> str:
    name, namespace = next(
        (actor["name"], actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(f"SERVE_REPLICA::{APP}#{ENGINE}#")
    )
    ray.kill(ray.get_actor(name, namespace=namespace))
    return "the engine replica and both of its shards killed"


async def show() -> bool:
    """Whether the tokens were the same every time."""
    client = AsyncOpenAI(base_url=f"http://{HOST}:{PORT}/v1", api_key="none")
    console.rule("unbroken")
    expected = await stream(client, None)
    same = True
    for title, kill in (("a shard dies", kill_shard), ("the replica dies", kill_replica)):
        console.rule(title)
        same = same and await stream(client, kill) == expected
    console.print("[bold green]The same tokens every time.[/]" if same else "[bold red]The tokens differ.[/]")
    return same


async def main() -> bool:
    try:
        return await show()
    finally:
        await serve.shutdown_async()  # in the loop that the handles belong to


if __name__ == "__main__":
    serve_modes.check_free(HOST, PORT)
    with local_ray():
        with console.status("starting two shards of the embedded tiny K3"):
            serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": PORT})
            serve.run(deployment(ServiceConfig(tp=2, checkpoint_decode_interval=32)), name=APP, route_prefix="/")
        same = asyncio.run(main())
    sys.exit(0 if same else 1)
