"""The state holders as actors: their names, how one is made, which there are, and which keeps a mirror."""

from __future__ import annotations

from typing import Any

import ray

NAMESPACE = "serve"
PREFIX = "k3-holder-"


def holder_name(node: str) -> str:
    return PREFIX + node


def node_holder(node: str, *, budget_bytes: int, ttl_s: float, durable_url: str | None, endpoint_url: str | None) -> Any:
    """The holder actor of a node: made on first use, detached, pinned there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cluster.holder import StateHolder

    return (
        ray.remote(StateHolder)
        .options(
            name=holder_name(node),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(node, budget_bytes, ttl_s, durable_url, endpoint_url)
    )


def holders() -> list[str]:
    """Names of the living holders."""
    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(PREFIX)]


def mirror_node(home: str, lineage: str) -> str | None:
    """The node that keeps a second copy of a bundle: always the same one, and spread over all. None when `home` is the only one."""
    others = sorted(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != home)
    return others[int(lineage[:8], 16) % len(others)] if others else None
