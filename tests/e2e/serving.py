"""A served application for the tests of a module: Ray started once, few CPUs, a small object store."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from ray import serve

from app import ServiceConfig, deployment


@dataclass(frozen=True)
class Server:
    url: str
    config: ServiceConfig

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **kwargs)

    def metrics(self) -> dict[str, float]:
        """name (with its reason label, if any) → value, summed over replicas."""
        values: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("k3_"):
                name, _, value = line.rpartition(" ")
                base, _, labels = name.partition("{")
                reason = next((part for part in labels.rstrip("}").split(",") if part.startswith("reason=")), "")
                key = base + ("{" + reason + "}" if reason else "")
                values[key] = values.get(key, 0) + float(value)
        return values


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def local_cluster(num_cpus: int = 8) -> Iterator[int]:
    """Ray and Serve on this machine; yields the HTTP port."""
    port = free_port()
    ray.init(
        address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=128 << 20, namespace="serve", log_to_driver=False
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def served(**settings: Any) -> Iterator[Server]:
    config = ServiceConfig.model_validate({"shard_num_cpus": 0.1, **settings})
    with local_cluster() as port:
        serve.run(deployment(config), name="k3", route_prefix="/")
        yield Server(f"http://127.0.0.1:{port}", config)
