"""The session store and the state holders as the ingress sees them: detached actors that may be restarted at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray

from app.config import ServiceConfig
from app.session_file import Arrays
from cluster.holder_actors import NAMESPACE, holder_name, node_holder
from cluster.sessions import session_store
from engine.bundle import StateBundle
from engine.errors import EngineFailure, K3Error
from engine.session import BundleAt, SessionRecord, TurnEnd

logger = logging.getLogger("ray.serve")
TRIES = 20  # of a call to an actor that is being restarted
PAUSE_S = 0.25
ANSWER_S = 10.0  # a store that does not answer within this is not there


class SessionStoreDown(EngineFailure):
    """The session store does not answer. Requests without a session go on."""


class SessionActor:
    """`app.turn.Sessions` over the store's actor."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def from_config(cls, config: ServiceConfig) -> SessionActor:
        return cls(session_store(config.store_ttl_s, config.durable_url, config.durable_endpoint_url))

    async def begin(self, tenant: str, session: str, owner: str, lease_s: float) -> SessionRecord:
        return await _patiently(self._store.begin, tenant, session, owner, lease_s)

    async def renew(self, tenant: str, session: str, owner: str, lease_s: float) -> bool:
        return await _patiently(self._store.renew, tenant, session, owner, lease_s)

    async def finish(
        self,
        tenant: str,
        session: str,
        owner: str,
        *,
        tokens: bytes,
        messages: bytes,
        cost: float,
        ends: Sequence[TurnEnd] = (),
        rendering: str = "",
    ) -> bool:
        outcome = {"tokens": tokens, "messages": messages, "cost": cost, "ends": tuple(ends), "rendering": rendering}
        return await _patiently(self._store.finish, tenant, session, owner, **outcome)

    async def remember(self, tenant: str, session: str, owner: str, asked: bytes) -> bool:
        return await _patiently(self._store.remember, tenant, session, owner, asked)

    async def abandon(self, tenant: str, session: str, owner: str) -> None:
        await _patiently(self._store.abandon, tenant, session, owner)

    async def get(self, tenant: str, session: str) -> SessionRecord:
        return await _patiently(self._store.get, tenant, session)

    async def list(self, tenant: str, limit: int = 100) -> list[SessionRecord]:
        return await _patiently(self._store.list, tenant, limit)

    async def create(self, record: SessionRecord) -> None:
        await _patiently(self._store.create, record)

    async def fork(self, tenant: str, session: str, new: str, mark: str | None = None) -> SessionRecord:
        return await _patiently(self._store.fork, tenant, session, new, mark)

    async def mark(self, tenant: str, session: str, name: str) -> SessionRecord:
        return await _patiently(self._store.mark, tenant, session, name)

    async def pin(self, tenant: str, session: str, pinned: bool) -> SessionRecord:
        return await _patiently(self._store.pin, tenant, session, pinned)

    async def attach(self, tenant: str, session: str, at: BundleAt) -> None:
        await _patiently(self._store.attach, tenant, session, at)

    async def delete(self, tenant: str, session: str) -> SessionRecord:
        return await _patiently(self._store.delete, tenant, session)


class HolderBundles:
    """`app.session_desk.BundlePort` over the state holders; what is written goes to the holder of this node."""

    def __init__(self, config: ServiceConfig) -> None:
        node = ray.get_runtime_context().get_node_id()
        self._local = holder_name(node)
        self._holder = node_holder(
            node,
            budget_bytes=int(config.store_bytes),
            ttl_s=config.store_ttl_s,
            durable_url=config.durable_url,
            endpoint_url=config.durable_endpoint_url,
        )
        self._store = session_store(config.store_ttl_s, config.durable_url, config.durable_endpoint_url)

    async def read(self, lineage: str) -> tuple[StateBundle, Arrays] | None:
        """None when no holder has it whole."""
        names = (await _patiently(self._store.where, [lineage])).get(lineage, ())
        for name in (*names, *([] if self._local in names else [self._local])):
            try:
                holder = ray.get_actor(name, namespace=NAMESPACE)
                fetched = await _value(holder.fetch.remote(lineage))
                if fetched is None or any(meta.name not in fetched.refs for meta in fetched.bundle.objects):
                    continue
                return fetched.bundle, {meta.name: await _value(fetched.refs[meta.name][0]) for meta in fetched.bundle.objects}
            except (ray.exceptions.RayError, ValueError):
                continue  # another holder, or none, has it
        return None

    async def mirror(self, lineage: str) -> None:
        """A second copy on another node, if there is one."""
        for name in (await _patiently(self._store.where, [lineage])).get(lineage, ()):
            try:
                mirrored = await _value(ray.get_actor(name, namespace=NAMESPACE).mirror.remote(lineage))
            except (ray.exceptions.RayError, ValueError) as error:
                logger.warning("%s made no mirror of %s: %s", name, lineage, error)
                continue  # another holder may have it
            if mirrored is not None:
                await _patiently(self._store.register, *mirrored)
            return

    async def write(self, bundle: StateBundle, arrays: Arrays) -> None:
        await _patiently(self._holder.put, bundle, arrays)
        await _patiently(self._store.register, bundle, self._local)


async def _patiently(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls again while the actor is being restarted. Raises what the actor raised; SessionStoreDown when it does not come back."""
    for _ in range(TRIES):
        try:
            return await asyncio.wait_for(_value(method.remote(*args, **kwargs)), ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, K3Error):
                raise error.cause from None
            raise EngineFailure(f"the session store failed: {type(error.cause).__name__}") from error
        except TimeoutError:
            break
        except ray.exceptions.RayActorError:
            await asyncio.sleep(PAUSE_S)
    raise SessionStoreDown("the session store does not answer; requests without a session go on")


async def _value(ref: Any) -> Any:
    return await ref
