"""Tokens ride one socket per ingress–replica pair; controls ride back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from deployments.token_channel import HIGH_WATER, Control, ControlKind, StreamAddress, TokenReceiver, TokenSender
from engine.errors import ReplicaLost
from engine.types import FinishReason, TokenChunk, TokenLogprob, Usage


@asynccontextmanager
async def channel() -> AsyncIterator[tuple[TokenReceiver, TokenSender, asyncio.Queue[Control]]]:
    controls: asyncio.Queue[Control] = asyncio.Queue()
    receiver, sender = TokenReceiver("127.0.0.1"), TokenSender(controls.put_nowait)
    try:
        yield receiver, sender, controls
    finally:
        await sender.close()
        await receiver.close()


def chunk(token: int, **more: object) -> TokenChunk:
    return TokenChunk(request_id="r", token_ids=(token,), **more)  # type: ignore[arg-type]


async def test_chunks_arrive_whole_and_in_order() -> None:
    async with channel() as (receiver, sender, _):
        a, b = receiver.open(), receiver.open()
        last = chunk(
            3,
            logprobs=(TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.0))),),
            finish=FinishReason.STOP,
            usage=Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=2),
        )
        assert sender.send([(a.address, chunk(1)), (b.address, chunk(2))]) == []
        assert await a.get() == chunk(1)
        assert await b.get() == chunk(2)
        sender.send([(a.address, last)])
        assert await a.get() == last


async def test_a_reader_that_is_behind_gets_everything_as_one_chunk() -> None:
    async with channel() as (receiver, sender, _):
        behind, beside = receiver.open(), receiver.open()
        begun, done = Usage(prompt_tokens=2, cached_tokens=1), Usage(prompt_tokens=2, cached_tokens=1, completion_tokens=2)
        prompt = (TokenLogprob(9, -3.0),)
        sent = [
            TokenChunk(request_id="r", usage=begun, prompt_logprobs=prompt),
            chunk(1, logprobs=(TokenLogprob(1, -1.0),)),
            chunk(2, logprobs=(TokenLogprob(2, -2.0),), finish=FinishReason.LENGTH, usage=done),
        ]
        for one in sent:
            sender.send([(behind.address, one), (beside.address, one)])
            await beside.get()
        assert await behind.get() == TokenChunk(
            request_id="r",
            token_ids=(1, 2),
            logprobs=(TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)),
            prompt_logprobs=prompt,
            finish=FinishReason.LENGTH,
            usage=done,
        )


async def test_a_failure_comes_after_the_tokens_before_it() -> None:
    async with channel() as (receiver, sender, _):
        failing, beside = receiver.open(), receiver.open()
        sender.send([(failing.address, chunk(1)), (beside.address, chunk(1))])
        await beside.get()
        failing.fail(ReplicaLost("gone"))
        assert await failing.get() == chunk(1)
        for _ in range(2):
            with pytest.raises(ReplicaLost, match="gone"):
                await failing.get()


async def test_cancel_before_the_replica_is_known_is_sent_at_its_first_message() -> None:
    async with channel() as (receiver, sender, controls):
        stream = receiver.open()
        stream.cancel()
        assert not stream.has_peer
        sender.send([(stream.address, chunk(1))])
        assert await asyncio.wait_for(controls.get(), 5) == Control(ControlKind.CANCEL, stream.address.stream)


async def test_tokens_for_a_forgotten_stream_cancel_it() -> None:
    async with channel() as (receiver, sender, controls):
        stream = receiver.open()
        stream.close()
        sender.send([(stream.address, chunk(1))])
        assert (await asyncio.wait_for(controls.get(), 5)).kind is ControlKind.CANCEL


async def test_a_slow_reader_pauses_itself_and_resumes() -> None:
    async with channel() as (receiver, sender, controls):
        slow, quick = receiver.open(), receiver.open()
        for i in range(HIGH_WATER):
            sender.send([(slow.address, chunk(i)), (quick.address, chunk(i))])
            assert (await quick.get()).token_ids == (i,)
        assert await asyncio.wait_for(controls.get(), 5) == Control(ControlKind.PAUSE, slow.address.stream)
        assert (await slow.get()).token_ids == tuple(range(HIGH_WATER))
        assert await asyncio.wait_for(controls.get(), 5) == Control(ControlKind.RESUME, slow.address.stream)
        assert controls.empty(), "the quick reader was never paused"


async def test_garbage_on_the_socket_changes_nothing() -> None:
    async with channel() as (receiver, sender, _):
        stream = receiver.open()
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(receiver.endpoint)
        stranger.send(b"\xff\x00 not msgpack")
        sender.send([(stream.address, chunk(1))])
        assert await asyncio.wait_for(stream.get(), 5) == chunk(1)
        stranger.close(linger=0)
        context.term()


async def test_closing_the_receiver_fails_open_streams() -> None:
    receiver = TokenReceiver("127.0.0.1")
    stream = receiver.open()
    await receiver.close()
    with pytest.raises(ReplicaLost):
        await stream.get()


async def test_an_ingress_that_is_gone_is_reported() -> None:
    """A peer that never reads fills the socket's backlog; the sender then names the streams to cancel."""
    sender = TokenSender(lambda control: None, backlog=10)
    gone: list[StreamAddress] = []
    address = StreamAddress("tcp://127.0.0.1:9", "s")  # nobody listens on the discard port
    for i in range(20):
        gone += sender.send([(address, chunk(i))])
    assert gone
    assert set(gone) == {address}
    await sender.close()
