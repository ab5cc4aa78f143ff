"""`/health` and `/metrics` of the service: what its engine replicas say of themselves.

`/metrics` asks every engine replica at the time of the scrape, so it does not matter which ingress answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields

import orjson
from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from ray.serve.handle import DeploymentHandle

from app.serve_modes import running_mode
from deployments.engine import ReplicaReport
from engine.stats import EngineStats

ANSWER_S = 3.0  # an engine that does not answer within this is not healthy
LEVELS = {"running", "waiting", "paused", "pages_total", "pages_free", "pages_leased", "slots_total", "slots_free", "slots_cached"}
BY_LABEL = {"misses": "reason", "finished": "reason"}
HELP = {
    "steps": "steps with work",
    "tokens_prefilled": "prompt tokens computed, again after a preemption included",
    "tokens_decoded": "tokens computed one by one behind the prompt",
    "tokens_generated": "tokens delivered; the sum of usage.completion_tokens",
    "tokens_cached": "prompt tokens whose computation was skipped; the sum of usage.cached_tokens",
    "tokens_resumed": "tokens whose recomputation after a preemption or a move was skipped",
    "tokens_recomputed": "tokens to be computed again after a preemption or a move",
    "hits": "first admissions that resumed from a checkpoint",
    "misses": "first admissions that found nothing to resume from, by reason",
    "waits": "admissions put off because another request was about to write the prefix",
    "preemptions": "requests put back because pages or slots ran out",
    "checkpoints": "state checkpoints taken",
    "checkpoints_skipped": "state checkpoints for which there was no slot",
    "evictions": "checkpoints evicted",
    "finished": "requests ended, by reason",
    "refused": "requests refused because the queue was full",
    "running": "requests in the batch",
    "waiting": "requests waiting for the batch",
    "paused": "requests whose reader is slower than the engine",
    "pages_total": "pages of MLA latents",
    "pages_free": "pages that hold nothing",
    "pages_leased": "pages of running requests",
    "slots_total": "KDA state slots",
    "slots_free": "slots that hold nothing",
    "slots_cached": "slots that hold a checkpoint",
}


class Health:
    def __init__(self, engine: DeploymentHandle, model: str) -> None:
        self._engine = engine
        self._model = model

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
        registry.register(_Families(await self._ask()))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _ask(self) -> list[ReplicaReport]:
        try:
            return list(await asyncio.wait_for(self._engine.broadcast("report").results_async(), ANSWER_S))
        except Exception:  # whatever kept it from answering, the answer is the same: not healthy
            return []


class _Families(Collector):
    def __init__(self, reports: list[ReplicaReport]) -> None:
        self._reports = reports

    def collect(self) -> list[Metric]:
        families: list[Metric] = []
        for field in fields(EngineStats):
            if field.name == "last":
                continue
            kind = GaugeMetricFamily if field.name in LEVELS else CounterMetricFamily
            labels = ["replica", *([BY_LABEL[field.name]] if field.name in BY_LABEL else [])]
            family = kind(f"k3_{field.name}", HELP[field.name], labels=labels)
            for report in self._reports:
                value = getattr(report.stats, field.name)
                if isinstance(value, Mapping):
                    for label, count in sorted(value.items()):
                        family.add_metric([report.replica, label], count)
                else:
                    family.add_metric([report.replica], value)
            families.append(family)
        return families
