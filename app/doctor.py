"""The examination behind `k3 doctor`: five steps from the configuration that will be served to findings."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from app import serve_modes
from app.config import ServiceConfig
from cluster.doctor import CheckFailed, CheckHung, Finding, Status, fail, in_child, ok, together, warn
from cluster.doctor_files import judge_fingerprints
from cluster.doctor_links import links_here
from cluster.doctor_node import (
    NodeAsk,
    NodeFacts,
    inspect_node,
    judge_accelerators,
    judge_clocks,
    judge_disks,
    judge_memory,
    judge_software,
)
from cluster.planner import Workload, local_bytes, workspace_bytes
from cluster.pools import pool_bytes
from deployments.spec import ShardSpec
from engine.config import EngineConfig
from engine.errors import CheckpointError, K3Error
from model.config import ModelConfig

SPILL_DIR = "/tmp/ray"  # Ray's own default
RAY_FIX = "see `ray status` there; restart Ray with `ray stop` and `ray start`"


class Step(StrEnum):
    """Steps that start processes of their own, and may be left out."""

    LINKS = "links"
    GOLDEN = "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What is to be examined. `address`: of a Ray cluster; None: this machine alone. `limit_s`: of each of the five steps."""

    config: ServiceConfig
    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None
    url: str | None = None
    headers: Mapping[str, str]
    golden: Path | None = None
    limit_s: float
    skip: frozenset[str] = frozenset()


def examine(wanted: Examination) -> Iterator[Finding]:
    """Five steps, each within `limit_s`: ports and server; nodes; the configuration against them; links; golden tokens."""
    from app.golden import EMBEDDED, read_golden

    goldens = read_golden(wanted.golden) if wanted.golden is not None else [EMBEDDED] if wanted.config.model is None else []
    yield from together({"ports": lambda: _ports(wanted), "server": lambda: _server(wanted)}, wanted.limit_s)
    seen, nodes, gpus = _nodes(wanted)
    yield from seen
    faulty = any(f.status is Status.FAIL and f.check in ("files", "fingerprint") for f in seen)
    configured = together({"configuration": lambda: _configuration(wanted.config, nodes, gpus, told=faulty)}, wanted.limit_s)
    yield from configured
    device = "cuda" if wanted.config.device != "cpu" and gpus >= _need(wanted.config) else "cpu"
    if nodes and Step.LINKS not in wanted.skip:
        yield from _links(wanted, device, gpus)
    broken = faulty or not nodes or any(f.status is Status.FAIL for f in configured)
    if broken or Step.GOLDEN in wanted.skip:
        return
    if not goldens:
        yield warn("golden", "no tokens were checked", "give --golden FILE with a prompt and its reply, made on a machine that you trust")
    elif wanted.url is not None:
        url = wanted.url
        from app.golden import golden_of_server

        yield from together({"golden": lambda: golden_of_server(url, wanted.headers, goldens, wanted.limit_s)}, wanted.limit_s, url)
    else:
        yield from _child_findings("golden", _golden_child, wanted.address, wanted.config, goldens, limit_s=wanted.limit_s)


def _nodes(wanted: Examination) -> tuple[list[Finding], list[NodeFacts], int]:
    """Findings of and about the nodes; the nodes that answered; how many accelerators a service could have."""
    from app.default_model import ensure_default_model

    config = wanted.config
    ask = NodeAsk(
        model_dir=str(config.model or ensure_default_model()),
        model_endpoint_url=config.model_endpoint_url,
        spill_dir=SPILL_DIR,
        durable_url=config.durable_url,
        durable_endpoint_url=config.durable_endpoint_url,
        limit_s=wanted.limit_s,
    )
    findings: list[Finding] = []
    if wanted.address is None:
        nodes = [inspect_node(socket.gethostname(), ask)]
        gpus = len(nodes[0].accelerators.names)
    else:
        from cluster.doctor_ray import ClusterFacts, look_at_cluster

        try:
            facts: ClusterFacts = in_child(look_at_cluster, wanted.address, ask, wanted.limit_s - 5, limit_s=wanted.limit_s)
        except (CheckHung, CheckFailed) as error:
            return [fail("ray", f"the cluster at {wanted.address}: {error}", RAY_FIX, wanted.address)], [], 0
        nodes, gpus = list(facts.nodes), facts.num_gpus
        findings += [*facts.findings, *judge_clocks(facts.offsets, "this machine")]
    findings += [f for n in nodes for f in n.findings]
    if nodes:
        findings += judge_fingerprints([(n.name, n.fingerprint) for n in nodes])
        findings += judge_software(nodes)
        findings += judge_accelerators(nodes, need=_need(config), device=config.device)
        findings += judge_disks(nodes, store_bytes=int(config.store_bytes) if config.state_store else 0, spill_dir=SPILL_DIR)
    return findings, nodes, gpus


def _need(config: ServiceConfig) -> int:
    return config.shards * config.replicas


def _configuration(config: ServiceConfig, nodes: Sequence[NodeFacts], gpus: int, told: bool) -> list[Finding]:
    """What `k3 serve` would refuse, and whether the memory suffices. `told`: a fault of the checkpoint has its finding already."""
    from app.resolve import find_checkpoint, resolve

    try:
        checkpoint = find_checkpoint(config)
        plan = resolve(config, gpus=gpus, checkpoint=checkpoint)
    except CheckpointError as error:
        return [] if told else [fail("configuration", str(error), "mend the checkpoint")]
    except K3Error as error:
        return [fail("configuration", str(error), "correct what it names; `k3 config` lists every field")]
    shards, engine = plan.engine.shards, plan.engine.engine
    what = (
        f"{config.replicas} x {shards.shards} shards, tp {shards.tp}, {shards.device} {shards.dtype}; {engine.num_pages:,} pages, "
        f"{engine.num_slots} slots, {engine.max_model_len:,} tokens a session"
    )
    findings = [ok("configuration", what)]
    if nodes:
        need = shard_bytes(checkpoint.config, shards, engine)
        findings += judge_memory(nodes, shard_bytes=need, shards=_need(config), device=shards.device)
    return findings


def shard_bytes(model: ModelConfig, shards: ShardSpec, engine: EngineConfig) -> int:
    """What the fullest shard allocates: weights, pools and the activations of its largest step."""
    element = 4 if shards.dtype == "float32" else 2
    weights = sum(local_bytes(model, shards.tp, shards.shards, element).values())
    cost = pool_bytes(model, page_size=shards.page_size, tp_size=shards.tp, latent_bytes=element)
    steps = Workload(max_batched_tokens=engine.max_batched_tokens, max_running=engine.max_running, reserve=0)
    workspace = workspace_bytes(model, shards.tp, shards.num_groups, steps)
    return weights + shards.num_pages * cost.page + shards.num_slots * cost.slot + workspace


def _ports(wanted: Examination) -> list[Finding]:
    if wanted.url is not None:
        return []  # it is served already
    try:
        serve_modes.check_free(wanted.host, wanted.port)
    except K3Error as error:
        return [fail("ports", str(error), "end what listens there, or choose another --port (for a running server: --url)")]
    return [ok("ports", f"{wanted.host}:{wanted.port} is free")]


def _server(wanted: Examination) -> list[Finding]:
    if wanted.url is None:
        return []
    import httpx

    health = wanted.url.removesuffix("/v1") + "/health"
    try:
        answer = httpx.get(health, timeout=httpx.Timeout(wanted.limit_s / 2, connect=5))
    except httpx.HTTPError as error:
        return [fail("server", f"{health}: {error}", "start it, or correct --url", wanted.url)]
    if answer.status_code != 200:
        return [fail("server", f"{health} answers {answer.status_code}: {answer.text[:200]}", "see the server's logs", wanted.url)]
    return [ok("server", f"{health} answers 200", wanted.url)]


def _links(wanted: Examination, device: str, gpus: int) -> list[Finding]:
    if wanted.address is None:
        devices = [f"cuda:{i}" for i in range(gpus)] if device == "cuda" else ["cpu", "cpu"]
        if len(devices) < 2:
            return []
        return together({"links": lambda: links_here(devices, wanted.limit_s - 2)}, wanted.limit_s)
    from cluster.doctor_ray import measure_cluster

    return _child_findings("links", measure_cluster, wanted.address, device, wanted.limit_s - 5, limit_s=wanted.limit_s)


def _child_findings(check: str, function: Any, *args: Any, limit_s: float) -> list[Finding]:
    try:
        found: list[Finding] = in_child(function, *args, limit_s=limit_s)
    except CheckHung as error:
        return [
            fail(check, str(error), "see what hangs (a dead peer, a dead mount), or give it more --timeout; loading a large model needs it")
        ]
    except CheckFailed as error:
        return [fail(check, str(error), "mend what it names, then run this again")]
    return found


def _golden_child(address: str | None, config: ServiceConfig, goldens: Sequence[Any]) -> list[Finding]:
    """In a process of its own: joins the cluster, or starts a Ray that ends with it."""
    import ray

    from app.golden import golden_of_shards
    from app.serving import OBJECT_STORE_BYTES

    quiet: dict[str, Any] = {"namespace": "serve", "logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    else:
        ray.init(address=address, **quiet)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        return asyncio.run(golden_of_shards(config, goldens))
    finally:
        ray.shutdown()
