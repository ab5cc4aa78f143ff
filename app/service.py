"""The service behind the routes and behind the Python handle: one request in, an `Answer` or a `Stream` out. No HTTP in here."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from app import anthropic, responses
from app.adapter import Caller, ChatJob, Continuing, Limits, ServedModel, chat_job, completion_job, conversation, no_tokenizer
from app.answer import Answer, Stream, Writer, start_stream
from app.anthropic import CountRequest, MessagesRequest, Translation
from app.anthropic_stream import MessageWriter, message_body
from app.asked import Asked, when_free
from app.beside import NODE_CHARS, beside_the_loop, chars, nodes
from app.choice import ChatChoice, TextChoice
from app.config import ServiceConfig
from app.errors import UnknownModel
from app.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from app.openai_chat import ChatWriter, Head, chat_body
from app.openai_text import CompletionWriter
from app.past import Outcome, Past, common, outcome, raw_outcome
from app.pricing import Price, price_for
from app.responses import ResponsesRequest, response_id
from app.responses_stream import ResponseWriter
from app.session_turns import Begun, SessionTurns
from app.transcript import Transcript, read
from app.turn import Recorder, Sessions
from app.updates import Updates
from app.usage import Bill, Meter
from chat.history import HistoryPolicy, HistoryRejected, Verdict
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.types import ChatError
from engine.client import EngineClient
from engine.errors import InvalidRequest


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
        sessions: Sessions | None = None,
    ) -> None:
        self._engine = engine
        self._turns = SessionTurns(sessions)
        self._tokenizer = tokenizer
        self._model = model
        self._limits = limits or Limits()
        self._prices = prices or {}
        self.histories: Counter[str] = Counter()  # requests by what came back of their thinking
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
        sessions: Sessions | None = None,
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
            sessions=sessions,
        )

    # -- OpenAI --------------------------------------------------------------------------------------------------------

    async def chat(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/chat/completions."""
        request = ChatRequest.model_validate(body)
        head = Head.new("chatcmpl", self.served(request.model))
        begun = await self._turns.of_request(caller, request.session_id, request.session_mode, Asked.of("chat", body, caller))
        run = await self.prepare(request, caller, begun, head.id)
        ids = run.job.prompt.ids
        if request.stream:
            return await self.stream(run, ChatWriter(head, request, ids, run.tokenizer, run.meter, run.bill))
        transcripts, sent = await self.collect(run)
        answer = chat_body(head, request, ids, transcripts, run.tokenizer, run.meter, run.bill, thinking=run.job.thinking)
        return Answer(answer, sent)

    async def completions(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/completions."""
        request = CompletionRequest.model_validate(body)
        model = self.served(request.model)
        head = Head.new("cmpl", model)
        begun = await self._turns.of_request(caller, request.session_id, request.session_mode, Asked.of("completions", body, caller))
        async with _abandoning(begun):
            if begun is not None and len(request.prompts) > 1:
                raise InvalidRequest("a session takes one prompt at a time", "prompt")
            known = begun.past.tokens() if begun is not None else ()
            prefix = known if begun is not None and begun.append else ()
            asking = _of_session(caller, begun)
            job = await beside_the_loop(
                sum(map(len, request.prompts)),
                lambda: completion_job(request, asking, self._model, self._limits, self._tokenizer, prefix),
            )
            meter = Meter([len(prompt) for prompt in job.prompts], job.choices)
            bill = _bill(price_for(model, self._prices), begun)

            async def outcome(transcript: Transcript, past: Past) -> Outcome:
                [prompt] = job.prompts
                return raw_outcome((*prompt, *transcript.token_ids), past, common(known, prompt), head.id)

            writer = CompletionWriter(head, request, job, self._tokenizer, meter, bill)
            skip = request.skip_special_tokens is not False
            updates = Updates(
                self._engine,
                [
                    (one, TextChoice(i, self._tokenizer, stop_ids=one.stop_token_ids, stops=job.stops, skip_special_tokens=skip))
                    for i, one in enumerate(job.requests)
                ],
                _recorder(begun, outcome, len(job.requests), meter, bill),
                _after(caller, begun, len(job.requests)),
            )
            if begun is not None:
                await begun.open()
        if request.stream:
            return await start_stream(updates, meter, bill, writer)
        async with aclosing(updates):
            transcripts = await read(updates, len(job.requests), meter)
        return Answer(writer.body(transcripts), bill.headers(meter.total(), final=True))

    async def asked(self, tenant: str, session: str) -> tuple[Asked, bytes]:
        """The request of a session whose answer is on its way, or was when the connection broke. Raises UnknownSession, NoOpenAnswer."""
        return await self._turns.asked(tenant, session)

    async def again(self, asked: Asked, raw: bytes, caller: Caller) -> Answer | Stream:
        """Its answer, behind the first `caller.after` tokens. Raises SessionBusy while somebody else is reading it."""
        ask = {"chat": self.chat, "completions": self.completions, "messages": self.messages}[asked.kind]
        return await when_free(lambda: ask(asked.body, asked.caller(caller, raw)))

    # -- the other dialects --------------------------------------------------------------------------------------------

    async def messages(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/messages."""
        asked = MessagesRequest.model_validate(body)
        translation = anthropic.translate(asked)
        self.served(asked.model)
        message_id = f"msg_{secrets.token_hex(12)}"
        begun = await self._turns.of_request(caller, asked.session_id, asked.session_mode, Asked.of("messages", body, caller))
        run = await self._prepare_translated(translation, caller, begun, message_id)
        if asked.stream:
            return await self.stream(run, MessageWriter(message_id, run.model, run.meter, run.bill))
        [transcript], sent = await self.collect(run)
        return Answer(message_body(message_id, run.model, transcript, run.meter, run.bill), sent)

    async def count_tokens(self, body: Mapping[str, Any]) -> Answer:
        """/v1/messages/count_tokens."""
        translation = anthropic.translate(CountRequest.model_validate(body))
        self.served(translation.request.model)
        tokenizer = self._need_tokenizer("count_tokens")
        try:
            ids = await beside_the_loop(
                chars(translation.request.messages), lambda: render(conversation(translation.request), tokenizer).ids
            )
        except ChatError as error:
            raise translation.blame(error) from None
        return Answer({"input_tokens": len(ids)})

    async def responses(self, body: Mapping[str, Any], caller: Caller) -> Answer | Stream:
        """/v1/responses."""
        asked = ResponsesRequest.model_validate(body)
        translation = responses.translate(asked)
        head = Head.new("resp", self.served(asked.model), "_")
        begun = await self._turns.of_response(caller, asked)
        conversation = None
        if begun is not None:
            head = replace(head, id=response_id(begun.turn.session))
            conversation = begun.turn.session if asked.conversation is not None else None
        run = await self._prepare_translated(translation, caller, begun, head.id)
        writer = ResponseWriter(
            head, asked, run.request, run.tokenizer, run.meter, run.bill, stored=begun is not None, conversation=conversation
        )
        if asked.stream:
            return await self.stream(run, writer)
        [transcript], sent = await self.collect(run)
        return Answer(writer.body(transcript), sent)

    async def _prepare_translated(self, translation: Translation, caller: Caller, begun: Begun | None, answer_id: str) -> ChatRun:
        try:
            return await self.prepare(translation.request, caller, begun, answer_id, translation.lead)
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
            ids = await beside_the_loop(len(text), lambda: tokenizer.encode(text))
        else:
            ids = list(await beside_the_loop(chars(request.messages or ()), lambda: render(conversation(request), tokenizer).ids))
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

    async def prepare(self, request: ChatRequest, caller: Caller, begun: Begun | None, answer_id: str, lead: int = 0) -> ChatRun:
        """Everything that can be refused is refused here, before the engine hears of the request. `lead`: see `Translation`.

        The session's turn is this run's from here on, also when this raises.
        """
        async with _abandoning(begun):
            model = self.served(request.model)
            tokenizer = self._need_tokenizer("chat")
            continuing = None if begun is None else Continuing(past=begun.past, append=begun.append, lead=lead)
            asking = _of_session(caller, begun)
            size = chars(request.messages) + (len(begun.past.record.messages) if begun is not None else 0)
            size += NODE_CHARS * nodes([request.tools, request.response_format])
            try:
                job = await beside_the_loop(size, lambda: chat_job(request, asking, self._model, self._limits, tokenizer, continuing))
            except ChatError as error:
                if isinstance(error, HistoryRejected):
                    self.histories["rejected"] += 1
                raise error if continuing is None else continuing.blame(error) from None
            work = [
                (
                    one,
                    ChatChoice(
                        i,
                        tokenizer,
                        stop_ids=one.stop_token_ids,
                        stops=job.stops,
                        thinking=job.thinking,
                        tools=job.tools,
                        nonce=caller.seed,
                    ),
                )
                for i, one in enumerate(job.requests)
            ]
            meter = Meter([len(job.prompt.ids)], len(job.requests))
            bill = _bill(price_for(model, self._prices), begun, job.history, repaired=job.repaired)
            if job.history is not None:
                self.histories["repaired" if job.repaired else job.history.state.value] += 1

            async def recorded(transcript: Transcript, past: Past) -> Outcome:
                turned = job.turned
                assert turned is not None, "a session's request"
                return await beside_the_loop(size, lambda: outcome(turned, transcript, answer_id, tokenizer, thought=job.thinking))

            updates = Updates(self._engine, work, _recorder(begun, recorded, len(work), meter, bill), _after(caller, begun, len(work)))
            if begun is not None:
                await begun.open()
            return ChatRun(request, job, model, updates, meter, bill, tokenizer)

    async def collect(self, run: ChatRun) -> tuple[list[Transcript], dict[str, str]]:
        """Runs to the end: a transcript a choice, and the response's headers."""
        async with aclosing(run.updates):
            transcripts = await read(run.updates, len(run.job.requests), run.meter)
        return transcripts, run.bill.headers(run.meter.total(), final=True)

    async def stream(self, run: ChatRun, writer: Writer) -> Stream:
        return await start_stream(run.updates, run.meter, run.bill, writer)

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


@asynccontextmanager
async def _abandoning(begun: Begun | None) -> AsyncIterator[None]:
    """A turn whose request is refused ends at once."""
    try:
        yield
    except BaseException:
        if begun is not None:
            await begun.turn.abandon()
        raise


def _of_session(caller: Caller, begun: Begun | None) -> Caller:
    return replace(caller, session=begun.turn.session if begun is not None else None)


def _after(caller: Caller, begun: Begun | None, choices: int) -> int | None:
    """The place behind which an answer goes on; None: it cannot be had again from a place."""
    if caller.after and choices > 1:
        raise InvalidRequest("an answer with several choices can be had again from its beginning only", "after")
    return caller.after if begun is not None and begun.asked and choices == 1 else None


def _bill(price: Price | None, begun: Begun | None, history: Verdict | None = None, *, repaired: bool = False) -> Bill:
    if begun is None:
        return Bill(price, history)
    return Bill(price, history, repaired, begun.turn.session, begun.turn.record.cost)


def _recorder(
    begun: Begun | None, outcome: Callable[[Transcript, Past], Awaitable[Outcome]], choices: int, meter: Meter, bill: Bill
) -> Recorder | None:
    if begun is None:
        return None
    return Recorder(begun.turn, lambda transcript: outcome(transcript, begun.past), choices, meter, bill)
