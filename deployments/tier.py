"""The state tier as one replica sees it: the holder of its node, every other holder by name, the session store.

All of them are detached actors that may die at any time and come back; so every call is bounded, retried only where that is harmless, and a
tier that does not answer is left alone for a while: no request waits for it twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from cluster.bundle_index import Found
from cluster.holder import Fetched, HolderStats
from cluster.holder_actors import NAMESPACE, holder_name, node_holder
from cluster.sessions import session_store
from deployments.spec import StateSpec
from engine.bundle import ExportPart, StateBundle
from engine.errors import EngineFailure
from engine.session import BundleAt

logger = logging.getLogger("ray.serve")
READY_S = 60.0  # longest wait at start
LOOKUP_S = 2.0  # longest wait for a name
REST_S = 5.0  # how long a tier that did not answer is left alone
TRIES = 20  # of a call to an actor that is being restarted
PAUSE_S = 0.25


class TierDown(EngineFailure):
    """A holder or the session store does not answer."""


class StateTier:
    """Create inside the replica's event loop, in a Ray process."""

    def __init__(self, spec: StateSpec) -> None:
        self._spec = spec
        self._node = ray.get_runtime_context().get_node_id()
        self.local = holder_name(self._node)
        self._holders: dict[str, Any] = {self.local: self._make(self._node)}
        self._store = session_store(spec.ttl_s, spec.durable_url, spec.durable_endpoint_url)
        self._resting_until = 0.0

    async def ready(self) -> None:
        """Waits for the actors to be up, but not for ever: a replica serves without its tier rather than not at all."""
        calls = [_value(self._store.stats.remote()), *(_value(h.stats.remote()) for h in self._holders.values())]
        try:
            await asyncio.wait_for(asyncio.gather(*calls), READY_S)
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.error("the state tier is not up after %g s: %s", READY_S, type(error).__name__)

    async def take(self, draft: StateBundle, jobs: list[tuple[Any, ExportPart]]) -> StateBundle:
        """Has this node's holder pull a bundle from the shards. Raises StoreFull, TierDown; what the shards raise."""
        return await self._patiently(self._holders[self.local].take, draft, jobs)

    async def announce(self, bundle: StateBundle, tenant: str, session: str | None) -> bool:
        """Lets others find a bundle that this node's holder has, and the session remember it. Whether that is pinned. Raises TierDown."""
        if session is None:
            await self._patiently(self._store.register, bundle, self.local)
            return False
        at = BundleAt(position=bundle.position, lineage=bundle.lineage)
        pinned = await self._patiently(self._store.attach, tenant, session, at)
        if pinned is None:  # deleted meanwhile: nothing of it stays
            await self._patiently(self._holders[self.local].drop, bundle.lineage)
            return False
        await self._patiently(self._store.register, bundle, self.local)
        return bool(pinned)

    async def mirror(self, bundle: StateBundle) -> None:
        """A copy on another node, if there is one. Raises TierDown, StoreFull."""
        mirrored = await self._patiently(self._holders[self.local].mirror, bundle.lineage)
        if mirrored is not None:
            await self._patiently(self._store.register, *mirrored)

    async def find(self, anchors: list[str], tenant: str, session: str | None) -> list[Found]:
        """Bundles that may fit. Raises TierDown."""
        if time.monotonic() < self._resting_until:
            raise TierDown("the session store did not answer a moment ago")
        try:
            return list(await asyncio.wait_for(_value(self._store.find.remote(anchors, tenant, session)), LOOKUP_S))
        except (TimeoutError, ray.exceptions.RayError) as error:
            self._resting_until = time.monotonic() + REST_S
            raise TierDown(f"the session store does not answer: {type(error).__name__}") from None

    async def fetch(self, found: Found, timeout_s: float) -> tuple[Fetched, str] | None:
        """A bundle's manifest and refs, from the nearest holder that has it, else from the durable tier; with the holder's name.

        Raises DurableError for a durable tier that failed.
        """
        others = [name for name in found.holders if name != self.local]
        last = [self.local] if self.local not in found.holders else []  # it looks into the durable tier too
        for name in [*([] if last else [self.local]), *others, *last]:
            try:
                holder = self._holders.get(name) or ray.get_actor(name, namespace=NAMESPACE)
                fetched = await asyncio.wait_for(_value(holder.fetch.remote(found.at.lineage)), timeout_s)
            except (TimeoutError, ValueError, ray.exceptions.RayActorError):
                fetched = None
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            if fetched is not None:
                return fetched, name
            if name in found.holders:
                self._store.forget.remote(found.at.lineage, name)
        return None

    async def holder_stats(self) -> HolderStats:
        """Of this node's holder. Raises RayError, TimeoutError."""
        return await asyncio.wait_for(_value(self._holders[self.local].stats.remote()), LOOKUP_S)

    async def flush(self) -> None:
        """Waits until this node's holder has written what it has to the durable tier."""
        await _value(self._holders[self.local].flush.remote())

    def _make(self, node: str) -> Any:
        s = self._spec
        return node_holder(node, budget_bytes=s.store_bytes, ttl_s=s.ttl_s, durable_url=s.durable_url, endpoint_url=s.durable_endpoint_url)

    async def _patiently(self, method: Any, *args: Any) -> Any:
        """Calls again while the actor is being restarted."""
        for _ in range(TRIES):
            try:
                return await method.remote(*args)
            except ray.exceptions.ActorUnavailableError as error:
                last = error
                await asyncio.sleep(PAUSE_S)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
        raise TierDown(f"a state actor was not back after {TRIES * PAUSE_S:g} s: {type(last).__name__}")


async def _value(ref: Any) -> Any:
    return await ref
