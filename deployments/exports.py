"""Checkpoints out of the shards into the state tier, beside the steps.

A checkpoint is worth a bundle when somebody would otherwise compute many tokens again (`stake_tokens`), or when a session's next turn
begins there. Few are on their way at a time; while the queue is long, a newer state of a request takes the place of an older one.
Decode never waits for any of this: the checkpoint is pinned while it is copied, and that is all that the engine knows of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import ray

from deployments.bundle_stats import BundleCounters
from deployments.spec import EngineSpec, StateSpec
from engine.bundle import ExportPart, StateBundle
from engine.errors import EngineFailure
from engine.lineage import Lineage
from engine.loop import EngineLoop
from engine.prefix import Checkpoint
from engine.retention import Written
from engine.types import GenerateRequest

logger = logging.getLogger("ray.serve")
REMEMBERED = 8192  # requests whose last exported position is remembered


class Shards(Protocol):
    """What exports and imports need of a shard group."""

    epoch: int

    def actors_of(self, group: int) -> list[Any]: ...


class Tier(Protocol):
    async def take(self, draft: StateBundle, jobs: list[tuple[Any, ExportPart]]) -> StateBundle: ...
    async def announce(self, bundle: StateBundle, tenant: str, session: str | None) -> bool: ...
    async def mirror(self, bundle: StateBundle) -> None: ...


class _Waiting(NamedTuple):
    loop: EngineLoop
    group: int
    written: Written


class Exporter:
    def __init__(self, spec: EngineSpec, state: StateSpec, shards: Shards, tier: Tier, counters: BundleCounters) -> None:
        self._fingerprint = spec.fingerprint
        self._block = spec.engine.block_size
        self._page_size = spec.engine.page_size
        self._state = state
        self._shards = shards
        self._tier = tier
        self._counters = counters
        self.leaving = False  # whoever ends here goes on elsewhere
        self._waiting: OrderedDict[tuple[str, bool], _Waiting] = OrderedDict()  # by request and whether it is its prompt's end
        self._running: set[asyncio.Task[None]] = set()
        self._last: OrderedDict[str, tuple[int, str | None]] = OrderedDict()  # request → position and lineage of its newest bundle

    def offer(self, loop: EngineLoop, group: int, written: Written) -> None:
        """A checkpoint became visible in a group of `loop`. Returns at once."""
        request, position = written.request, written.position
        if position < self._block:
            return
        at_stake = position - self._last.get(request.request_id, (0, None))[0]
        ends_turn = written.ended and (request.session is not None or self.leaving) and at_stake > 0
        if at_stake < self._state.stake_tokens and not ends_turn:
            return
        key = (request.request_id, position == len(request.prompt) - 1)
        if key in self._waiting:
            self._counters.exports_superseded += 1
        self._waiting[key] = _Waiting(loop, group, written)
        self._pump()

    def resumed(self, request: GenerateRequest, bundle: StateBundle) -> None:
        """A request goes on from a stored bundle: only what comes after it is at stake."""
        self._remember(request.request_id, bundle.position, bundle.lineage)

    async def flush(self) -> None:
        """Waits until nothing waits or is on its way."""
        while self._running:
            await asyncio.wait(set(self._running))

    def _pump(self) -> None:
        while self._waiting and len(self._running) < self._state.export_concurrency:
            _, waiting = self._waiting.popitem(last=False)
            task = asyncio.get_running_loop().create_task(self._export(*waiting))
            self._running.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an export failed", exc_info=error)
            self._counters.exports_failed["bug"] += 1
        self._pump()

    async def _export(self, loop: EngineLoop, group: int, written: Written) -> None:
        request, lineage, position = written.request, written.lineage, written.position
        begin = time.monotonic()
        if loop.failure is not None:  # its slots and pages are another loop's by now, or will be
            self._counters.exports_failed["stale"] += 1
            return
        checkpoint = loop.pin(group, lineage.at(position))
        if checkpoint is None:
            self._counters.exports_failed["evicted"] += 1
            return
        self._counters.exports_running += 1
        try:
            bundle = await self._tier.take(self._draft(written), self._jobs(group, lineage, checkpoint))
        except EngineFailure as error:
            self._fail(type(error).__name__, error)
            return
        except ray.exceptions.RayError as error:
            self._fail("ShardLost", error)
            return
        finally:
            self._counters.exports_running -= 1
            loop.unpin(group, checkpoint)
        self._counters.exports += 1
        self._counters.exported_bytes += bundle.nbytes
        self._counters.export_seconds += time.monotonic() - begin
        self._remember(request.request_id, position, bundle.lineage)
        try:
            pinned = await self._tier.announce(bundle, request.tenant, request.session)
            if self._state.mirror and pinned:
                await self._tier.mirror(bundle)
        except (EngineFailure, ray.exceptions.RayError) as error:
            self._fail(type(error).__name__, error)

    def _fail(self, reason: str, error: Exception) -> None:
        self._counters.exports_failed[reason] += 1
        logger.warning("a state was not exported: %s", error)

    def _remember(self, request_id: str, position: int, lineage: str) -> None:
        if position >= self._last.get(request_id, (0, None))[0]:
            self._last[request_id] = (position, lineage)
            self._last.move_to_end(request_id)
            while len(self._last) > REMEMBERED:
                self._last.popitem(last=False)

    def _draft(self, written: Written) -> StateBundle:
        lineage, position = written.lineage, written.position
        return StateBundle(
            lineage=lineage.at(position).hex(),
            position=position,
            fingerprint=self._fingerprint,
            tenant=written.request.tenant if position > lineage.shared else "",  # shared by all
            schema=self._state.schema,
            recurrent=(),
            segments=(),
            anchor=lineage.block(position // self._block).hex(),
            parent=self._last.get(written.request.request_id, (0, None))[1],
        )

    def _jobs(self, group: int, lineage: Lineage, checkpoint: Checkpoint) -> list[tuple[Any, ExportPart]]:
        """Each shard's heads; the latents, which every shard of the group has, dealt out by segments."""
        actors, schema, position = self._shards.actors_of(group), self._state.schema, checkpoint.position
        heads = schema.heads // len(actors)
        name = checkpoint.lineage.hex()
        jobs = []
        for rank, actor in enumerate(actors):
            first, last = rank * heads, (rank + 1) * heads
            part = ExportPart(
                name=f"{name}-h{first}-{last}",
                nbytes=heads * schema.head_bytes,
                epoch=self._shards.epoch,
                heads=(first, last),
                slot=checkpoint.slot,
            )
            jobs.append((actor, part))
        for i, (start, stop) in enumerate(cuts(position, self._state.segment_tokens)):
            part = ExportPart(
                name=f"{lineage.at(stop).hex()}-t{start}",
                nbytes=(stop - start) * schema.token_bytes,
                epoch=self._shards.epoch,
                pages=checkpoint.pages[start // self._page_size : -(-stop // self._page_size)],
                start=start,
                stop=stop,
            )
            jobs.append((actors[i % len(actors)], part))
        return jobs


def cuts(position: int, segment_tokens: int) -> list[tuple[int, int]]:
    """[start, stop) of the segments up to `position`; the last may be an open tail."""
    return [(start, min(start + segment_tokens, position)) for start in range(0, position, segment_tokens)]
