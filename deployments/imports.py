"""Stored states into the shards: the longest bundle that fits a request, checked, into a reservation; else the reason why not.

Nothing here can make a stream wrong: a bundle must be of the model's fingerprint and schema, of exactly the request's tokens, whole, and
every object must match its digest before it becomes a checkpoint. Whatever fails is discarded, and the tokens are computed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import ray

from cluster.bundle_index import Found
from cluster.holder import Fetched
from deployments.bundle_stats import BundleCounters
from deployments.exports import Shards
from deployments.spec import EngineSpec, StateSpec
from engine.bundle import StateBundle
from engine.errors import DurableError, EngineFailure
from engine.lineage import Lineage
from engine.loop import EngineLoop
from engine.session import BundleAt
from engine.types import GenerateRequest

logger = logging.getLogger("ray.serve")
TRIES = 3  # bundles tried for one request


class Tier(Protocol):
    async def find(self, anchors: list[str], tenant: str, session: str | None) -> list[Found]: ...
    async def fetch(self, found: Found, timeout_s: float) -> tuple[Fetched, str] | None: ...


class Importer:
    def __init__(self, spec: EngineSpec, state: StateSpec, shards: Shards, tier: Tier, counters: BundleCounters) -> None:
        self._fingerprint = spec.fingerprint
        self._block = spec.engine.block_size
        self._checkpoint_every = spec.engine.checkpoint_decode_interval
        self._state = state
        self._shards = shards
        self._tier = tier
        self._counters = counters

    def worth_trying(self, request: GenerateRequest) -> bool:
        """Whether there are tokens enough to look for a state."""
        known = len(request.prompt) + len(request.generated)
        return known > max(self._block, self._least(request)) and request.sampling.prompt_logprobs is None

    async def bring(self, loop: EngineLoop, group: int, request: GenerateRequest, lineage: Lineage) -> StateBundle | str | None:
        """The bundle that is now a checkpoint of the group; else the reason why none is; None when none was wanted or known."""
        epoch, have = self._shards.epoch, loop.match(group, lineage)
        limit = len(lineage) - 1  # a resume consumes at least one token
        if limit - have < self._least(request):
            return None
        anchors = [lineage.block(i).hex() for i in range(limit // self._block, have // self._block - 1, -1) if i]
        try:
            found = await self._tier.find(anchors, request.tenant, request.session)
        except EngineFailure:
            return self._miss("store_down")
        fitting = [f for f in found if have < f.at.position <= limit and lineage.at(f.at.position).hex() == f.at.lineage]
        reason: str | None = None
        for candidate in [*fitting[:TRIES], *self._guesses(request, lineage, fitting)]:
            if candidate.at.position - have < self._least(request):
                continue
            self._counters.imports_running += 1
            try:
                outcome = await self._restore(loop, group, lineage, candidate, epoch)
            finally:
                self._counters.imports_running -= 1
            if isinstance(outcome, StateBundle):
                return outcome
            if candidate.guess and outcome == "lost":
                continue
            reason = reason or outcome
            self._miss(outcome)
        return reason

    def _guesses(self, request: GenerateRequest, lineage: Lineage, known: list[Found]) -> list[Found]:
        """Where a moved stream left states by rule, for the durable tier: a node's loss can take those along who knew of them."""
        if self._state.durable_url is None or not request.generated:
            return []
        every, prompt_end = self._checkpoint_every, len(request.prompt) - 1
        positions = [*range((len(lineage) - 1) // every * every, prompt_end, -every)[:TRIES], prompt_end]
        told = {f.at.position for f in known}
        return [Found(BundleAt(position=p, lineage=lineage.at(p).hex()), (), guess=True) for p in positions if p and p not in told]

    def _least(self, request: GenerateRequest) -> int:
        """Tokens that an import must save. Of a session every block counts: its state is near and will be asked for again."""
        return self._block if request.session is not None else self._state.stake_tokens

    async def _restore(self, loop: EngineLoop, group: int, lineage: Lineage, candidate: Found, epoch: int) -> StateBundle | str:
        begin, timeout = time.monotonic(), self._state.import_timeout_s
        try:
            got = await self._tier.fetch(candidate, timeout)
        except DurableError as error:
            logger.warning("bundle %s: %s", candidate.at.lineage, error)
            return "digest" if "digest" in str(error) else "durable_failed"
        except (EngineFailure, ValueError, ray.exceptions.RayError) as error:
            logger.warning("bundle %s: %s", candidate.at.lineage, error)
            return "store_full" if isinstance(error, EngineFailure) else "unreadable"
        if got is None:
            return "lost"
        fetched, _ = got
        bundle = fetched.bundle
        if (bundle.lineage, bundle.position) != (candidate.at.lineage, candidate.at.position):
            return "wrong_lineage"
        if (fault := bundle.fault(self._fingerprint, self._state.schema)) is not None:
            logger.warning("bundle %s: %s", bundle.lineage, fault)
            return fault.partition(":")[0]
        if any(meta.name not in fetched.refs for meta in bundle.objects):
            return "incomplete"
        taken = await loop.reserve(group, bundle.position)
        if taken is None:
            return "no_room"
        whole = False
        try:
            if self._shards.epoch != epoch or loop.failure is not None:
                return "stale"
            args = (epoch, bundle, fetched.refs, taken.slot, taken.pages, timeout)
            restores = [_outcome(actor.restore.remote(*args)) for actor in self._shards.actors_of(group)]
            faults = [fault for fault in await asyncio.gather(*restores) if fault is not None]
            if faults:
                return faults[0]
            whole = True
        finally:
            if whole:
                loop.commit(group, taken, lineage, fetched.source)
            else:
                loop.discard(group, taken)
        self._counters.imports[fetched.source] += 1
        self._counters.imported_bytes += bundle.nbytes
        self._counters.imported_tokens += bundle.position
        self._counters.import_seconds += time.monotonic() - begin
        return bundle

    def _miss(self, reason: str) -> str:
        self._counters.import_misses[reason] += 1
        return reason


async def _outcome(call: object) -> str | None:
    """A shard's word. All are awaited before a reservation is given back: nobody may write into it afterwards."""
    try:
        return await call  # type: ignore[misc]
    except ray.exceptions.RayError:
        return "shard_lost"
