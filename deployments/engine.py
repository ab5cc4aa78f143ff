"""`EngineReplica`: one supernode's (or node's, or laptop's) engine behind Serve. Decides; imports no torch.

A request is one long unary call of `generate` that returns its `Usage`: Serve counts, queues, drains and cancels it. Its tokens
leave by the token channel, one message a step for all requests of an ingress. Errors of ours are returned as values, so that a
refusal costs no traceback in the logs and arrives with its fields. What a lost shard means is the business of `deployments.supervisor`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.util import get_current_placement_group

from cluster.holder import HolderStats
from deployments.bundle_stats import BundleCounters, BundleStats
from deployments.shard_group import ShardGroup
from deployments.spec import EngineSpec
from deployments.states import BundleTraffic
from deployments.supervisor import Supervisor
from deployments.tier import StateTier
from deployments.token_channel import Control, ControlKind, StreamAddress, TokenSender
from engine.errors import K3Error
from engine.executor import Executor
from engine.stats import EngineStats
from engine.types import GenerateRequest, TokenChunk, Usage

logger = logging.getLogger("ray.serve")
HELLO_S = 0.02
WATCH_S = 2.0  # between looks at whether this replica is still wanted
MISSED = 2  # looks in a row that did not find it
HAND_OVER_S = 15.0  # longest wait of streams for their states to leave
FLUSH_S = 15.0  # longest time that a replica which is told to end gives to the states it still has


@dataclass(slots=True)
class _Open:
    """A request between its call and its last chunk."""

    address: StreamAddress
    done: asyncio.Future[Usage | K3Error]
    hello: asyncio.TimerHandle  # shows an ingress that has heard nothing yet whom to send controls


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself to `/health` and `/metrics`."""

    replica: str
    stats: EngineStats
    bundles: BundleStats
    holder: HolderStats | None  # of its node; None: no state tier, or it does not answer
    failure: str | None


class EngineReplica:
    """Serve deployment. `executor` is injected by tests and benchmarks; otherwise the replica starts its own shards."""

    async def __init__(self, spec: EngineSpec, executor: Executor | None = None) -> None:  # type: ignore[misc]  # Serve awaits it
        self._spec = spec
        self._open: dict[str, _Open] = {}  # by request id
        self._by_stream: dict[str, str] = {}  # stream id → request id
        self._group = None if executor else await ShardGroup.start(spec.shards, get_current_placement_group())
        self._sender = TokenSender(self._on_control)
        self._tier: StateTier | None = None
        self._holder: HolderStats | None = None
        counters, states = BundleCounters(), None
        if self._group is not None and spec.state is not None:
            self._tier = StateTier(spec.state)
            await self._tier.ready()
            states = BundleTraffic.start(spec, spec.state, self._group, self._tier, counters)
        self._counters = counters
        self._watching = asyncio.create_task(self._watch()) if self._group is not None else None
        work = executor or self._group
        assert work is not None
        self._engine = Supervisor(spec, work, deliver=self._deliver, counters=counters, group=self._group, states=states)

    async def generate(self, request: GenerateRequest, address: StreamAddress) -> Usage | K3Error:
        """Runs one request to its end; tokens go to `address`. Cancelling the call cancels the request."""
        if self._engine.failure is not None:
            return self._engine.failure
        loop = asyncio.get_running_loop()
        hello = [(address, TokenChunk(request_id=request.request_id))]
        entry = _Open(address, loop.create_future(), loop.call_later(HELLO_S, self._sender.send, hello))
        self._open[request.request_id] = entry
        self._by_stream[address.stream] = request.request_id
        try:
            self._engine.submit(request)
            return await entry.done
        except K3Error as error:
            return error
        except asyncio.CancelledError:
            self._engine.cancel(request.request_id)
            raise
        finally:
            entry.hello.cancel()
            self._open.pop(request.request_id, None)
            self._by_stream.pop(address.stream, None)

    async def report(self) -> ReplicaReport:
        failure = self._engine.failure
        await self._look_at_holder()
        return ReplicaReport(
            replica=serve.get_replica_context().replica_id.unique_id,
            stats=self._engine.stats(),
            bundles=self._engine.bundle_stats(),
            holder=self._holder,
            failure=str(failure) if failure else None,
        )

    async def name(self) -> str:
        return serve.get_replica_context().replica_id.unique_id

    async def shard_pids(self) -> list[int]:
        return await self._group.pids() if self._group else []

    async def check_health(self) -> None:
        """Serve replaces a replica whose group is lost for good."""
        if self._engine.failure is not None:
            raise self._engine.failure

    async def drain(self) -> None:
        """Waits until every request has ended."""
        await self._engine.drain()

    async def __del__(self) -> None:  # what Serve calls when a replica ends
        await self.close()

    async def close(self) -> None:
        """Ends everything; states on their way out get FLUSH_S."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            await asyncio.wait_for(self._engine.stop(), FLUSH_S)
        except TimeoutError:
            logger.warning("states were still on their way out after %g s", FLUSH_S)
        if self._group:
            await self._group.close()
        await self._sender.close()

    async def _watch(self) -> None:
        """Hands the streams over when Serve takes this replica away.

        Serve has no word for that: it sends no more requests, waits for those that run, and kills what still runs after a while. So the
        replica asks all replicas for their names, as a caller would, and is on its way out when it is not among them any more.
        """
        me, seen, missed = serve.get_replica_context(), False, 0
        all_replicas = serve.get_deployment_handle(me.deployment, me.app_name)
        while missed < MISSED:
            await asyncio.sleep(WATCH_S)
            try:
                names = await asyncio.wait_for(all_replicas.broadcast("name").results_async(), WATCH_S)
            except DeploymentUnavailableError:
                names = []
            except Exception:
                continue  # nobody can say
            here = me.replica_id.unique_id in names
            seen = seen or here
            missed = 0 if here else missed + seen
        moved = await self._engine.hand_over(HAND_OVER_S)
        logger.info("this replica is being taken away: %d streams go on elsewhere", moved)

    async def _look_at_holder(self) -> None:
        """Its figures; and what died with it when it is not the one that was there before."""
        if self._tier is None:
            return
        try:
            now = await self._tier.holder_stats()
        except (ray.exceptions.RayError, TimeoutError):
            return
        if self._holder is not None and now.started != self._holder.started:
            self._counters.bundles_lost += self._holder.not_durable
        self._holder = now

    def _deliver(self, chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        """Called after each step."""
        batch = []
        for chunk in chunks:
            if entry := self._open.get(chunk.request_id):
                entry.hello.cancel()
                batch.append((entry.address, chunk))
        for address in self._sender.send(batch) if batch else ():
            self._cancel(address.stream)
        for chunk in chunks:
            entry = self._open.get(chunk.request_id)
            if entry and chunk.finish is not None and not entry.done.done():
                entry.done.set_result(chunk.usage or Usage(prompt_tokens=0))
        for request_id, error in failures.items():
            entry = self._open.get(request_id)
            if entry and not entry.done.done():
                entry.done.set_result(error)

    def _on_control(self, control: Control) -> None:
        request_id = self._by_stream.get(control.stream)
        if request_id is None:
            return
        match control.kind:
            case ControlKind.CANCEL:
                self._cancel(control.stream)
            case ControlKind.PAUSE:
                self._engine.pause(request_id)
            case ControlKind.RESUME:
                self._engine.resume(request_id)

    def _cancel(self, stream: str) -> None:
        request_id = self._by_stream.get(stream)
        if request_id is not None:
            self._engine.cancel(request_id)
