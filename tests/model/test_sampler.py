"""The sampler: every parameter alone against a plain calculation, and the counter that makes a draw a function of its row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.types import SamplingParams
from model.sampler import Draw, logprobs, row_key, sample, uniform

VOCAB = 50
GREEDY = SamplingParams(temperature=0)


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def drawn(params: SamplingParams, scores: Tensor, draws: int = 4000) -> Tensor:
    """How often each token comes out of `draws` positions."""
    tokens = sample(scores.expand(draws, -1), [Draw(params, 0, position) for position in range(draws)])
    return torch.bincount(tokens, minlength=scores.shape[1]) / draws


def counted(*tokens: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB).int()


def test_greedy_takes_the_best_and_of_equals_the_first() -> None:
    scores = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(scores, [Draw(GREEDY, 0, 7), Draw(GREEDY, 1, 9)]).tolist() == [1, 0]


def test_logits_are_left_alone() -> None:
    scores = logits(3)
    before = scores.clone()
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias=((1, 5.0),), presence_penalty=1.0)
    sample(scores, [Draw(params, 0, 1, counted(1, 2))] * 3)
    assert torch.equal(scores, before)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    scores = logits()
    found = drawn(SamplingParams(temperature=temperature, seed=5), scores)
    expected = torch.softmax(scores[0] / temperature, -1)
    assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=3), [0, 1, 2]),
        (SamplingParams(top_k=1), [0]),
        (SamplingParams(top_k=99), [0, 1, 2, 3, 4, 5]),
        (SamplingParams(top_p=0.5), [0, 1]),
        (SamplingParams(top_p=1e-9), [0]),
        (SamplingParams(min_p=0.25), [0, 1, 2]),
        (SamplingParams(min_p=1.0), [0]),
        (SamplingParams(top_k=2, top_p=0.7), [0, 1]),
        (SamplingParams(top_k=3, top_p=0.8), [0, 1]),  # top-p counts in what top-k left: 0.4 + 0.3 of 0.85
        (SamplingParams(top_p=0.8), [0, 1, 2]),
        (SamplingParams(top_p=0.8, temperature=100.0), [0, 1, 2, 3, 4]),  # after the temperature
    ],
    ids=str,
)
def test_truncation(params: SamplingParams, kept: list[int]) -> None:
    scores = torch.tensor([[0.4, 0.3, 0.15, 0.08, 0.05, 0.02]]).log()
    found = drawn(params, scores)
    assert found.nonzero().flatten().tolist() == kept


def test_equal_scores_are_cut_by_id() -> None:
    assert drawn(SamplingParams(top_k=2), torch.zeros(1, 6)).nonzero().flatten().tolist() == [0, 1]


def test_a_sampled_row_does_not_depend_on_its_batch() -> None:
    scores = logits(6, seed=3)
    params = [
        SamplingParams(seed=1),
        GREEDY,
        SamplingParams(seed=2, top_k=4),
        SamplingParams(seed=3, top_p=0.6, temperature=1.7),
        SamplingParams(seed=4, min_p=0.1),
        SamplingParams(seed=-5, repetition_penalty=1.4),
    ]
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[:25] = True
    draws = [Draw(p, i % 2, 100 + i, counted(3), seen) for i, p in enumerate(params)]
    together = sample(scores, draws).tolist()
    assert together == [sample(scores[i : i + 1], draws[i : i + 1]).item() for i in range(6)]
    assert together == sample(scores.flip(0), draws[::-1]).tolist()[::-1]


def test_bias() -> None:
    scores = torch.zeros(1, VOCAB)
    params = SamplingParams(temperature=0, logit_bias=((7, 2.0), (9, -100.0), (0, -1.0)))
    assert sample(scores, [Draw(params, 0, 0)]).item() == 7


def test_presence_and_frequency_penalties() -> None:
    """OpenAI: logit - count * frequency - (count > 0) * presence, on generated tokens."""
    scores = torch.zeros(1, VOCAB)
    scores[0, :4] = torch.tensor([3.0, 2.5, 2.2, 1.9])
    history = counted(0, 0, 0, 1)

    def best(**params: float) -> int:
        return int(sample(scores, [Draw(SamplingParams(temperature=0, **params), 0, 4, history)]).item())

    assert best(frequency_penalty=0.1) == 0  # 2.7, 2.4, 2.2
    assert best(frequency_penalty=0.2) == 0  # 2.4, 2.3, 2.2
    assert best(frequency_penalty=0.25) == 0  # 2.25, 2.25: the first
    assert best(frequency_penalty=0.26) == 1  # 2.22, 2.24, 2.2
    assert best(presence_penalty=1.0) == 2  # 2.0, 1.5, 2.2
    assert best(presence_penalty=-1.0, frequency_penalty=0.9) == 1  # 1.3, 2.6, 2.2


def test_repetition_penalty() -> None:
    """vLLM: seen logits are divided when positive, multiplied when negative."""
    scores = torch.full((1, VOCAB), -4.0)
    scores[0, :3] = torch.tensor([3.0, 2.0, -1.0])
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[0] = True
    draw = Draw(SamplingParams(temperature=0, repetition_penalty=2.0), 0, 1, None, seen)
    assert sample(scores, [draw]).item() == 1
    below = -scores - 5  # token 0 at -8 …; all negative
    seen[:] = False
    seen[2] = True
    assert sample(below, [Draw(SamplingParams(temperature=0, repetition_penalty=2.0), 0, 1, None, seen)]).item() == 3


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits(2, seed=4)
    scores[0, 10] = scores[0, 20] = 9.0
    (first, second) = logprobs(scores, torch.tensor([3, 4]), 3)
    expected = torch.log_softmax(scores, -1)
    assert first.token_id == 3
    assert first.logprob == pytest.approx(expected[0, 3].item())
    assert [t for t, _ in first.top[:2]] == [10, 20]
    assert [t for t, _ in second.top] == expected[1].sort(descending=True).indices[:3].tolist()
    assert [p for _, p in second.top] == pytest.approx(expected[1].sort(descending=True).values[:3].tolist())
    assert logprobs(scores, torch.tensor([3, 4]), 0)[0].top == ()


def splitmix64(x: int) -> int:
    """One output of the published generator, in plain integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31))
def test_uniform_is_splitmix64_in_plain_integers(key: int, token: int) -> None:
    found = uniform(torch.tensor([key]), torch.tensor([token])).item()
    word = splitmix64((key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64)
    assert found == ((word >> 11) + 0.5) * 2.0**-53
    assert 0 < found < 1


def test_every_part_of_the_counter_matters() -> None:
    base = row_key(1, 0, 10)
    assert len({base, row_key(2, 0, 10), row_key(1, 1, 10), row_key(1, 0, 11), row_key(0, 1, 10), row_key(10, 0, 1)}) == 6
    assert row_key(-1, 0, 10) == row_key(2**64 - 1, 0, 10)


def test_the_counter_is_the_same_everywhere() -> None:
    """Fixed values: a stream that moves to another machine or version goes on as it began."""
    assert row_key(1234, 0, 56) == 15_576_641_681_893_274_304
    params = SamplingParams(seed=1234, temperature=0.8)
    assert [sample(logits(1, seed=1), [Draw(params, 0, position)]).item() for position in range(8)] == [39, 32, 39, 13, 39, 32, 39, 32]
