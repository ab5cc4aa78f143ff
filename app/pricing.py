"""Usage to money. Prices are USD per million tokens; the defaults are the list prices of the hosted API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field


class Price(BaseModel):
    """USD per million tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: float = Field(ge=0, allow_inf_nan=False, description="prompt tokens that had to be computed")
    cached: float = Field(ge=0, allow_inf_nan=False, description="prompt tokens served from the prefix cache")
    completion: float = Field(ge=0, allow_inf_nan=False, description="generated tokens, reasoning included")

    def cost(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
        """USD. `cached_tokens` are part of `prompt_tokens`."""
        computed = prompt_tokens - cached_tokens
        return (computed * self.prompt + cached_tokens * self.cached + completion_tokens * self.completion) / 1e6


LIST_PRICES: Mapping[str, Price] = MappingProxyType(
    {
        "kimi-k3": Price(prompt=3.0, cached=0.3, completion=15.0),
        "kimi-k3.1": Price(prompt=2.0, cached=0.2, completion=10.0),
    }
)


def price_for(model: str, table: Mapping[str, Price]) -> Price | None:
    """The entry whose name is the longest part of `model`: `kimi-k3.1-pro` is priced as `kimi-k3.1`, not as `kimi-k3`."""
    matching = [name for name in table if name in model]
    return table[max(matching, key=len)] if matching else None
