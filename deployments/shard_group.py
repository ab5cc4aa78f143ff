"""The executor that is real shards: starts them, sends one message a step, and fails as one.

A step is one actor call to rank 0; the plan goes on from there by a broadcast among the ranks (`deployments.lockstep`). The group is
lost when any rank's actor dies, raises, does not answer pings, or a step outlasts its time. Whoever notices first aborts
the process groups of all survivors, which unblocks them at once, and every caller gets one clear `ShardLost`. `reform` then puts new
actors in the place of those that died or hang; the others keep their weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.loading import Loading
from deployments.shard import Shard
from deployments.spec import ShardSpec
from deployments.wire import decode_result, encode_plan
from engine.errors import ConfigError, K3Error, ShardLost
from engine.plan import StepPlan, StepResult

logger = logging.getLogger("ray.serve")
WAIT_LOG_S = 10.0
REUNION_S = 25.0  # a rank that waits for a peer which died on its way to a reunion gives up within this


class ShardGroup:
    """An `engine.executor.Executor`. Create with `await ShardGroup.start(...)`, end with `await close()`."""

    def __init__(
        self, spec: ShardSpec, actors: list[Any], placement_group: PlacementGroup | None, build: Callable[..., Any] | None = None
    ) -> None:
        self._spec = spec
        self._actors = actors
        self._placement_group = placement_group
        self._build = build
        self.epoch = 0  # of the present group: states that another one wrote are gone
        self.bytes_loaded: list[int] = []  # by rank, when the group was last formed
        self.replaced = 0  # actors so far
        self.on_lost: Callable[[ShardLost], None] | None = None
        self._lost: ShardLost | None = None
        self._closing = False
        self._pending = 0
        self._watchers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, spec: ShardSpec, placement_group: PlacementGroup | None = None, build: Callable[..., Any] | None = None
    ) -> ShardGroup:
        """Places, loads and joins all shards (`build`: see `Shard.load`).

        Raises ConfigError/CheckpointError for what the operator must mend, ShardLost otherwise.
        """
        actors = [_place(spec, rank, placement_group) for rank in range(spec.shards)]
        group = cls(spec, actors, placement_group, build)
        try:
            await group._form()
        except Exception as error:
            group.kill()
            raise _cause(error) from None
        return group

    async def reform(self) -> None:
        """After the group was lost: replaces the dead and the hung, keeps the others with their weights, and starts a new epoch.

        Raises like `start`; may be called again then.
        """
        await self._stop_watching()
        patience = self._spec.ping_timeout_s
        answers = await asyncio.gather(*(_answers(patience, actor.ping) for actor in self._actors))
        for actor, answer in zip(self._actors, answers, strict=True):
            if not answer:
                ray.kill(actor)  # now: whoever waits for it inside a collective goes on when its sockets close
        alive = await asyncio.gather(*(self._survives(actor) for actor in self._actors))
        self.epoch += 1
        for rank, survives in enumerate(alive):
            if not survives:
                ray.kill(self._actors[rank])
                self._actors[rank] = _place(self._spec, rank, self._placement_group)
                self.replaced += 1
        logger.info("forming the shard group again: ranks %s are new", [rank for rank, survives in enumerate(alive) if not survives])
        try:
            await _observed([a.reset.remote(self.epoch) for a in self._actors], "shards to forget the lost group's states")
            await self._form()
        except Exception as error:
            await self._abort_all()
            raise _cause(error) from None
        self._lost = None

    async def _form(self) -> None:
        spec, actors = self._spec, self._actors
        await _observed([a.ping.remote() for a in actors], f"{spec.shards} shard actors to be placed")
        loading = Loading(spec, actors, lambda rank: _place(spec, rank, self._placement_group), self._build)
        loaded = await loading.run()
        self.replaced += loading.replaced
        url = await actors[0].endpoint.remote()
        await _observed([a.join.remote(url, self.epoch) for a in actors], f"{spec.shards} ranks to meet at {url}")
        self.bytes_loaded = [nbytes for _, nbytes in loaded]
        logger.info(
            "shards ready: %d (tp=%d, groups=%d), %d bytes of weights in %.1f s",
            spec.shards, spec.tp, spec.num_groups, sum(self.bytes_loaded), max(seconds for seconds, _ in loaded),
        )  # fmt: skip
        self._watchers = [
            *(asyncio.create_task(self._watch_follower(rank)) for rank in range(1, spec.shards)),
            asyncio.create_task(self._heartbeat()),
        ]

    async def _survives(self, actor: Any) -> bool:
        """Whether an actor answers and has left the lost group. One that hangs inside a step does not count."""
        patience = self._spec.ping_timeout_s + REUNION_S  # its weights are worth waiting for
        return await _answers(patience, actor.leave) and await _answers(patience, actor.idle)

    async def _abort_all(self) -> None:
        """Unblocks whoever waits for a peer that will not come."""
        await self._stop_watching()
        aborts = [asyncio.wait_for(_value(actor.abort.remote()), self._spec.ping_timeout_s) for actor in self._actors]
        await asyncio.gather(*aborts, return_exceptions=True)

    async def _stop_watching(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers = []

    @property
    def lost(self) -> ShardLost | None:
        return self._lost

    def actors_of(self, group: int) -> list[Any]:
        """The actors of one data-parallel group, by tensor-parallel rank."""
        return self._actors[group * self._spec.tp : (group + 1) * self._spec.tp]

    async def pids(self) -> list[int]:
        """Process ids by rank: for operators and for tests that kill one."""
        return list(await asyncio.gather(*(_value(actor.ping.remote()) for actor in self._actors)))

    async def run(self, plan: StepPlan) -> StepResult:
        if self._lost:
            raise self._lost
        self._pending += 1
        try:
            ref = self._actors[0].step.remote(encode_plan(plan))
            payload = await asyncio.wait_for(_value(ref), self._spec.step_timeout_s)
            return decode_result(payload)
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            raise self._fail(
                ShardLost(f"step {plan.step} took longer than step_timeout_s={self._spec.step_timeout_s:g}: a shard hangs")
            ) from None
        except Exception as error:
            raise self._fail(error) from None
        finally:
            self._pending -= 1

    async def close(self) -> None:
        """Releases the ranks in order, then ends the actors. Idempotent."""
        self._closing = True
        for task in self._watchers:
            task.cancel()
        if self._lost is None and self._spec.shards > 1:
            try:
                await asyncio.wait_for(_value(self._actors[0].stop.remote()), 5)
            except Exception as error:
                logger.warning("shards did not stop in order: %s", error)
        self.kill()

    def kill(self) -> None:
        self._closing = True
        for actor in self._actors:
            ray.kill(actor)

    def _fail(self, error: BaseException) -> ShardLost:
        """Marks the group lost once, with the first cause, and unblocks the survivors."""
        if self._lost is None:
            self._lost = ShardLost(str(_cause(error)))
            if not self._closing:
                logger.error("shard group lost: %s", self._lost)
                for actor in self._actors:
                    actor.abort.remote()
                if self.on_lost is not None:
                    self.on_lost(self._lost)
        return self._lost

    async def _watch_follower(self, rank: int) -> None:
        try:
            await self._actors[rank].follow.remote()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not self._closing:
                self._fail(error)

    async def _heartbeat(self) -> None:
        """Pings every shard; keeps an idle group's transport awake."""
        period = self._spec.heartbeat_s
        while self._lost is None:
            await asyncio.sleep(period)
            answers = [_value(actor.ping.remote()) for actor in self._actors]
            if self._pending == 0 and self._spec.shards > 1:
                answers.append(_value(self._actors[0].keepalive.remote()))
            try:
                await asyncio.wait_for(asyncio.gather(*answers), self._spec.ping_timeout_s)
            except TimeoutError:
                self._fail(ShardLost(f"a shard did not answer within ping_timeout_s={self._spec.ping_timeout_s:g}: it hangs"))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._fail(error)


def _place(spec: ShardSpec, rank: int, placement_group: PlacementGroup | None) -> Any:
    options: dict[str, Any] = {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus}
    if placement_group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank + 1)
    lean = replace(spec, checkpoint=None)  # its node's desk tells it what it needs of that
    return Shard.options(**options).remote(lean, rank)  # type: ignore[attr-defined]


async def _observed(refs: list[Any], what: str) -> list[Any]:
    """Awaits all; says every ten seconds what it is waiting for. The first error wins."""
    begin, futures = time.monotonic(), [asyncio.ensure_future(_value(ref)) for ref in refs]
    try:
        pending = set(futures)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=WAIT_LOG_S, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
            if pending:
                logger.info(
                    "waiting for %s: %d of %d done after %.0f s", what, len(refs) - len(pending), len(refs), time.monotonic() - begin
                )
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


async def _answers(patience_s: float, method: Any) -> bool:
    """Whether an actor's method returns in time."""
    try:
        await asyncio.wait_for(_value(method.remote()), patience_s)
    except (TimeoutError, ray.exceptions.RayError):
        return False
    return True


async def _value(ref: Any) -> Any:
    return await ref


def _cause(error: BaseException) -> K3Error:
    """The error of ours inside what Ray wrapped around it; anything else becomes a ShardLost in words."""
    inner = getattr(error, "cause", error)
    if isinstance(inner, ConfigError | ShardLost):
        return inner
    if isinstance(error, ray.exceptions.RayActorError):
        return ShardLost(f"a shard's process died: {str(error).splitlines()[0]}")
    return ShardLost(f"{type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else 'no message'}")
