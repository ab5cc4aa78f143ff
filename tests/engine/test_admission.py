from __future__ import annotations

import pytest

from engine.admission import budget
from engine.errors import ContextExceeded, InvalidRequest
from tests.engine.driver import config, request


@pytest.mark.parametrize(("max_tokens", "allowed"), [(0, 0), (1, 1), (6, 6), (7, 6), (10**9, 6)])
def test_max_tokens_are_clipped_to_the_context(max_tokens: int, allowed: int) -> None:
    assert budget(request("r", range(10), max_tokens), config(max_model_len=16)) == allowed


def test_and_to_the_page_pool() -> None:
    assert budget(request("r", range(10), 100), config(num_pages=3)) == 2


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty") as caught:
        budget(request("r", []), config())
    assert caught.value.param == "prompt"


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is -1"):
        budget(request("r", [1], -1), config())


@pytest.mark.parametrize("length", [16, 17])
def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(length: int) -> None:
    with pytest.raises(ContextExceeded, match=f"the prompt has {length} tokens; the context of 16 tokens") as caught:
        budget(request("r", range(length), 1), config(max_model_len=16))
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_fills_the_pool_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextExceeded, match=r"the prompt has 12 tokens; the cache of this engine holds 12 tokens \(3 pages of 4\)"):
        budget(request("r", range(12), 1), config(num_pages=3))
