"""States beside one replica's engine loop: exports, imports and the tier behind them, put together."""

from __future__ import annotations

from deployments.bundle_stats import BundleCounters
from deployments.exports import Exporter, Shards
from deployments.imports import Importer
from deployments.spec import EngineSpec, StateSpec
from deployments.tier import StateTier
from engine.bundle import StateBundle
from engine.lineage import Lineage
from engine.loop import EngineLoop
from engine.retention import Written
from engine.types import GenerateRequest


class BundleTraffic:
    """What `deployments.supervisor` asks of states."""

    def __init__(self, exporter: Exporter, importer: Importer) -> None:
        self._exporter = exporter
        self._importer = importer

    @classmethod
    def start(cls, spec: EngineSpec, state: StateSpec, shards: Shards, tier: StateTier, counters: BundleCounters) -> BundleTraffic:
        return cls(Exporter(spec, state, shards, tier, counters), Importer(spec, state, shards, tier, counters))

    def offer(self, loop: EngineLoop, group: int, written: Written) -> None:
        self._exporter.offer(loop, group, written)

    def worth_trying(self, request: GenerateRequest) -> bool:
        return self._importer.worth_trying(request)

    async def bring(self, loop: EngineLoop, group: int, request: GenerateRequest, lineage: Lineage) -> StateBundle | str | None:
        outcome = await self._importer.bring(loop, group, request, lineage)
        if isinstance(outcome, StateBundle):
            self._exporter.resumed(request, outcome)
        return outcome

    def leave(self) -> None:
        """Every request is about to go on elsewhere: the last state of each is worth storing."""
        self._exporter.leaving = True

    async def flush(self) -> None:
        await self._exporter.flush()
