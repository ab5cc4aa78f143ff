"""`serve run app:deployment`: plan, then bind the graph. Importing this package imports neither Ray nor torch.

No `from __future__ import annotations` here: Serve reads the builder's annotation to validate its argument.
"""

from typing import TYPE_CHECKING

from app.config import ServiceConfig

if TYPE_CHECKING:
    from ray.serve import Application

    from app.resolve import ServicePlan

__all__ = ["ServiceConfig", "application", "deployment"]


def deployment(config: ServiceConfig) -> "Application":
    """The Serve application: an HTTP ingress in front of engine replicas of shard actors.

    Raises ConfigError or CheckpointError, before anything is allocated, for what cannot run: files, sizes, widths, budget.
    """
    from app.resolve import resolve

    return application(config, resolve(config))


def application(config: ServiceConfig, plan: "ServicePlan") -> "Application":
    """The same for a plan that was made before."""
    from ray import serve

    from app.ingress import Ingress
    from cluster.placement import bundles
    from deployments.engine import EngineReplica

    shards = plan.engine.shards
    requests = (plan.engine.engine.max_running + plan.engine.engine.max_queued) * shards.num_groups
    engine = serve.deployment(EngineReplica).options(  # type: ignore[attr-defined]  # Serve's overloads
        name="engine",
        num_replicas=config.replicas,
        max_ongoing_requests=2 * requests + 8,  # the engine's own queue answers 429; Serve's must not bound it
        placement_group_bundles=bundles(shards=shards.shards, shard_cpus=shards.num_cpus, shard_gpus=shards.num_gpus, replica_cpus=0.1),
        placement_group_strategy="PACK",
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=30,
    )
    ingress = Ingress.options(  # type: ignore[attr-defined]
        max_ongoing_requests=4 * requests * config.replicas + 64,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=120,  # streams that run end, or break off and are had again
    )
    return ingress.bind(engine.bind(plan.engine), config, plan.served)
