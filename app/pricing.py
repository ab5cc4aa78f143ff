"""Usage to money: which price a model has. The prices themselves, and the list prices, are `cluster.cost`'s."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.cost import LIST_PRICES, Price

__all__ = ["LIST_PRICES", "Price", "price_for"]


def price_for(model: str, table: Mapping[str, Price]) -> Price | None:
    """The entry whose name is the longest part of `model`: `kimi-k3.1-pro` is priced as `kimi-k3.1`, not as `kimi-k3`."""
    matching = [name for name in table if name in model]
    return table[max(matching, key=len)] if matching else None
