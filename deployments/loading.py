"""Weights into all shards of a group: one desk a node, progress in the log, a shard that dies meanwhile is replaced and goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.weight_reader import Progress
from deployments.spec import ShardSpec
from deployments.weight_desk import WeightDesk
from engine.errors import ShardLost

logger = logging.getLogger("ray.serve")
LOG_S = 10.0
LOOK_S = 1.0
REPLACEMENTS = 3  # of shards that die while one group loads


class Loading:
    """Not thread-safe. `actors` is changed in place when one is replaced; `place` starts the actor of a rank."""

    def __init__(self, spec: ShardSpec, actors: list[Any], place: Callable[[int], Any], build: Callable[..., Any] | None) -> None:
        self._spec, self._actors, self._place, self._build = spec, actors, place, build
        self._desks: dict[int, Any] = {}  # by rank
        self._began = time.monotonic()
        self._logged = self._began
        self._moved = self._began  # when a byte was last seen to move
        self._seen = 0
        self.replaced = 0

    async def run(self) -> list[tuple[float, int]]:
        """By rank: seconds it took and bytes of weights; nothing for shards that had theirs. Raises what a shard raises, ShardLost."""
        try:
            await self._open_desks()
            tasks = {asyncio.ensure_future(self._load(rank)): rank for rank in range(len(self._actors))}
            results: list[tuple[float, int]] = [(0.0, 0)] * len(tasks)
            try:
                pending = set(tasks)
                while pending:
                    done, pending = await asyncio.wait(pending, timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
                    for task in done:
                        results[tasks[task]] = task.result()
                    if pending:
                        await self._look()
                return results
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            for desk in set(self._desks.values()):
                ray.kill(desk)  # and with it goes the memory

    async def _open_desks(self) -> None:
        if self._build is not None:  # injected by tests and benchmarks: reads nothing
            return
        places = await asyncio.gather(*(_value(actor.lacks_weights.remote()) for actor in self._actors))
        by_node: dict[str, list[int]] = {}
        for rank, node in enumerate(places):
            if node is not None:
                by_node.setdefault(node, []).append(rank)
        opened = []
        for node, ranks in by_node.items():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            desk: Any = WeightDesk.options(scheduling_strategy=strategy).remote()
            self._desks |= dict.fromkeys(ranks, desk)
            opened.append(_value(desk.open.remote(self._spec, ranks)))
        await asyncio.gather(*opened)

    async def _load(self, rank: int) -> tuple[float, int]:
        while True:
            try:
                result: tuple[float, int] = await self._actors[rank].load.remote(self._desks.get(rank), self._build)
                return result
            except ray.exceptions.RayActorError as error:
                inside = isinstance(error, ray.exceptions.RayTaskError)  # the shard lives and tells of another actor
                if inside or self.replaced >= REPLACEMENTS or rank not in self._desks:
                    raise
                logger.warning("shard %d died while it loaded (%s): another one goes on", rank, str(error).splitlines()[0])
                self.replaced += 1
                ray.kill(self._actors[rank])
                self._actors[rank] = self._place(rank)

    async def _look(self) -> None:
        """Says how far it is; ends it when nothing moves any more."""
        answers = [asyncio.wait_for(_value(actor.progress.remote()), LOOK_S) for actor in self._actors]
        found = [p for p in await asyncio.gather(*answers, return_exceptions=True) if isinstance(p, Progress)]
        now, moved = time.monotonic(), sum(p.read + p.taken for p in found)
        if moved != self._seen or any(p.total == p.taken for p in found):  # the latter: pools and grammars are being made
            self._seen, self._moved = moved, now
        elif now - self._moved > self._spec.loading.patience_s + LOG_S:
            raise ShardLost(f"weights of {self._spec.model_dir}: not a byte moved in {now - self._moved:.0f} s")
        if now - self._logged >= LOG_S and found:
            self._logged = now
            total, taken = sum(p.total for p in found), sum(p.taken for p in found)
            rate = taken / (now - self._began)
            slowest = min(found, key=lambda p: p.taken / max(1, p.total))
            logger.info(
                "weights of %s: %.1f of %.1f GB in %d shards, %.2f GB/s, about %.0f s to go; the slowest shard has %.0f %%",
                self._spec.model_dir, taken / 1e9, total / 1e9, len(found), rate / 1e9, (total - taken) / max(rate, 1),
                100 * slowest.taken / max(1, slowest.total),
            )  # fmt: skip


async def _value(ref: Any) -> Any:
    return await ref
