"""From engine streams to one stream of updates: choices interleave, and closing it cancels whatever still runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from app.choice import Choice, Update
from app.turn import Recorder
from engine.client import EngineClient
from engine.types import GenerateRequest, TokenChunk


class Updates:
    """The updates of all choices of one API request, in the order they come. Must be closed, also when it was never read."""

    def __init__(
        self,
        engine: EngineClient,
        work: Sequence[tuple[GenerateRequest, Choice]],
        recorder: Recorder | None = None,
        after: int | None = None,
    ) -> None:
        """`after`: places in the only choice are told, and the text of so many tokens is left out, since it was received before."""
        streams = [_choice(engine, request, choice, after or 0) for request, choice in work]
        source = streams[0] if len(streams) == 1 else _interleaved(streams)
        recorded = source if recorder is None else recorder.follow(source)
        self._source = _behind(recorded, after) if after else recorded
        self._recorder = recorder
        self.place = after  # tokens that what was read last ends behind
        self._next: asyncio.Future[Update | None] | None = None

    async def ready(self, patience_s: float) -> Update | None:
        """The first update, which stays in the stream; None when it did not come in time. Raises what the engine raised instead.

        Until here nothing was sent, so a refusal can still be an ordinary HTTP error.
        """
        return await self._peek(patience_s)

    async def _peek(self, patience_s: float | None) -> Update | None:
        if self._next is None:
            self._next = asyncio.ensure_future(_anext(self._source))
        done, _ = await asyncio.wait({self._next}, timeout=patience_s)
        return self._next.result() if done else None

    async def __aiter__(self) -> AsyncIterator[Update]:
        if self._next is not None:
            first = await self._next
            self._next = None
            if first is None:
                return
            yield self._read(first)
        async for update in self._source:
            yield self._read(update)

    async def with_pauses(self, every_s: float) -> AsyncIterator[Update | None]:
        """Like iterating, with a None whenever nothing came for `every_s` seconds: the moment for a keep-alive."""
        while True:
            update = await self._peek(every_s)
            if update is None and not (self._next and self._next.done()):
                yield None
                continue
            self._next = None
            if update is None:
                return
            yield self._read(update)

    def _read(self, update: Update) -> Update:
        if self.place is not None:
            self.place = max(self.place, update.completion_tokens)
        return update

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                self._next.exception()  # seen: the reader is gone and cannot be told
        await self._source.aclose()
        if self._recorder is not None:
            await self._recorder.close()  # a source that was never read has not closed it


async def _anext(source: AsyncGenerator[Update, None]) -> Update | None:
    return await anext(source, None)


async def _choice(engine: EngineClient, request: GenerateRequest, choice: Choice, cut: int) -> AsyncGenerator[Update, None]:
    """`cut`: no update has tokens on both sides of it."""
    async with aclosing(engine.stream(request)) as chunks:
        async for chunk in chunks:
            for part in _parts(chunk, cut):
                update = choice.push(part)
                yield update
                if update.finish is not None:
                    return
            cut -= len(chunk.token_ids)


def _parts(chunk: TokenChunk, at: int) -> list[TokenChunk]:
    if not 0 < at < len(chunk.token_ids):
        return [chunk]
    first = replace(chunk, token_ids=chunk.token_ids[:at], logprobs=chunk.logprobs and chunk.logprobs[:at], finish=None)
    rest = replace(chunk, token_ids=chunk.token_ids[at:], logprobs=chunk.logprobs and chunk.logprobs[at:], prompt_logprobs=None)
    return [first, rest]


async def _behind(source: AsyncGenerator[Update, None], after: int) -> AsyncGenerator[Update, None]:
    async with aclosing(source):
        async for update in source:
            if update.completion_tokens <= after:
                finish = update.finish and replace(update.finish, token_ids=(), logprobs=())
                update = replace(update, pieces=(), finish=finish)
            yield update


async def _interleaved(streams: Sequence[AsyncGenerator[Update, None]]) -> AsyncGenerator[Update, None]:
    """Fair and bounded: a stream waits for its last update to be taken before it asks the engine for the next."""
    queue: asyncio.Queue[Update | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: AsyncGenerator[Update, None]) -> None:
        try:
            async with aclosing(stream):
                async for update in stream:
                    await queue.put(update)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
