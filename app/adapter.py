"""OpenAI requests → what the chat format and the engine accept. Pure: everything that can be wrong with a request is said here.

The other dialects translate themselves into a `ChatRequest` first, so one conversation gives the same tokens in all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from app.openai import MAX_CHOICES, ChatRequest, CompletionRequest, Sampled, TokenizeRequest
from app.past import Past, Turned, continued, kept_ends, rendering_of, split
from chat.grammar import constraint_for
from chat.history import HistoryPolicy, HistoryState, Verdict, apply_policy, judge
from chat.options import read_options
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.tools import read_tool_choice, read_tools
from chat.types import ChatError, Conversation, Prompt
from chat.validate import validate
from engine.errors import ContextExceeded, InvalidRequest, Unsupported
from engine.types import GenerateRequest, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of the older endpoint
UINT64 = 2**64
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the edge must know of the model behind it."""

    name: str
    aliases: tuple[str, ...] = ()
    max_model_len: int
    vocab_size: int
    stop_ids: tuple[int, ...] = ()  # ids that end a reply

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The operator's limits on one request (`ServiceConfig`)."""

    default_max_tokens: int = 131_072
    max_stop_sequences: int = 5
    max_stop_bytes: int = 32
    history: HistoryPolicy = HistoryPolicy.ACCEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: from the headers, never from the body."""

    request_id: str
    tenant: str = ""
    session: str | None = None
    history: HistoryPolicy | None = None  # instead of the operator's
    seed: int = field(default_factory=lambda: secrets.randbits(63))  # of a request that names none, and of the ids of its tool calls
    again: bytes | None = None  # the session's open request that this one repeats
    after: int = 0  # tokens of the answer that were received before


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuing:
    """What of a session a request goes on from."""

    past: Past
    append: bool = False  # the request carries only what is new
    lead: int = 0  # messages at the request's front that are not part of the session's

    def blame(self, error: ChatError) -> ChatError:
        """The same error with the index of the message in the request."""
        head, bracket, rest = (error.param or "").partition("messages[")
        index, _, inside = rest.partition("]")
        if not self.append or head or not bracket or not index.isdecimal() or int(index) < self.lead:
            return error
        place = int(index) - len(self.past.messages)
        return ChatError(str(error), f"messages[{place}]{inside}" if place >= self.lead else "session_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """A chat request, ready to run: one engine request a choice."""

    prompt: Prompt
    requests: tuple[GenerateRequest, ...]
    tools: bool  # calls are shown; otherwise swallowed
    stops: tuple[str, ...]
    history: Verdict | None  # on the reasoning of the turns that the client sent back; None = not thinking, so none is rendered
    repaired: bool = False  # the reasoning that the verdict misses was put back
    turned: Turned | None = None  # for the session

    @property
    def thinking(self) -> bool:
        return self.prompt.opened == "think"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """Choices of prompt p are `requests[p * n : (p + 1) * n]`."""

    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[GenerateRequest, ...]
    choices: int  # n
    stops: tuple[str, ...]


def conversation(request: ChatRequest | TokenizeRequest) -> Conversation:
    """Raises ChatError for what the format cannot say."""
    options = read_options(
        {
            "thinking": request.thinking,
            "reasoning_effort": request.reasoning_effort,
            "chat_template_kwargs": request.chat_template_kwargs,
        }
    )
    asked = Conversation(
        messages=request.messages or (),
        tools=request.tools or (),
        tool_choice=request.tool_choice if request.tool_choice is not None else "auto",
        response_format=request.response_format,
        thinking=options.thinking,
        effort=options.effort,
        generation_prompt=not isinstance(request, TokenizeRequest) or request.add_generation_prompt,
    )
    validate(asked)
    return asked


def chat_job(
    request: ChatRequest,
    caller: Caller,
    model: ServedModel,
    limits: Limits,
    tokenizer: Tokenizer | None,
    continuing: Continuing | None = None,
) -> ChatJob:
    """Raises ChatError, InvalidRequest, ContextExceeded, Unsupported."""
    if tokenizer is None:
        raise no_tokenizer("chat")
    asked = conversation(request if continuing is None or not continuing.append else _appended(request, continuing))
    own = continuing.past.replies if continuing is not None else ()
    verdict: Verdict | None = None
    repaired = False
    if asked.thinking:
        messages, verdict = apply_policy(caller.history or limits.history, asked.messages, own)
        repaired = messages is not asked.messages and judge(messages, own).state is HistoryState.COMPLETE
        asked = replace(asked, messages=messages)
    prompt = render(asked, tokenizer)
    turned: Turned | None = None
    if continuing is not None:
        prompt, turned = _on_session(prompt, asked, continuing, tokenizer)
    stops = _stops(request, limits)
    tools = read_tools(asked)
    top = (request.top_logprobs or 0) if request.logprobs else None
    constraint = constraint_for(asked, prompt.opened, parallel_tool_calls=request.parallel_tool_calls is not False)
    if constraint is not None and request.ignore_eos:
        raise InvalidRequest("a reply of guaranteed structure ends itself: ignore_eos must be false", "ignore_eos")
    first = GenerateRequest(
        request_id=caller.request_id,
        prompt=prompt.ids,
        sampling=_sampling(request, caller, model, logprobs=top),
        max_tokens=_budget(request.budget or limits.default_max_tokens, len(prompt.ids), model, "messages"),
        stop_token_ids=_stop_ids(request, model),
        tenant=caller.tenant,
        session=caller.session,
        priority=request.priority or 0,
        boundaries=prompt.boundaries,
        constraint=None if constraint is None else constraint.to_json(),
    )
    return ChatJob(
        prompt=prompt,
        requests=_choices(first, request.n or 1),
        tools=bool(tools) and read_tool_choice(request.tool_choice, tools).mode != "none",
        history=verdict,
        repaired=repaired,
        turned=turned,
        stops=stops,
    )


def _appended(request: ChatRequest, continuing: Continuing) -> ChatRequest:
    """Instructions, the session's messages, the new ones."""
    sent, lead = request.messages, continuing.lead
    return request.model_copy(update={"messages": [*sent[:lead], *continuing.past.messages, *sent[lead:]]})


def _on_session(prompt: Prompt, asked: Conversation, continuing: Continuing, tokenizer: Tokenizer) -> tuple[Prompt, Turned]:
    """The prompt with the session's own tokens as far as the conversation is the session's, and what the turn will leave behind."""
    past, lead = continuing.past, continuing.lead
    rendering = rendering_of(asked, lead)
    shared = past.shared(asked.messages[lead:])
    end = past.resume(shared, rendering)
    if end is not None:
        prompt = continued(prompt, lead + end.messages, past.tokens(end.tokens))
    head, opening = split(prompt, tokenizer)
    turned = Turned(
        past=past,
        messages=asked.messages[lead:],
        head=head,
        opening=opening,
        ends=kept_ends(past, shared, end),
        rendering=rendering,
        thinking=asked.thinking,
    )
    return prompt, turned


def completion_job(
    request: CompletionRequest,
    caller: Caller,
    model: ServedModel,
    limits: Limits,
    tokenizer: Tokenizer | None,
    begun: tuple[int, ...] = (),
) -> CompletionJob:
    """`begun`: tokens that the prompt goes on from. Raises InvalidRequest, ContextExceeded, Unsupported."""
    n = request.n or 1
    stops = _stops(request, limits)
    if stops and tokenizer is None:
        raise no_tokenizer("`stop`", "stop")
    if request.suffix:
        raise Unsupported("suffix: this model completes at the end of a text only", "suffix")
    if request.best_of not in (None, n):
        raise Unsupported(f"best_of: choices are not ranked here, so it can only be n ({n})", "best_of")
    prompts = tuple(
        begun + _prompt_ids(prompt, "prompt" if len(request.prompts) == 1 else f"prompt[{i}]", model, tokenizer)
        for i, prompt in enumerate(request.prompts)
    )
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n={n} ask for {len(prompts) * n} choices, at most {MAX_CHOICES}", "n")
    sampling = _sampling(request, caller, model, logprobs=request.logprobs)
    if request.echo and request.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=request.logprobs)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        first = GenerateRequest(
            request_id=caller.request_id,
            prompt=prompt,
            sampling=sampling,
            max_tokens=_budget(request.max_tokens or DEFAULT_COMPLETION_TOKENS, len(prompt), model, "prompt"),
            stop_token_ids=_stop_ids(request, model),
            tenant=caller.tenant,
            session=caller.session,
            priority=request.priority or 0,
        )
        requests += _choices(first, n)
    return CompletionJob(prompts=prompts, requests=tuple(requests), choices=n, stops=stops)


def no_tokenizer(what: str, param: str | None = None) -> Unsupported:
    return Unsupported(
        f"{what} needs a tokenizer and this checkpoint has none: send token ids to /v1/completions, or start the server with tokenizer=DIR",
        param,
        "no_tokenizer",
    )


def _choices(first: GenerateRequest, n: int) -> tuple[GenerateRequest, ...]:
    """One engine request a choice. Ids stay unique while a client's request id may repeat."""
    unique = f"{first.request_id}-{secrets.token_hex(4)}"
    return tuple(replace(first, request_id=f"{unique}-{choice}", choice=choice) for choice in range(n))


def _sampling(request: Sampled, caller: Caller, model: ServedModel, *, logprobs: int | None) -> SamplingParams:
    seed = request.seed if request.seed is not None else caller.seed
    return SamplingParams(
        seed=seed % UINT64,
        temperature=_given(request.temperature, 1.0),
        top_p=_given(request.top_p, 1.0),
        top_k=max(0, _given(request.top_k, 0)),
        min_p=_given(request.min_p, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, model),
        logprobs=logprobs,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if len(key) > 9 or int(key) >= model.vocab_size:
            raise InvalidRequest(f"token id {key[:40]} is outside the vocabulary of {model.vocab_size}", f"logit_bias.{key[:40]}")
    return tuple((int(key), float(value)) for key, value in bias.items())


def _stops(request: Sampled, limits: Limits) -> tuple[str, ...]:
    stops = request.stops
    if len(stops) > limits.max_stop_sequences:
        raise InvalidRequest(f"{len(stops)} stop sequences, at most {limits.max_stop_sequences}", "stop")
    for i, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest("a stop sequence must not be empty", f"stop[{i}]")
        if (size := len(stop.encode())) > limits.max_stop_bytes:
            raise InvalidRequest(f"a stop sequence of {size} bytes, at most {limits.max_stop_bytes}", f"stop[{i}]")
    return stops


def _stop_ids(request: Sampled, model: ServedModel) -> tuple[int, ...]:
    asked = tuple(request.stop_token_ids or ())
    _in_vocabulary(asked, "stop_token_ids", model)
    return asked if request.ignore_eos else tuple(dict.fromkeys((*model.stop_ids, *asked)))


def _prompt_ids(prompt: str | list[int], param: str, model: ServedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise no_tokenizer("a text prompt", param)
        ids: Sequence[int] = tokenizer.encode(prompt)
    else:
        ids = prompt
        _in_vocabulary(ids, param, model)
    if not ids:
        raise InvalidRequest("the prompt is empty: at least one token is needed to continue from", param)
    return tuple(ids)


def _in_vocabulary(ids: Sequence[int], param: str, model: ServedModel) -> None:
    if ids and max(ids) >= model.vocab_size:
        at = next(i for i, token_id in enumerate(ids) if token_id >= model.vocab_size)
        raise InvalidRequest(f"token id {ids[at]} is outside the vocabulary of {model.vocab_size}", f"{param}[{at}]")


def _budget(asked: int, prompt_tokens: int, model: ServedModel, param: str) -> int:
    """The token budget, cut to what the context leaves."""
    room = model.max_model_len - prompt_tokens
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens} tokens; the context holds {model.max_model_len} tokens of prompt and generation together",
            param,
        )
    return min(asked, room)
