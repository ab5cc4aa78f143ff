"""An engine that outlives its shards: the loop over a shard group, states in and out beside it, and recovery when the group is lost.

When a shard dies or hangs, the open requests are taken with what they generated, the group is formed again in place, a new loop starts, and
each request goes on from the best stored state. Who reads a stream sees a pause. Attempts are bounded; then every request fails with the
cause and `failure` says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.bundle_stats import BundleCounters, BundleStats
from deployments.spec import EngineSpec
from engine.bundle import StateBundle
from engine.errors import EngineFailure, K3Error, QueueFull, ReplicaLost, ShardLost
from engine.executor import Executor
from engine.lineage import Lineage
from engine.loop import Deliver, EngineLoop
from engine.retention import Written
from engine.stats import EngineStats
from engine.types import FinishReason, GenerateRequest, TokenChunk, usage

logger = logging.getLogger("ray.serve")
BACKOFF_S = 0.2  # before the second attempt of a recovery; doubles


class Group(Executor, Protocol):
    """An executor that can be formed again after it raised ShardLost."""

    bytes_loaded: list[int]  # by rank, when it was last formed
    replaced: int  # members so far
    on_lost: Callable[[ShardLost], None] | None  # called at once, also when nothing runs

    async def reform(self) -> None: ...


class States(Protocol):
    """States beside the loop: `deployments.exports` and `deployments.imports` joined."""

    def offer(self, loop: EngineLoop, group: int, written: Written) -> None: ...
    def worth_trying(self, request: GenerateRequest) -> bool: ...
    async def bring(self, loop: EngineLoop, group: int, request: GenerateRequest, lineage: Lineage) -> StateBundle | str | None: ...
    async def flush(self) -> None: ...
    def leave(self) -> None: ...


@dataclass(slots=True)
class _Moved:
    """A request between two loops."""

    request: GenerateRequest
    paused: bool
    phase: str = ""  # what it was doing when the group was lost; empty: it came meanwhile


class Supervisor:
    """Not thread-safe: everything is called on one event loop. `deliver` is that of `EngineLoop`; failures it gets are final."""

    def __init__(
        self,
        spec: EngineSpec,
        executor: Executor,
        *,
        deliver: Deliver,
        counters: BundleCounters,
        group: Group | None = None,
        states: States | None = None,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        """`group`: the executor again when it can be formed again. Call inside the running loop."""
        self._spec = spec
        self._executor = executor
        self._group = group
        self._states = states
        self._deliver = deliver
        self._counters = counters
        self._clock = clock
        self._backoff_s = backoff_s
        self._moved: dict[str, _Moved] = {}  # while there is no loop
        self._paused: set[str] = set()
        self._leaving: set[str] = set()  # requests that are being handed over
        self._bringing: set[str] = set()  # requests whose stored state is on its way
        self._attempts: deque[float] = deque()
        self._retired: list[EngineStats] = []  # of earlier loops, levels zero
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recovering = False
        self.failure: EngineFailure | None = None
        self._loop = self._start_loop()
        if group is not None:
            group.on_lost = self._lost

    # -- requests

    def submit(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest, QueueFull, EngineFailure. During a recovery the request waits for its end."""
        if self.failure is not None:
            raise self.failure
        if self._recovering:
            if len(self._moved) >= self._spec.engine.max_queued + self._spec.engine.max_running:
                raise QueueFull("the engine recovers from the loss of a shard")
            self._moved[request.request_id] = _Moved(request, False)
        else:
            self._begin(request)

    def cancel(self, request_id: str) -> None:
        moved = self._moved.pop(request_id, None)
        if moved is not None:
            self._deliver([_cancelled(moved.request)], {})
        else:
            self._loop.cancel(request_id)

    def pause(self, request_id: str) -> None:
        if request_id in self._moved:
            self._moved[request_id].paused = True
        else:
            self._paused.add(request_id)
            self._loop.pause(request_id)

    def resume(self, request_id: str) -> None:
        if request_id in self._moved:
            self._moved[request_id].paused = False
        else:
            self._paused.discard(request_id)
            self._loop.resume(request_id)

    def stats(self) -> EngineStats:
        now = self._loop.stats()
        return EngineStats.total([now, *self._retired], steps=sum(s.steps for s in self._retired) + now.steps, last=now.last)

    def bundle_stats(self) -> BundleStats:
        return self._counters.snapshot()

    async def drain(self) -> None:
        """Waits until every open request has ended."""
        await self._loop.drain()

    async def hand_over(self, patience_s: float) -> int:
        """This replica is being taken away: every open stream ends with ReplicaLost, its state stored, to go on elsewhere. How many.

        Nothing is accepted any more. `patience_s`: longest wait for the states to leave.
        """
        if self.failure is not None:
            return 0
        self.failure = gone = ReplicaLost("this engine replica is being taken away")
        self._fail_moved(gone)
        if self._recovering:
            return 0
        loop, states = self._loop, self._states
        self._leaving.update(request.request_id for request in loop.open_requests())
        for name in self._leaving:
            loop.pause(name)
        await loop.land()
        if states is not None:
            states.leave()
        for name in self._leaving:
            loop.cancel(name)  # its state becomes a checkpoint
        if states is not None:
            try:
                await asyncio.wait_for(states.flush(), patience_s)
            except TimeoutError:
                logger.warning("states were still on their way out after %g s", patience_s)
        left = dict.fromkeys(self._leaving, gone)
        self._deliver([], dict(left))
        return len(left)

    async def stop(self) -> None:
        """Ends at once; open requests fail with ReplicaLost. States on their way out are still taken in. Idempotent."""
        self.failure = self.failure or ReplicaLost("the engine was stopped")
        self._fail_moved(self.failure)
        await self._loop.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._states is not None:
            await self._states.flush()

    # -- inside

    def _start_loop(self) -> EngineLoop:
        spec = self._spec
        loop = EngineLoop(
            spec.engine,
            self._executor,
            groups=spec.shards.num_groups,
            fingerprint=spec.fingerprint,
            deliver=lambda chunks, failures: self._delivered(loop, chunks, failures),
            on_written=lambda group, written: self._written(loop, group, written),
        )
        loop.start()
        return loop

    def _begin(self, request: GenerateRequest) -> None:
        """Into the loop, held until the best stored state is there. Raises what the loop raises."""
        loop, states = self._loop, self._states
        if states is None or not states.worth_trying(request):
            loop.submit(request)
            return
        lineage = loop.lineage(request)
        group = loop.submit(request, lineage, held=True)
        self._spawn(self._bring(states, loop, group, request, lineage))

    async def _bring(self, states: States, loop: EngineLoop, group: int, request: GenerateRequest, lineage: Lineage) -> None:
        miss: str | None = "bug"
        self._bringing.add(request.request_id)
        try:
            outcome = await states.bring(loop, group, request, lineage)
            miss = outcome if isinstance(outcome, str) else None
        finally:
            self._bringing.discard(request.request_id)
            loop.release(request.request_id, miss)

    def _written(self, loop: EngineLoop, group: int, written: list[Written]) -> None:
        if self._states is not None:
            for checkpoint in written:
                self._states.offer(loop, group, checkpoint)

    def _delivered(self, loop: EngineLoop, chunks: list[TokenChunk], failures: dict[str, K3Error]) -> None:
        for chunk in chunks:
            if chunk.finish is not None:
                self._paused.discard(chunk.request_id)
                if chunk.finish is not FinishReason.CANCELLED:
                    self._leaving.discard(chunk.request_id)
        chunks = [chunk for chunk in chunks if not (chunk.request_id in self._leaving and chunk.finish)]
        recover = self._group is not None and self.failure is None and isinstance(loop.failure, ShardLost)
        if chunks or (failures and not recover):
            self._deliver(chunks, {} if recover else failures)
        if recover and not self._recovering:
            self._recovering = True
            self._moved = {r.request_id: _Moved(r, r.request_id in self._paused, self._phase(r)) for r in loop.open_requests()}
            self._spawn(self._recover(loop))
        elif loop.failure is not None and not recover:
            self.failure = self.failure or loop.failure

    def _phase(self, request: GenerateRequest) -> str:
        if request.request_id in self._bringing:
            return "import"
        return "decode" if request.generated else "prefill"

    def _lost(self, error: ShardLost) -> None:
        """The group says so itself, maybe while nothing runs."""
        self._loop.abort(error)

    async def _recover(self, lost: EngineLoop) -> None:
        assert self._group is not None
        begin, wait = self._clock(), self._backoff_s
        error: EngineFailure = lost.failure or ShardLost("the shard group was lost")
        while True:
            if not self._may_try():
                self._give_up(error)
                return
            try:
                before = self._group.replaced
                await self._group.reform()
                break
            except K3Error as failed:
                self._counters.recoveries_failed += 1
                logger.warning("the shard group could not be formed again: %s", failed)
                error = ShardLost(str(failed))
                await asyncio.sleep(wait)
                wait *= 2
            finally:
                self._counters.shards_replaced += self._group.replaced - before
        await lost.stop()
        self._retired.append(lost.stats().without_levels())
        self._loop = self._start_loop()
        self._recovering = False
        self._counters.recoveries += 1
        self._counters.recovery_seconds += self._clock() - begin
        self._counters.weights_reread_bytes += sum(self._group.bytes_loaded)
        moved, self._moved = self._moved, {}
        self._counters.requests_moved.update(m.phase for m in moved.values() if m.phase)
        logger.info("recovered in %.1f s; %d requests go on", self._clock() - begin, len(moved))
        for name, m in moved.items():
            try:
                self._begin(m.request)
            except K3Error as refusal:
                self._deliver([], {name: refusal})
                continue
            if m.paused:
                self._loop.pause(name)

    def _may_try(self) -> bool:
        now, limits = self._clock(), self._spec.recovery
        while self._attempts and now - self._attempts[0] > limits.window_s:
            self._attempts.popleft()
        if len(self._attempts) >= limits.attempts:
            return False
        self._attempts.append(now)
        return True

    def _give_up(self, error: EngineFailure) -> None:
        limits = self._spec.recovery
        self.failure = ShardLost(f"{limits.attempts} recoveries within {limits.window_s:g} s are used up; last: {error}")
        logger.error("%s", self.failure)
        self._fail_moved(self.failure)

    def _fail_moved(self, error: EngineFailure) -> None:
        moved, self._moved = self._moved, {}
        if moved:
            self._deliver([], dict.fromkeys(moved, error))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("a task of the engine failed", exc_info=error)
        if self._recovering:
            self._give_up(ShardLost(f"the recovery failed: {type(error).__name__}: {error}"))


def _cancelled(request: GenerateRequest) -> TokenChunk:
    told = usage(request, len(request.generated), request.admitted)
    return TokenChunk(request_id=request.request_id, finish=FinishReason.CANCELLED, usage=told)
