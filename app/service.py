"""The service behind the routes and behind the Python handle: one request in, an `Answer` or a `Stream` out. No HTTP in here."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from app import anthropic, responses
from app.adapter import Caller, ChatJob, Limits, ServedModel, chat_job, completion_job, conversation, no_tokenizer
from app.anthropic import MessagesRequest, Translation
from app.anthropic_stream import MessageWriter, message_body
from app.choice import ChatChoice, TextChoice, Update
from app.config import ServiceConfig
from app.errors import UnknownModel
from app.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from app.openai_chat import ChatWriter, Head, chat_body
from app.openai_text import CompletionWriter
from app.pricing import Price, price_for
from app.responses import ResponsesRequest
from app.responses_stream import ResponseWriter
from app.transcript import Transcript, read
from app.updates import Updates
from app.usage import Bill, Meter
from chat.history import HistoryPolicy
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.types import ChatError
from engine.client import EngineClient
from engine.errors import InvalidRequest

T = TypeVar("T")

# A stream's status and usage headers wait for the engine's first word, so that a refusal is an ordinary error response. When the first
# word takes longer than this (a long prefill), the response begins without it.
FIRST_WORD_S = 10.0
# Prompts longer than this are rendered beside the event loop, which meanwhile goes on with everybody else's tokens.
LONG_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """Frames that leave together come together. Close it, also when it was never read: that cancels the generation."""

    frames: AsyncGenerator[list[dict[str, Any]], None]
    headers: Mapping[str, str]
    updates: Updates

    async def aclose(self) -> None:
        await self.frames.aclose()
        await self.updates.aclose()


class Writer(Protocol):
    """A dialect's stream: what it says first, for each update, when nothing came for `ping_every_s` (None = nothing then), and last."""

    ping_every_s: float | None

    def begin(self) -> list[dict[str, Any]]: ...

    def frames(self, update: Update) -> list[dict[str, Any]]: ...

    def ping(self) -> list[dict[str, Any]]: ...

    def end(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class ChatRun:
    """A chat request that is about to generate, in whatever dialect it came."""

    request: ChatRequest
    job: ChatJob
    model: str  # the name the client used
    updates: Updates
    meter: Meter
    bill: Bill
    tokenizer: Tokenizer


class Service:
    """Constructor-injected: an engine, and what the edge must know of the model. Raises what `app.errors` has a status for."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        model: ServedModel,
        limits: Limits | None = None,
        prices: Mapping[str, Price] | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._limits = limits or Limits()
        self._prices = prices or {}
        self._created = int(time.time())

    @classmethod
    def from_config(
        cls,
        config: ServiceConfig,
        *,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        vocab_size: int,
        stop_ids: Sequence[int],
    ) -> Service:
        return cls(
            engine=engine,
            tokenizer=tokenizer,
            model=ServedModel(
                name=config.served_model_name,
                aliases=config.aliases,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                stop_ids=tuple(stop_ids),
            ),
            limits=Limits(
                default_max_tokens=config.default_max_tokens,
                max_stop_sequences=config.max_stop_sequences,
                max_stop_bytes=config.max_stop_bytes,
                history=HistoryPolicy(config.thinking_history),
            ),
            prices=config.prices,
        )

    # -- OpenAI --------------------------------------------------------------------------------------------------------

    async def chat(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/chat/completions."""
        run = await self.prepare(ChatRequest.model_validate(body), caller)
        request, ids = run.request, run.job.prompt.ids
        head = Head.new("chatcmpl", run.model)
        if request.stream:
            return await self.stream(run, ChatWriter(head, request, ids, run.tokenizer, run.meter, run.bill))
        transcripts, sent = await self.collect(run)
        answer = chat_body(head, request, ids, transcripts, run.tokenizer, run.meter, run.bill, thinking=run.job.thinking)
        return Answer(answer, sent)

    async def completions(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/completions."""
        request = CompletionRequest.model_validate(body)
        model = self.served(request.model)
        size = sum(map(len, request.prompts))
        job = await _beside_the_loop(size, lambda: completion_job(request, caller, self._model, self._limits, self._tokenizer))
        meter = Meter([len(prompt) for prompt in job.prompts], job.choices)
        bill = Bill(price_for(model, self._prices))
        writer = CompletionWriter(Head.new("cmpl", model), request, job, self._tokenizer, meter, bill)
        skip = request.skip_special_tokens is not False
        updates = Updates(
            self._engine,
            [
                (one, TextChoice(i, self._tokenizer, stop_ids=one.stop_token_ids, stops=job.stops, skip_special_tokens=skip))
                for i, one in enumerate(job.requests)
            ],
        )
        if request.stream:
            return await _stream(updates, meter, bill, writer)
        async with aclosing(updates):
            transcripts = await read(updates, len(job.requests), meter)
        return Answer(writer.body(transcripts), bill.headers(meter.total(), final=True))

    # -- the other dialects --------------------------------------------------------------------------------------------

    async def messages(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/messages."""
        asked = MessagesRequest.model_validate(body)
        run = await self._prepare_translated(anthropic.translate(asked), caller)
        message_id = f"msg_{secrets.token_hex(12)}"
        if asked.stream:
            return await self.stream(run, MessageWriter(message_id, run.model, run.meter, run.bill))
        [transcript], sent = await self.collect(run)
        return Answer(message_body(message_id, run.model, transcript, run.meter, run.bill), sent)

    async def count_tokens(self, body: Mapping[str, Any]) -> Answer:
        """/v1/messages/count_tokens."""
        translation = anthropic.translate(MessagesRequest.model_validate(body))
        self.served(translation.request.model)
        tokenizer = self._need_tokenizer("count_tokens")
        try:
            ids = await _beside_the_loop(
                _chars(translation.request.messages), lambda: render(conversation(translation.request), tokenizer).ids
            )
        except ChatError as error:
            raise translation.blame(error) from None
        return Answer({"input_tokens": len(ids)})

    async def responses(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/responses."""
        asked = ResponsesRequest.model_validate(body)
        run = await self._prepare_translated(responses.translate(asked), caller)
        writer = ResponseWriter(Head.new("resp", run.model, "_"), asked, run.request, run.tokenizer, run.meter, run.bill)
        if asked.stream:
            return await self.stream(run, writer)
        [transcript], sent = await self.collect(run)
        return Answer(writer.body(transcript), sent)

    async def _prepare_translated(self, translation: Translation, caller: Caller) -> ChatRun:
        try:
            return await self.prepare(translation.request, caller)
        except ChatError as error:
            raise translation.blame(error) from None

    # -- tokens and models ---------------------------------------------------------------------------------------------

    async def tokenize(self, body: Mapping[str, Any]) -> Answer:
        """/tokenize."""
        request = TokenizeRequest.model_validate(body)
        self.served(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("expected either `prompt` or `messages`", "prompt")
        tokenizer = self._need_tokenizer("/tokenize")
        if request.prompt is not None:
            text = request.prompt
            ids = await _beside_the_loop(len(text), lambda: tokenizer.encode(text))
        else:
            ids = list(await _beside_the_loop(_chars(request.messages or ()), lambda: render(conversation(request), tokenizer).ids))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._model.max_model_len, "tokens": ids}
        answer["token_strs"] = [tokenizer.decode([i]) for i in ids] if request.return_token_strs else None
        return Answer(answer)

    async def detokenize(self, body: Mapping[str, Any]) -> Answer:
        """/detokenize."""
        request = DetokenizeRequest.model_validate(body)
        self.served(request.model)
        tokenizer = self._need_tokenizer("/detokenize")
        for place, token_id in enumerate(request.tokens):
            if token_id >= tokenizer.vocab_size:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary of {tokenizer.vocab_size}", f"tokens[{place}]")
        return Answer({"prompt": tokenizer.decode(request.tokens)})

    def models(self) -> Answer:
        """/v1/models."""
        return Answer({"object": "list", "data": [self._card(name) for name in self._model.names]})

    def model(self, name: str) -> Answer:
        """/v1/models/{name}. Raises UnknownModel."""
        return Answer(self._card(self.served(name)))

    # -- every chat dialect --------------------------------------------------------------------------------------------

    def served(self, name: str | None) -> str:
        """The name to answer under. Raises UnknownModel."""
        if name is None:
            return self._model.name
        if name not in self._model.names:
            raise UnknownModel(f"the model {name[:200]!r} does not exist here; served: {', '.join(self._model.names)}")
        return name

    async def prepare(self, request: ChatRequest, caller: Caller) -> ChatRun:
        """Everything that can be refused is refused here, before the engine hears of the request."""
        model = self.served(request.model)
        tokenizer = self._need_tokenizer("chat")
        job = await _beside_the_loop(_chars(request.messages), lambda: chat_job(request, caller, self._model, self._limits, tokenizer))
        work = [
            (
                one,
                ChatChoice(i, tokenizer, stop_ids=one.stop_token_ids, stops=job.stops, thinking=job.thinking, tools=job.tools),
            )
            for i, one in enumerate(job.requests)
        ]
        meter = Meter([len(job.prompt.ids)], len(job.requests))
        bill = Bill(price_for(model, self._prices), job.history)
        return ChatRun(request, job, model, Updates(self._engine, work), meter, bill, tokenizer)

    async def collect(self, run: ChatRun) -> tuple[list[Transcript], dict[str, str]]:
        """Runs to the end: a transcript a choice, and the response's headers."""
        async with aclosing(run.updates):
            transcripts = await read(run.updates, len(run.job.requests), run.meter)
        return transcripts, run.bill.headers(run.meter.total(), final=True)

    async def stream(self, run: ChatRun, writer: Writer) -> Stream:
        return await _stream(run.updates, run.meter, run.bill, writer)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise no_tokenizer(what)
        return self._tokenizer

    def _card(self, name: str) -> dict[str, Any]:
        """What clients look up: the context's length under the names that they use, and whether and how the model thinks."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "k3-serve",
            "root": self._model.name,
            "max_model_len": self._model.max_model_len,
            "context_length": self._model.max_model_len,
            "supports_reasoning": True,
            "support_efforts": ["low", "high", "max"],
        }


async def _stream(updates: Updates, meter: Meter, bill: Bill, writer: Writer) -> Stream:
    try:
        first = await updates.ready(FIRST_WORD_S)
    except BaseException:
        await updates.aclose()
        raise
    if first is not None:
        meter.count(first)
    sent = bill.headers(meter.total(), final=False)
    if not meter.admitted:
        del sent["x-msh-usage-cached-tokens"]  # rather none than a wrong one
    return Stream(frames_of(updates, writer), sent, updates)


async def frames_of(updates: Updates, writer: Writer) -> AsyncGenerator[list[dict[str, Any]], None]:
    if first := writer.begin():
        yield first
    every = writer.ping_every_s
    async for update in updates if every is None else updates.with_pauses(every):
        if frames := writer.ping() if update is None else writer.frames(update):
            yield frames
    if last := writer.end():
        yield last


async def _beside_the_loop(chars: int, work: Callable[[], T]) -> T:
    return work() if chars < LONG_CHARS else await asyncio.to_thread(work)


def _chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Roughly how much text there is: strings and the texts of parts."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return total
