"""Starting Ray for the command line's verbs. `serve run` and KubeRay do not come through here."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path

import ray
from ray import serve
from rich.console import Console
from rich.progress import Progress

from app import deployment, serve_modes
from app.config import ServiceConfig
from app.resolve import resolve
from app.score import read_prompts, score, score_spec, write_logits
from deployments.shard_group import ShardGroup

LOGS = "/tmp/ray/session_latest/logs"  # where Ray keeps them
OBJECT_STORE_BYTES = 512 * 2**20
console = Console(stderr=True)


def start_ray() -> None:
    """Joins the Ray of RAY_ADDRESS or of this machine; otherwise starts one on the loopback interface. Idempotent."""
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", namespace="serve", logging_level=logging.WARNING, log_to_driver=False)
    except ConnectionError:
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )


def run(config: ServiceConfig, *, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM, then drains and leaves the Ray that it started. Raises K3Error for what is refused at start."""
    begin = time.monotonic()
    resolve(config, gpus=config.shards * config.replicas)  # refuse what can be refused before Ray starts
    stop = threading.Event()
    with console.status("starting Ray"):
        start_ray()
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which installs handlers of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        application = deployment(config)
        with console.status("starting the ingress and the shards"):
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
            serve.run(application, name="k3", route_prefix="/")
        console.print(
            f"ready in {time.monotonic() - begin:.0f} s: http://{host}:{port}/v1 serves {config.served_model_name} "
            f"({config.replicas} x {config.shards} shards, tp={config.tp_size}; {serve_modes.running_mode()} mode). "
            f"Logs: {LOGS}. Ctrl-C stops.",
            highlight=False,
            soft_wrap=True,
        )
        stop.wait()
        console.print("stopping")
    finally:
        serve.shutdown()
        ray.shutdown()


async def score_prompts(config: ServiceConfig, prompts: Path, out: Path, chunk: int) -> None:
    """`k3 score`. Raises K3Error."""
    named = read_prompts(prompts, resolve(config, gpus=config.shards).served.vocab_size)  # refuse before Ray starts
    start_ray()
    spec = score_spec(resolve(config).engine.shards, named)
    try:
        group = await ShardGroup.start(spec)
        try:
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task("scoring", total=sum(len(ids) for ids in named.values()))
                logits = await score(
                    group,
                    named,
                    groups=spec.num_groups,
                    page_size=spec.page_size,
                    chunk=chunk,
                    progress=lambda tokens: bar.advance(task, tokens),
                )
        finally:
            await group.close()
    finally:
        ray.shutdown()
    write_logits(out, logits)
    console.print(f"wrote {len(logits)} prompts, {sum(len(v) for v in logits.values())} positions, to {out}", highlight=False)
