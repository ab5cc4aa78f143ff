"""Logits -> tokens, all rows at once. Randomness is counter-based: Gumbel-max with a hash of (seed, choice, position, vocabulary id).

So a token depends on its own row only: not on the batch, the shards, the step it was drawn in or the process. Order of operations:
mask, bias and penalties -> temperature -> top-k -> top-p -> min-p -> Gumbel argmax. Ties go to the lowest id. Temperature 0 is the argmax
after bias and penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.types import SamplingParams, TokenLogprob

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64 (Steele, Lea, Flood 2014): increment and multipliers
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's wish for a token at absolute position `position`."""

    params: SamplingParams
    choice: int
    position: int
    generated_counts: Tensor | None = None  # [vocab] int32, kept by rows with penalties
    seen: Tensor | None = None  # [vocab] bool: in the prompt or generated; kept by rows with a repetition penalty
    allowed: np.ndarray | None = None  # int32 [ceil(vocab / 32)], bit i % 32 of word i // 32 is id i: what the grammar lets through


def needs_counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0


def needs_seen(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """logits [R, vocab] fp32, one draw a row -> token ids [R] int64 on the same device. `logits` is left as it was."""
    scores = _penalised(logits, draws)
    random = [i for i, d in enumerate(draws) if d.params.temperature > 0]
    tokens = scores.argmax(-1)  # of equal maxima the first
    if random:
        chosen = [draws[i] for i in random]
        tokens[random] = _gumbel_argmax(scores[random], chosen)
    return tokens


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprob]:
    """Log-softmax of the raw logits [R, vocab] in fp32 at `tokens` [R], and the `top` best (best first, ties by lowest id)."""
    values = torch.log_softmax(logits.float(), -1)
    own = values.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    best = torch.topk(_ordered(logits), min(top, logits.shape[1]), dim=-1).indices if top else tokens.new_empty(len(own), 0)
    best_values = values.gather(1, best).tolist()
    return [
        TokenLogprob(token, value, tuple(zip(ids, tops, strict=True)))
        for token, value, ids, tops in zip(tokens.tolist(), own, best.tolist(), best_values, strict=True)
    ]


def row_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit counter of one draw, still without the vocabulary id."""
    key = 0
    for word in (seed, choice, position):
        key = _mix((key + GOLDEN + (word & MASK)) & MASK)
    return key


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """keys [R] int64, ids [V] int64 -> [R, V] float64 in (0, 1): splitmix64 of key + (id + 1) * golden. Identical on every device."""
    x = keys.unsqueeze(1) + (ids + 1) * _signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(MIX1)
    x = (x ^ _shift(x, 27)) * _signed(MIX2)
    x = x ^ _shift(x, 31)
    return (_shift(x, 11).double() + 0.5) * 2.0**-53


def _gumbel_argmax(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    device = scores.device
    temperature = torch.tensor([d.params.temperature for d in draws], device=device, dtype=torch.float64)
    scores = scores.double() / temperature.unsqueeze(1)
    truncated = [i for i, d in enumerate(draws) if d.params.top_k > 0 or d.params.top_p < 1 or d.params.min_p > 0]
    if truncated:
        scores[truncated] = _truncate(scores[truncated], [draws[i].params for i in truncated])
    keys = torch.tensor([_signed(row_key(d.params.seed, d.choice, d.position)) for d in draws], device=device)
    u = uniform(keys, torch.arange(scores.shape[1], device=device))
    return (scores - torch.log(-torch.log(u))).argmax(-1)


def _truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-inf for every token outside of top-k, then of top-p among what is left, then below min-p of the best."""
    vocab = scores.shape[1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=scores.device, dtype=torch.float64).unsqueeze(1)

    top_k = column([p.top_k if p.top_k > 0 else vocab for p in params])
    top_p = column([p.top_p for p in params])
    min_p = column([p.min_p for p in params])
    ranked, ids = scores.sort(dim=-1, descending=True, stable=True)  # equal scores by id
    ranked = ranked.masked_fill(torch.arange(vocab, device=scores.device) >= top_k, float("-inf"))
    probabilities = torch.softmax(ranked, -1)
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    kept[:, 0] = True
    return torch.empty_like(scores).scatter_(1, ids, ranked.masked_fill(~kept, float("-inf")))


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Mask and bias, then repetition penalty (vLLM), then presence and frequency (OpenAI): only the rows that ask for it."""
    scores = logits.float().clone()
    for row, d in zip(scores, draws, strict=True):
        p = d.params
        if d.allowed is not None:
            row.masked_fill_(~_unpacked(d.allowed, row), float("-inf"))
        if p.logit_bias:
            ids, bias = zip(*p.logit_bias, strict=True)
            row.index_add_(0, torch.tensor(ids, device=row.device), torch.tensor(bias, device=row.device, dtype=row.dtype))
        if d.seen is not None and needs_seen(p):
            shrunk = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
            row.copy_(torch.where(d.seen, shrunk, row))
        if d.generated_counts is not None and needs_counts(p):
            row -= p.frequency_penalty * d.generated_counts + p.presence_penalty * (d.generated_counts > 0)
    return scores


def _unpacked(allowed: np.ndarray, row: Tensor) -> Tensor:
    """Bit set -> [vocab] bool on the row's device."""
    words = torch.from_numpy(allowed.copy()).to(row.device)
    return ((words.unsqueeze(1) >> torch.arange(32, device=row.device, dtype=torch.int32)) & 1).flatten()[: row.shape[0]].bool()


def _ordered(logits: Tensor) -> Tensor:
    """int64 keys that sort as (logit, lowest id first): a total order, so that top-k has no ties."""
    bits = logits.float().contiguous().view(torch.int32).long()
    ascending = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (ascending << 32) - torch.arange(logits.shape[1], device=logits.device)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * MIX1 & MASK
    x = (x ^ (x >> 27)) * MIX2 & MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)
