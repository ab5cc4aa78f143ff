"""What an engine accepts and what it gives back. Token ids only: text is the business of `chat`.

Every type here is frozen and crosses process boundaries (pickle over Ray, msgpack over the token channel).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token was sampled (or the ingress matched a stop string)
    LENGTH = "length"  # the token budget or the context is used up
    CANCELLED = "cancelled"  # the client went away


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from the logits. Validated at the edge (`app`); trusted here.

    The random number of a draw is a function of (seed, choice, absolute position, vocabulary id) only, so batching, sharding,
    preemption or a move to another replica cannot change a sampled stream.
    """

    seed: int = 0  # 64 bits; the ingress draws it once when the client sends none
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # on generated tokens, as OpenAI defines it
    frequency_penalty: float = 0.0  # on generated tokens, as OpenAI defines it
    repetition_penalty: float = 1.0  # on prompt and generated tokens, as vLLM defines it
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None = none; k = log-prob of the sampled token and of the k best
    prompt_logprobs: int | None = None  # the same for every prompt token but the first; switches prefix hits off


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a stream found when it was first admitted."""

    cached_tokens: int  # prompt tokens whose computation was skipped
    resume_source: str | None = None  # where their state came from: "device", "store" or "durable"
    miss_reason: str | None = None  # why nothing was skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One stream of tokens. `prompt` and `generated` are apart so that a moved stream keeps its penalties, budget and usage."""

    request_id: str
    prompt: tuple[int, ...]  # at least one id
    generated: tuple[int, ...] = ()  # tokens already produced elsewhere (fail-over); they count against max_tokens
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0  # index among the `n` choices of one API request
    max_tokens: int = 16  # budget of generated tokens, `generated` included
    stop_token_ids: tuple[int, ...] = ()  # sampling one of these ends the stream; it is part of token_ids
    tenant: str = ""
    priority: int = 0  # smaller runs first
    session: str | None = None
    boundaries: tuple[int, ...] = ()  # prompt positions where the renderer asks for a checkpoint (vanishing tail segments)
    constraint: str | None = None  # serialised grammar of `chat.grammar`; None = free
    admitted: Admission | None = None  # of a moved stream: as its usage goes on to say


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token at one position, with the best alternatives (best first). From the raw logits' log-softmax in fp32."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts, and what the admission found: see `Admission`."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    resume_source: str | None = None
    miss_reason: str | None = None

    @property
    def admission(self) -> Admission:
        return Admission(cached_tokens=self.cached_tokens, resume_source=self.resume_source, miss_reason=self.miss_reason)


def usage(request: GenerateRequest, generated: int, admitted: Admission | None) -> Usage:
    """Of a request that generated so many tokens, wherever it is."""
    found = admitted or Admission(cached_tokens=0)
    return Usage(
        prompt_tokens=len(request.prompt),
        completion_tokens=generated,
        cached_tokens=found.cached_tokens,
        resume_source=found.resume_source,
        miss_reason=found.miss_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request. The last chunk of a stream carries `finish` and `usage`; the first carries `usage` too, since what was
    cached is known at admission and clients are told before the tokens."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token id when asked
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # all at once, before the first token
    finish: FinishReason | None = None
    usage: Usage | None = None
