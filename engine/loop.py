"""The asyncio loop that drives the schedulers of all data-parallel groups in lockstep and one `Executor`.

At most `run_ahead` steps are submitted beyond the one whose result is awaited. The loop sleeps when there is nothing to do,
checks every owner's books when that lasts, and ends at the first failure: every open request is told, and nothing is accepted any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from engine.cache import Taken
from engine.config import EngineConfig
from engine.errors import EngineFailure, InvalidRequest, K3Error, QueueFull, ReplicaLost, ShardLost
from engine.executor import Executor
from engine.lineage import Lineage
from engine.plan import StepPlan, StepResult
from engine.prefix import Checkpoint
from engine.retention import Written
from engine.routing import Candidate, rank
from engine.scheduler import Scheduler
from engine.stats import EngineStats, StepStats
from engine.types import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)

Deliver = Callable[[list[TokenChunk], dict[str, K3Error]], None]
OnWritten = Callable[[int, list[Written]], None]

# Idle seconds before the books are checked: that takes milliseconds for a large pool, which the next request of a brisk client would wait.
CHECK_AFTER_S = 1.0

_SESSIONS = 1 << 16  # sessions whose group is remembered


class EngineLoop:
    """Not thread-safe: everything is called on the event loop that `start` was called on.

    `deliver(chunks, failures)` gets the chunks of one step, all requests together, and the requests that failed. Every accepted
    request gets exactly one end: a chunk with `finish`, or a failure. It may call `cancel`, `pause` and `resume`.
    A failure of the engine itself is delivered even when nothing is open.
    `on_written(group, checkpoints)` hears of checkpoints that may be pinned from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        deliver: Deliver,
        on_written: OnWritten | None = None,
        groups: int = 1,
        fingerprint: str = "",
        check_after_s: float = CHECK_AFTER_S,
    ) -> None:
        self._executor = executor
        self._deliver = deliver
        self._on_written = on_written
        self._run_ahead = config.run_ahead
        self._check_after_s = check_after_s
        self.schedulers = tuple(Scheduler(config, fingerprint) for _ in range(groups))
        self._group_of: dict[str, int] = {}  # open request -> group
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._ended: list[TokenChunk] = []  # last chunks that no step brings
        self._submitted: deque[tuple[StepPlan, asyncio.Task[StepResult]]] = deque()
        self._steps = 0
        self._last: StepStats | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._task: asyncio.Task[None] | None = None
        self.failure: EngineFailure | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine loop")

    async def stop(self) -> None:
        """Ends the loop at once; open requests fail with ReplicaLost. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(ReplicaLost("the engine was stopped"))

    def abort(self, error: EngineFailure) -> None:
        """The executor is lost: ends the loop as its next step would. Idempotent."""
        self._fail(error)
        if self._task is not None:
            self._task.cancel()

    async def drain(self) -> None:
        """Accepts nothing more and waits until every open request has ended."""
        self._draining = True
        await self._idle.wait()

    # -- requests

    def submit(self, request: GenerateRequest, lineage: Lineage | None = None, *, held: bool = False) -> int:
        """Queues a request in the best group; returns which. `held`: it runs after `release`.

        Raises InvalidRequest, QueueFull, EngineFailure.
        """
        if self.failure is not None:
            raise self.failure
        if self._draining:
            raise ReplicaLost("the engine is draining")
        if request.request_id in self._group_of:
            raise InvalidRequest(f"request {request.request_id} is open already", param="request_id")
        refusal: QueueFull | None = None
        lineage = lineage or self.lineage(request)
        for group in self._ranking(request, lineage):
            try:
                ended = self.schedulers[group].add(request, lineage, held=held)
            except QueueFull as error:
                refusal = error
                continue
            if request.session is not None:
                self._remember(request.session, group)
            self._idle.clear()
            self._wake.set()
            if ended is not None:
                self._ended.append(ended)
            else:
                self._group_of[request.request_id] = group
            return group
        assert refusal is not None
        raise refusal

    def cancel(self, request_id: str) -> None:
        """Ends a request; its last chunk says `cancelled`. Nothing happens when it is not open."""
        group = self._group_of.pop(request_id, None)
        if group is not None and (chunk := self.schedulers[group].cancel(request_id)):
            self._tell_written(group)
            self._ended.append(chunk)
            self._wake.set()

    def pause(self, request_id: str) -> None:
        """Computes no more of its tokens until `resume`; what is on its way is still delivered."""
        if (group := self._group_of.get(request_id)) is not None:
            self.schedulers[group].pause(request_id)

    def resume(self, request_id: str) -> None:
        if (group := self._group_of.get(request_id)) is not None:
            self.schedulers[group].resume(request_id)
            self._wake.set()

    def lineage(self, request: GenerateRequest) -> Lineage:
        """The request's tokens, hashed as every group of every engine of this model names them."""
        return self.schedulers[0].lineage(request)

    def match(self, group: int, lineage: Lineage) -> int:
        """Tokens that a request of this lineage could skip in a group now."""
        return self.schedulers[group].match(lineage)

    def release(self, request_id: str, miss: str | None = None) -> None:
        """Lets a held request run; `miss`: why no stored state came for it."""
        if (group := self._group_of.get(request_id)) is not None:
            self.schedulers[group].release(request_id, miss)
            self._wake.set()

    def open_requests(self) -> list[GenerateRequest]:
        """All of them with what they generated, as another engine would continue them. Also after a failure."""
        return [request for scheduler in self.schedulers for request in scheduler.open_requests()]

    # -- states that leave and come, beside the steps

    def pin(self, group: int, lineage: bytes) -> Checkpoint | None:
        """A checkpoint of a group, unchanged until `unpin`; None when it was evicted."""
        return self.schedulers[group].cache.pin(lineage)

    def unpin(self, group: int, checkpoint: Checkpoint) -> None:
        self.schedulers[group].cache.unpin(checkpoint)
        self._wake.set()  # there may be room now

    async def reserve(self, group: int, position: int) -> Taken | None:
        """A slot and pages to restore a state of `position` tokens into; None when there is no room. End it with `commit` or `discard`.

        Returns when every step has landed that could still use what the reservation was given.
        """
        taken = self.schedulers[group].cache.reserve_import(position)
        if taken is not None and self._submitted:
            await asyncio.wait([task for _, task in self._submitted])
        return taken

    def commit(self, group: int, taken: Taken, lineage: Lineage, source: str) -> None:
        """The reservation holds a whole, checked state of that lineage."""
        self.schedulers[group].cache.commit(taken, lineage, source)
        self._wake.set()

    def discard(self, group: int, taken: Taken) -> None:
        self.schedulers[group].cache.discard(taken)
        self._wake.set()

    async def land(self) -> None:
        """Returns when no step is on its way; pause what is open first, or more will be."""
        while self._submitted and self.failure is None:
            await asyncio.wait([task for _, task in self._submitted])
            await asyncio.sleep(0)  # the loop takes the result

    def stats(self) -> EngineStats:
        return EngineStats.total([s.stats() for s in self.schedulers], steps=self._steps, last=self._last)

    def _ranking(self, request: GenerateRequest, lineage: Lineage) -> list[int]:
        if len(self.schedulers) == 1:
            return [0]
        home = self._sessions.get(request.session) if request.session is not None else None
        candidates = [
            Candidate(name=str(i), has_session=i == home, prefix=s.match(lineage), load=s.load, full=s.full)
            for i, s in enumerate(self.schedulers)
        ]
        return rank(candidates, request.session)

    def _remember(self, session: str, group: int) -> None:
        self._sessions[session] = group
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)

    # -- the loop

    async def _run(self) -> None:
        try:
            while True:
                self._flush()
                while len(self._submitted) <= self._run_ahead and self._submit_step():
                    pass
                if self._submitted:
                    await self._take_result()
                else:
                    await self._sleep()
        except EngineFailure as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the engine loop failed")
            self._fail(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
        finally:
            tasks = [task for _, task in self._submitted]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _submit_step(self) -> bool:
        """Plans one step of all groups; False when none has anything to do."""
        plans = tuple([s.schedule() for s in self.schedulers])
        if all(plan.empty for plan in plans):
            return False
        plan = StepPlan(step=self._steps, groups=plans)
        self._steps += 1
        self._submitted.append((plan, asyncio.create_task(self._execute(plan))))
        return True

    async def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return await self._executor.run(plan)
        except EngineFailure:
            raise
        except Exception as error:
            raise ShardLost(f"step {plan.step} failed: {type(error).__name__}: {error}") from error

    async def _take_result(self) -> None:
        plan, task = self._submitted[0]
        result = await task
        self._submitted.popleft()
        if result.step != plan.step:
            raise ShardLost(f"the result of step {result.step} came, that of step {plan.step} was awaited")
        chunks: list[TokenChunk] = []
        for i, (scheduler, group_plan, group_result) in enumerate(zip(self.schedulers, plan.groups, result.groups, strict=True)):
            if not group_plan.empty:
                chunks += scheduler.apply(group_result)
                self._tell_written(i)
        self._last = StepStats(
            step=plan.step,
            rows=sum(len(g.rows) for g in plan.groups),
            tokens=plan.num_tokens,
            sampled=sum(len(c.token_ids) for c in chunks),
            seconds=result.seconds,
        )
        for chunk in chunks:
            if chunk.finish is not None:
                del self._group_of[chunk.request_id]
        if chunks:
            self._deliver(chunks, {})

    def _tell_written(self, group: int) -> None:
        if (written := self.schedulers[group].take_written()) and self._on_written:
            self._on_written(group, written)

    def _flush(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            self._deliver(ended, {})

    async def _sleep(self) -> None:
        """Until something happens. What is open, if anything, is paused, held, or without room beside what is pinned."""
        if self._ended:
            return
        if not self._group_of:
            self._idle.set()
        self._wake.clear()
        try:
            async with asyncio.timeout(self._check_after_s):  # not wait_for: it swallows a cancellation that meets a wake-up
                await self._wake.wait()
        except TimeoutError:
            for scheduler in self.schedulers:
                scheduler.check()
            await self._wake.wait()

    def _fail(self, error: EngineFailure) -> None:
        if self.failure is not None:
            return
        self.failure = error
        ended, self._ended = self._ended, []
        failures: dict[str, K3Error] = {request_id: error for request_id in self._group_of}
        self._group_of.clear()
        self._idle.set()
        if ended or failures or not isinstance(error, ReplicaLost):
            self._deliver(ended, failures)
