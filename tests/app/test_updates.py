"""Many engine streams as one: order, silence, failures, and that closing leaves nothing running."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from app.answer import frames_of
from app.anthropic_stream import MessageWriter
from app.choice import TextChoice
from app.updates import Updates
from app.usage import Bill, Meter
from engine.errors import ShardLost
from engine.types import GenerateRequest
from tests.app.edge import says, tokenizer, toys
from tests.fakes import FakeEngineClient


def updates(engine: FakeEngineClient, choices: int = 1, max_tokens: int = 4) -> Updates:
    work = []
    for i in range(choices):
        request = GenerateRequest(request_id=f"r{i}", prompt=(1,), choice=i, max_tokens=max_tokens)
        work.append((request, TextChoice(i, tokenizer(), stop_ids=(), stops=())))
    return Updates(engine, work)


@pytest.mark.parametrize("choices", [1, 3])
async def test_every_choice_comes_whole_and_in_its_order(choices: int) -> None:
    engine = toys()
    async with aclosing(updates(engine, choices)) as source:
        seen = [update async for update in source]
    for i in range(choices):
        counts = [update.completion_tokens for update in seen if update.choice == i]
        assert counts == [0, 1, 2, 3, 4]
    assert engine.open == engine.cancelled == 0


@pytest.mark.parametrize("choices", [1, 3])
async def test_the_first_update_is_told_and_kept(choices: int) -> None:
    async with aclosing(updates(toys(), choices)) as source:
        first = await source.ready(60)
        assert first is not None
        seen = [update async for update in source]
    assert seen[0] == first
    assert len(seen) == 5 * choices


@pytest.mark.parametrize("choices", [1, 3])
async def test_an_early_failure_is_raised_before_anything_is_sent(choices: int) -> None:
    engine = says([5, 6], error=ShardLost("gone"))
    async with aclosing(updates(engine, choices)) as source:
        with pytest.raises(ShardLost):
            await source.ready(60)
    assert engine.open == 0


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("read", [0, 1, 2])
async def test_closing_cancels_what_still_runs(choices: int, read: int) -> None:
    engine = toys()
    source = updates(engine, choices)
    if read:
        await source.ready(60)
    if read == 2:
        async for _ in source:
            break
    await source.aclose()
    assert engine.open == 0
    assert engine.cancelled == len(engine.requests) <= choices
    await source.aclose()


async def test_a_silent_engine_does_not_hold_the_response() -> None:
    engine = says([5, 6], gate=asyncio.Semaphore(0), admits=False)
    async with aclosing(updates(engine)) as source:
        assert await source.ready(0.001) is None
        assert await source.ready(0.001) is None
    assert (engine.open, engine.cancelled) == (0, 1)


async def test_pauses_are_told_and_nothing_is_lost() -> None:
    gate = asyncio.Semaphore(0)
    async with aclosing(updates(says([5, 6, 7], gate=gate))) as source:
        seen: list[int | None] = []
        async for update in source.with_pauses(0.001):
            seen.append(None if update is None else update.completion_tokens)
            if update is None and seen.count(None) % 2 == 0:
                gate.release()
    assert [count for count in seen if count is not None] == [0, 1, 2, 3]
    assert seen.count(None) >= 6


async def test_a_long_silence_is_filled_with_pings() -> None:
    gate = asyncio.Semaphore(0)
    writer = MessageWriter("msg", "m", Meter([1]), Bill())
    writer.ping_every_s = 0.001
    kinds: list[str] = []
    async with aclosing(updates(says([71], gate=gate), max_tokens=1)) as source, aclosing(frames_of(source, writer)) as frames:
        async for batch in frames:
            kinds += [frame["type"] for frame in batch]
            if kinds.count("ping") == 2:
                gate.release()
    assert kinds[:3] == ["message_start", "ping", "ping"]
    assert kinds[-1] == "message_stop"
