"""Starting Ray for the command line's verbs. `serve run` and KubeRay do not come through here."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from rich.console import Console
from rich.progress import Progress

from app import application, serve_modes
from app.config import ServiceConfig
from app.resolve import resolve
from app.score import Prompts, score, score_spec, write_logits
from cluster.checkpoint import Checkpoint
from deployments.shard_group import ShardGroup
from engine.errors import EngineFailure

LOGS = "/tmp/ray/session_latest/logs"  # where Ray keeps them
OBJECT_STORE_BYTES = 512 * 2**20
console = Console(stderr=True)


@contextmanager
def local_ray() -> Iterator[None]:
    """Joins the Ray of RAY_ADDRESS or of `ray start` on this machine; otherwise starts one on the loopback interface. Leaves it at the
    end, unless it was there before."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"namespace": "serve", "logging_level": logging.WARNING, "log_to_driver": False}
    with console.status("starting Ray"):
        try:
            ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        except ValueError:  # sizes are not ours to choose: there is a cluster to join
            ray.init(**quiet)
    try:
        yield
    finally:
        ray.shutdown()


def run(config: ServiceConfig, checkpoint: Checkpoint, *, host: str, port: int) -> None:
    """Serves until SIGINT or SIGTERM, then drains and leaves Ray. Raises K3Error for what is refused at start."""
    begin = time.monotonic()
    stop = threading.Event()
    with local_ray():
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which installs handlers of its own
            signal.signal(number, lambda *_: stop.set())
        try:
            _deploy(application(config, resolve(config, checkpoint=checkpoint)), host, port)
            console.print(
                f"ready in {time.monotonic() - begin:.0f} s: http://{host}:{port}/v1 serves {config.served_model_name} "
                f"({config.replicas} x {config.shards} shards, tp={config.tp_size}; {serve_modes.running_mode()} mode). "
                f"Ray is at {ray.get_runtime_context().gcs_address}, logs in {LOGS}. Ctrl-C stops.",
                highlight=False,
                soft_wrap=True,
            )
            stop.wait()
            console.print("stopping")
        finally:
            serve.shutdown()


def _deploy(application: serve.Application, host: str, port: int) -> None:
    with console.status("starting the ingress and the shards"):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
            serve.run(application, name="k3", route_prefix="/")
        except RuntimeError as error:  # Serve tells the last line of what a replica said
            raise EngineFailure(f"the service did not start: {str(error).strip().splitlines()[-1]} (logs: {LOGS}/serve)") from None


async def score_prompts(config: ServiceConfig, checkpoint: Checkpoint, named: Prompts, out: Path, chunk: int) -> None:
    """`k3 score`. Raises K3Error."""
    with local_ray():
        spec = score_spec(resolve(config, checkpoint=checkpoint).engine.shards, named)
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
    write_logits(out, logits)
    console.print(f"wrote {len(logits)} prompts, {sum(len(v) for v in logits.values())} positions, to {out}", highlight=False)
