"""`/health` and `/metrics` of the service: what its engine replicas say of themselves.

`/metrics` asks every engine replica at the time of the scrape, so it does not matter which ingress answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from app.serve_modes import running_mode
from cluster.holder import HolderStats
from deployments.bundle_stats import BundleStats
from deployments.engine import ReplicaReport
from engine.stats import EngineStats

ANSWER_S = 3.0  # an engine that does not answer within this is not healthy
NOT_METRICS = {"last", "node", "started"}
LEVELS = {
    *("running", "waiting", "paused", "pages_total", "pages_free", "pages_leased", "slots_total", "slots_free", "slots_cached"),
    *("bundles", "objects", "bytes", "budget", "pinned", "not_durable"),
    *("exports_running", "imports_running"),
}
BY_LABEL = {
    **dict.fromkeys(("misses", "finished", "exports_failed", "import_misses"), "reason"),
    "imports": "source",
    "requests_moved": "phase",
}
HELP = {
    "steps": "steps with work",
    "tokens_prefilled": "prompt tokens computed, again after a preemption included",
    "tokens_decoded": "tokens computed one by one behind the prompt",
    "tokens_generated": "tokens delivered; the sum of usage.completion_tokens",
    "tokens_cached": "prompt tokens whose computation was skipped; the sum of usage.cached_tokens",
    "tokens_resumed": "tokens whose recomputation after a preemption or a move was skipped",
    "tokens_recomputed": "tokens to be computed again after a preemption or a move",
    "misses": "first admissions that found nothing to resume from, by reason",
    "waits": "admissions put off because another request was about to write the prefix",
    "preemptions": "requests put back because pages or slots ran out",
    "checkpoints": "state checkpoints taken",
    "checkpoints_skipped": "state checkpoints for which there was no slot",
    "evictions": "checkpoints evicted",
    "finished": "requests ended, by reason",
    "refused": "requests refused because the queue was full; states refused because all that is held is pinned",
    "running": "requests in the batch",
    "waiting": "requests waiting for the batch",
    "paused": "requests whose reader is slower than the engine",
    "pages_total": "pages of MLA latents",
    "pages_free": "pages that hold nothing",
    "pages_leased": "pages of running requests",
    "slots_total": "KDA state slots",
    "slots_free": "slots that hold nothing",
    "slots_cached": "slots that hold a checkpoint",
    "exports": "states stored outside of the shards",
    "exported_bytes": "bytes of them, shared segments included",
    "export_seconds": "time that they took, beside the steps",
    "exports_failed": "states that were not stored, by reason",
    "exports_superseded": "states not stored because a newer one of the same request came first",
    "imports": "stored states restored, by where they came from",
    "imported_bytes": "bytes of restored states",
    "imported_tokens": "tokens that restored states stand for",
    "import_seconds": "time that restoring took",
    "import_misses": "stored states that could not be used, by reason",
    "recoveries": "times that a lost shard group was formed again",
    "recovery_seconds": "time that it took",
    "recoveries_failed": "attempts at it that failed",
    "shards_replaced": "shards that were started anew in recoveries",
    "weights_reread_bytes": "bytes of weights read in recoveries; shards that survive read none",
    "requests_moved": "requests that went on after a recovery, by what they were doing at the loss: import, prefill, decode",
    "bundles_lost": "stored states that are known to have died with the holder of their node",
    "exports_running": "states on their way out of the shards",
    "imports_running": "states on their way into the shards",
    "bundles": "states held",
    "objects": "objects held: recurrent parts and segments of latents",
    "bytes": "bytes held",
    "budget": "bytes that may be held",
    "pinned": "states that are not evicted",
    "not_durable": "states that die with their holder",
    "taken": "states taken in",
    "hits": "states handed out, or first admissions that resumed from a checkpoint",
    "evicted": "states evicted",
    "never_hit": "states evicted that nobody ever asked for",
    "durable_bytes": "bytes written to the durable tier",
    "durable_failures": "states that could not be written to the durable tier",
}


class Health:
    def __init__(self, engine: DeploymentHandle, model: str, histories: Mapping[str, int]) -> None:
        """`histories`: this ingress's count of requests by what came back of their thinking."""
        self._engine = engine
        self._model = model
        self._histories = histories

    async def report(self) -> Response:
        """200 when every engine replica answers and has its shards, 503 otherwise; the mode Serve runs in is part of it."""
        replicas = await self._ask()
        failed = [r.failure for r in replicas if r.failure is not None]
        ok = bool(replicas) and not failed
        body = {
            "status": "ok" if ok else "unavailable",
            "model": self._model,
            "serve_mode": running_mode(),
            "replicas": len(replicas),
            "reason": None if ok else (failed[0] if failed else f"no engine replica answered within {ANSWER_S:g} s"),
        }
        return Response(orjson.dumps(body), status_code=200 if ok else 503, media_type="application/json")

    async def metrics(self) -> Response:
        """Prometheus text: the engines' counters and levels, labelled by replica."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(await self._ask(), self._histories))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _ask(self) -> list[ReplicaReport]:
        try:
            return list(await asyncio.wait_for(self._engine.broadcast("report").results_async(), ANSWER_S))
        except Exception:  # whatever kept it from answering, the answer is the same: not healthy
            return []


class _Families(Collector):
    def __init__(self, reports: list[ReplicaReport], histories: Mapping[str, int]) -> None:
        self._reports = reports
        self._histories = histories

    def collect(self) -> list[Metric]:
        """Of engines and of states that moved by replica, of stores by node (replicas of one node share its holder)."""
        names = [r.replica for r in self._reports]
        holders = {r.holder.node: r.holder for r in self._reports if r.holder is not None}
        histories = CounterMetricFamily(
            "k3_thinking_history", "chat requests of this ingress, by what came back of their thinking", labels=["state"]
        )
        for state, count in sorted(self._histories.items()):
            histories.add_metric([state], count)
        return [
            histories,
            *_families("k3", "replica", EngineStats, dict(zip(names, (r.stats for r in self._reports), strict=True))),
            *_families("k3_state", "replica", BundleStats, dict(zip(names, (r.bundles for r in self._reports), strict=True))),
            *_families("k3_store", "node", HolderStats, holders),
        ]


def _families(prefix: str, label: str, kind: type, snapshots: Mapping[str, Any]) -> list[Metric]:
    """One family a field of the dataclass `kind`; `snapshots`: the label's value → a snapshot."""
    families: list[Metric] = []
    for field in fields(kind):
        if field.name in NOT_METRICS:
            continue
        family_of = GaugeMetricFamily if field.name in LEVELS else CounterMetricFamily
        labels = [label, *([BY_LABEL[field.name]] if field.name in BY_LABEL else [])]
        family = family_of(f"{prefix}_{field.name}", HELP[field.name], labels=labels)
        for name, snapshot in snapshots.items():
            value = getattr(snapshot, field.name)
            if isinstance(value, Mapping):
                for kind_of, count in sorted(value.items()):
                    family.add_metric([name, kind_of], count)
            else:
                family.add_metric([name], value)
        families.append(family)
    return families
