"""The nodes of a Ray cluster, each looked at by an actor of its own there; and the links between them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.doctor import Finding, fail, ok, warn
from cluster.doctor_links import LinkFacts, broken_links, judge_links, measure_links
from cluster.doctor_node import NodeAsk, NodeFacts, inspect_node

SILENCE_S = 30.0  # a node that has not begun to answer by then is left behind
PINGS = 5  # the quickest says most about a clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """`nodes`: those that answered. `offsets`: (node, its clock minus ours in seconds)."""

    nodes: tuple[NodeFacts, ...]
    offsets: tuple[tuple[str, float], ...]
    findings: tuple[Finding, ...]
    num_gpus: int


class Probe:
    """Runs on the node that is looked at."""

    def clock(self) -> float:
        return time.time()

    def inspect(self, name: str, ask: NodeAsk) -> NodeFacts:
        return inspect_node(name, ask)

    def endpoint(self) -> str:
        """A free address of this node, for the ranks to meet."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def measure(self, rank: int, world: int, url: str, device: str, limit_s: float) -> LinkFacts:
        return measure_links(rank, world, url, device, limit_s)


def look_at_cluster(address: str, ask: NodeAsk, limit_s: float) -> ClusterFacts:
    """Joins the cluster and looks at its nodes: for a process of its own."""
    _join(address)
    try:
        return inspect_cluster(ask, limit_s)
    finally:
        ray.shutdown()


def measure_cluster(address: str, device: str, limit_s: float) -> list[Finding]:
    """Joins the cluster and measures between its nodes (`device` cpu: a process a node; cuda: one an accelerator)."""
    _join(address)
    try:
        return cluster_links(device, limit_s)
    finally:
        ray.shutdown()


def inspect_cluster(ask: NodeAsk, limit_s: float, clock: Callable[[], float] = time.time) -> ClusterFacts:
    """Every node of the cluster that this process has joined, within about `limit_s`: a node that does not answer is a finding."""
    begin = time.monotonic()
    deadline = begin + limit_s
    listed = ray.nodes()
    alive = [n for n in listed if n["Alive"]]
    findings = [
        warn("ray", "Ray lists this node as dead", "restart Ray there, or ignore it if it was taken out on purpose", node_name(n))
        for n in listed
        if not n["Alive"]
    ]
    probes = {node_name(n): _probe(n["NodeID"]) for n in alive}
    there, silent = _answers({name: p.clock.remote() for name, p in probes.items()}, begin + min(SILENCE_S, limit_s * 0.75))
    findings += silent
    offsets = tuple((name, offset) for name in there if (offset := _offset(probes[name], clock, deadline)) is not None)
    looking = replace(ask, limit_s=max(1.0, deadline - time.monotonic() - 2))
    looks, silent = _answers({name: probes[name].inspect.remote(name, looking) for name in there}, deadline)
    findings += silent
    has = {node_name(n): n["Resources"] for n in alive}
    nodes = tuple(
        replace(facts, object_store=int(has[name].get("object_store_memory", 0)), ray_gpus=int(has[name].get("GPU", 0)))
        for name, facts in looks.items()
    )
    if not silent and len(nodes) == len(alive):
        findings.append(ok("ray", f"{len(nodes)} nodes answer, Ray {ray.__version__}", nodes=len(nodes)))
    for probe in probes.values():
        ray.kill(probe)
    return ClusterFacts(
        nodes=nodes, offsets=offsets, findings=tuple(findings), num_gpus=int(sum(n["Resources"].get("GPU", 0) for n in alive))
    )


def cluster_links(device: str, limit_s: float) -> list[Finding]:
    """Between processes on all nodes: two on a single one. Ends within about `limit_s`."""
    deadline = time.monotonic() + limit_s
    alive = [n for n in ray.nodes() if n["Alive"]]
    if device == "cuda":
        ranks = [n for n in alive for _ in range(int(n["Resources"].get("GPU", 0)))]
        if len(ranks) < 2:
            return [ok("links", f"{len(ranks)} accelerators: nothing to connect")]
        free = int(ray.available_resources().get("GPU", 0))
        if free < len(ranks):
            what = f"{len(ranks) - free} of {len(ranks)} accelerators are reserved by running applications: NCCL was not tried"
            return [warn("links", what, "run this before the service starts, or stop it")]
    else:
        ranks = alive if len(alive) > 1 else alive * 2
    probes = [_probe(n["NodeID"], num_gpus=int(device == "cuda")) for n in ranks]
    places = [node_name(n) for n in ranks]
    try:
        first, silent = _answers({places[0]: probes[0].endpoint.remote()}, deadline - limit_s / 2)
        if silent:
            return [broken_links(f"rank 0 on {places[0]} did not start: {silent[0].what}", places[0])]
        left = max(1.0, deadline - time.monotonic() - 3)
        names = [f"rank {rank} on {place}" for rank, place in enumerate(places)]
        asked = {
            name: probe.measure.remote(rank, len(probes), first[places[0]], "cuda:0" if device == "cuda" else "cpu", left)
            for rank, (name, probe) in enumerate(zip(names, probes, strict=True))
        }
        facts, silent = _answers(asked, deadline)
        if silent:
            told = dict.fromkeys(f"{f.where}: {f.what}" for f in silent)
            return [broken_links("; ".join(list(told)[:4]))]
        return judge_links([facts[name] for name in names], places, "NCCL" if device == "cuda" else "gloo")
    finally:
        for probe in probes:
            ray.kill(probe)


def node_name(node: dict[str, Any]) -> str:
    """Address and the beginning of the id: several Ray nodes may share a machine."""
    return f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"


def _join(address: str) -> None:
    ray.init(address=address, namespace="serve", logging_level=logging.ERROR, log_to_driver=False)


def _probe(node_id: str, num_gpus: int = 0) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Probe).options(num_cpus=0, num_gpus=num_gpus, max_restarts=0, scheduling_strategy=here).remote()


def _answers(asked: dict[str, Any], deadline: float) -> tuple[dict[str, Any], list[Finding]]:
    """Values by name, and a finding for each that failed or was silent."""
    values: dict[str, Any] = {}
    findings = []
    begin = time.monotonic()
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=max(0.0, deadline - begin))
    for name, ref in asked.items():
        try:
            values[name] = ray.get(ref, timeout=0.1)
        except ray.exceptions.GetTimeoutError:
            what = f"no answer within {time.monotonic() - begin:.0f} s"
            findings.append(
                fail(
                    "ray",
                    what,
                    "see whether the machine is up, with a free CPU, and its raylet runs (`ray status`); restart Ray there",
                    name,
                )
            )
        except ray.exceptions.RayError as error:
            findings.append(fail("ray", _reason(error), "mend what it names; the project must be installed on every node", name))
    return values, findings


def _offset(probe: Any, clock: Callable[[], float], deadline: float) -> float | None:
    """Seconds that the node's clock is ahead of ours, by the quickest of some exchanges; None when the node went away."""
    best, offset = float("inf"), None
    for _ in range(PINGS):
        begin, before = time.monotonic(), clock()
        try:
            there = ray.get(probe.clock.remote(), timeout=max(0.1, deadline - begin))
        except (ray.exceptions.RayError, TimeoutError):
            return offset
        if (took := time.monotonic() - begin) < best:
            best, offset = took, there - before - took / 2
    return offset


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    text: Sequence[str] = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__
