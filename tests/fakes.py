"""Engines for tests of the edge: what they emit is scripted, and what they were asked is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from chat.tokenizer import Tokenizer
from engine.errors import K3Error
from engine.types import FinishReason, GenerateRequest, TokenChunk, TokenLogprob, Usage


@dataclass
class FakeEngineClient:
    """Emits `script(request)` in groups of `per_chunk` ids, then ends as an engine would: at a stop token or at the token budget.

    `cached`: prompt tokens reported as cached, known at admission. `error` is raised before the chunk number `error_at`.
    `gate`, when given, is awaited before each token chunk, so a test decides when tokens come. `admits`: an empty chunk tells at once what
    was cached. `open` counts unfinished streams.
    """

    script: Callable[[GenerateRequest], Sequence[int]]
    per_chunk: int = 1
    cached: int = 0
    error: K3Error | None = None
    error_at: int = 0
    gate: asyncio.Semaphore | None = None
    admits: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    open: int = 0
    cancelled: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def has_open(self, count: int, *, exactly: bool = False) -> None:
        """Waits until that many streams (or exactly that many) are open. Raises TimeoutError when that never comes."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.open == count if exactly else self.open >= count)

    async def _count(self, change: int) -> None:
        self.open += change
        async with self._changed:
            self._changed.notify_all()

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        await self._count(1)
        finished = False
        try:
            for number, chunk in enumerate(self._chunks(request)):
                if self.error is not None and number == self.error_at:
                    raise self.error
                if self.gate is not None and chunk.token_ids:
                    await self.gate.acquire()
                await asyncio.sleep(0)
                finished = chunk.finish is not None
                yield chunk
        finally:
            self.cancelled += not finished
            await self._count(-1)

    def _chunks(self, request: GenerateRequest) -> list[TokenChunk]:
        ids: list[int] = []
        finish = FinishReason.LENGTH
        for token_id in self.script(request):
            if len(ids) == request.max_tokens:
                break
            ids.append(token_id)
            if token_id in request.stop_token_ids:
                finish = FinishReason.STOP
                break
        begun = Usage(prompt_tokens=len(request.prompt), cached_tokens=self.cached)
        done = Usage(prompt_tokens=len(request.prompt), cached_tokens=self.cached, completion_tokens=len(ids))
        k = request.sampling.prompt_logprobs
        prompt_logprobs = None if k is None else tuple(_logprob(i, k) for i in request.prompt[1:])
        admission = TokenChunk(request_id=request.request_id, usage=begun, prompt_logprobs=prompt_logprobs)
        chunks = [admission] if self.admits or prompt_logprobs else []
        for at in range(0, len(ids), self.per_chunk):
            group = tuple(ids[at : at + self.per_chunk])
            last = at + self.per_chunk >= len(ids)
            wanted = request.sampling.logprobs
            chunks.append(
                TokenChunk(
                    request_id=request.request_id,
                    token_ids=group,
                    logprobs=None if wanted is None else tuple(_logprob(i, wanted) for i in group),
                    finish=finish if last else None,
                    usage=done if last else None,
                )
            )
        if not ids:
            chunks.append(TokenChunk(request_id=request.request_id, finish=finish, usage=done))
        return chunks


def _logprob(token_id: int, k: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, tuple((token_id + i, -0.5 - i) for i in range(k)))


def toy(request: GenerateRequest) -> Sequence[int]:
    """Ids of ordinary text that depend on prompt, seed and choice, as many as are wanted."""
    state = hash((request.prompt, request.sampling.seed, request.choice)) & 0xFFFFFFFF
    ids = []
    for _ in range(request.max_tokens):
        state = (state * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        ids.append(33 + (state >> 8) % 60)
    return ids


@dataclass(frozen=True)
class Reply:
    """Spells K3's replies as ids: what a well-behaved model would sample."""

    tokenizer: Tokenizer

    def open(self, tag: str) -> list[int]:
        t = self.tokenizer
        return [t.open, *t.encode(tag), t.sep]

    def close(self, tag: str) -> list[int]:
        t = self.tokenizer
        return [t.close, *t.encode(tag), t.sep]

    def call(self, name: str, index: int = 1, **arguments: str) -> list[int]:
        """A call whose arguments are all strings."""
        ids = self._open("call", tool=name, index=str(index))
        for key, value in arguments.items():
            ids += [*self._open("argument", key=key, type="string"), *self.tokenizer.encode(value), *self.close("argument")]
        return ids + self.close("call")

    def __call__(self, content: str, *, reasoning: str | None = None, calls: Sequence[list[int]] = ()) -> list[int]:
        """`reasoning` None: the prompt left the response channel open."""
        t = self.tokenizer
        ids: list[int] = []
        if reasoning is not None:
            ids += [*t.encode(reasoning), *self.close("think"), *self.open("response")]
        ids += [*t.encode(content), *self.close("response")]
        if calls:
            ids += [*self.open("tools"), *(i for call in calls for i in call), *self.close("tools")]
        return [*ids, *self.close("message"), t.end_of_msg]

    def _open(self, tag: str, **attributes: str) -> list[int]:
        t = self.tokenizer
        ids = [t.open, *t.encode(tag)]
        for key, value in attributes.items():
            ids += [*t.encode(f" {key}"), *t.encode('="'), *t.encode(value), *t.encode('"')]
        return [*ids, t.sep]
