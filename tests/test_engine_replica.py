"""A replica and an ingress's receiver without Serve between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.engine import HELLO_S, EngineReplica
from deployments.token_channel import TokenReceiver
from engine.executor import Executor
from engine.plan import StepPlan, StepResult
from engine.types import GenerateRequest, TokenChunk, Usage
from tests.engine.driver import GREEDY
from tests.fake_executor import FakeExecutor, toy_stream
from tests.specs import engine_spec

PROMPT = tuple(range(1, 6))


class Waiting:
    """A toy executor whose first step waits for `go`; later ones take `later_s`."""

    def __init__(self, go: asyncio.Event, later_s: float = 0.0) -> None:
        self._inner = FakeExecutor(num_pages=128, num_slots=32, page_size=4)
        self._go = go
        self._later_s = later_s

    async def run(self, plan: StepPlan) -> StepResult:
        await self._go.wait()
        if plan.step:
            await asyncio.sleep(self._later_s)
        return await self._inner.run(plan)


class Closed(EngineReplica):
    """Closed by hand, not when it is collected."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@asynccontextmanager
async def replica(executor: Executor) -> AsyncIterator[tuple[EngineReplica, TokenReceiver]]:
    engine, receiver = Closed.__new__(Closed), TokenReceiver("127.0.0.1")
    await engine.__init__(engine_spec(), executor)  # type: ignore[misc]  # as Serve does it
    try:
        yield engine, receiver
    finally:
        await engine.close()
        await receiver.close()


def asks(name: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=PROMPT, max_tokens=max_tokens, sampling=GREEDY)


async def test_an_ingress_can_cancel_before_the_first_token() -> None:
    go = asyncio.Event()
    async with replica(Waiting(go)) as (engine, receiver):
        stream = receiver.open()
        call = asyncio.ensure_future(engine.generate(asks("r", 8), stream.address))
        assert await stream.get() == TokenChunk(request_id="r")  # nothing computed yet, but the replica is known
        stream.cancel()
        await asyncio.sleep(HELLO_S)  # the word is on its way while the first step still runs
        go.set()
        usage = await call
        assert isinstance(usage, Usage)
        assert usage.completion_tokens == 0


async def test_no_hello_comes_after_a_token() -> None:
    """After the last one it would hide the finish from a reader that is behind."""
    go = asyncio.Event()
    go.set()
    async with replica(Waiting(go, 3 * HELLO_S)) as (engine, receiver):
        stream = receiver.open()
        call = asyncio.ensure_future(engine.generate(asks("r", 2), stream.address))
        first, second = toy_stream(PROMPT, 2, sampling=GREEDY)
        assert (await stream.get()).token_ids == (first,)
        assert (await stream.get()).token_ids == (second,)
        assert isinstance(await call, Usage)
