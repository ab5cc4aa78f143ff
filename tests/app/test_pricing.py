from __future__ import annotations

import pytest

from app.pricing import LIST_PRICES, Price, price_for


def test_cached_tokens_have_their_own_price() -> None:
    price = Price(prompt=3, cached=0.3, completion=15)
    assert price.cost(prompt_tokens=1_000_000, cached_tokens=400_000, completion_tokens=100_000) == pytest.approx(1.8 + 0.12 + 1.5)


@pytest.mark.parametrize(
    ("model", "completion"), [("kimi-k3", 15), ("kimi-k3-256k", 15), ("kimi-k3.1", 10), ("moonshotai/kimi-k3.1-pro", 10), ("other", None)]
)
def test_the_longest_name_prices_a_model(model: str, completion: float | None) -> None:
    price = price_for(model, LIST_PRICES)
    assert (price and price.completion) == completion
