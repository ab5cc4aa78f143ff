"""Tokens and machines to money: list prices of the hosted API against accelerators that cost the same whether they work or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import ConfigError

HOURS_A_MONTH = 730
CHART_WIDTH = 40


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a client's average turn consumes. `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ConfigError(f"cached_tokens {self.cached_tokens}: between 0 and prompt_tokens ({self.prompt_tokens}) was expected")
        if self.completion_tokens < 1:
            raise ConfigError(f"completion_tokens {self.completion_tokens}: at least 1 was expected")

    def api_usd(self, price: Price) -> float:
        return price.cost(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens, completion_tokens=self.completion_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Accelerators, owned or rented. Rates are of the whole machine, each as if it did nothing else; prefill and decode take turns."""

    usd_per_hour: float  # of all accelerators
    prompt_per_s: float
    completion_per_s: float
    stored_gb: float = 0.0  # sessions at rest, decimal GB
    usd_per_gb_month: float = 0.0

    def __post_init__(self) -> None:
        for name in ("usd_per_hour", "prompt_per_s", "completion_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: a positive number was expected")
        for name in ("stored_gb", "usd_per_gb_month"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 0 was expected")

    @property
    def storage_usd_per_hour(self) -> float:
        return self.stored_gb * self.usd_per_gb_month / HOURS_A_MONTH

    def turns_per_hour(self, turn: Turn) -> float:
        """With no idle second. Cached prompt tokens cost no arithmetic here."""
        computed = turn.prompt_tokens - turn.cached_tokens
        return 3600 / (computed / self.prompt_per_s + turn.completion_tokens / self.completion_per_s)

    def usd_per_turn(self, turn: Turn, utilisation: float) -> float:
        """`utilisation`: share of the hours in which the machine works, in (0, 1]."""
        if not 0 < utilisation <= 1:
            raise ConfigError(f"utilisation is {utilisation}: above 0 and at most 1 was expected")
        return (self.usd_per_hour + self.storage_usd_per_hour) / (self.turns_per_hour(turn) * utilisation)

    def break_even(self, turn: Turn, price: Price) -> float:
        """Utilisation from which the machine is the cheaper one; above 1: never, at these rates. inf when the API is free."""
        api = turn.api_usd(price) * self.turns_per_hour(turn)
        return (self.usd_per_hour + self.storage_usd_per_hour) / api if api else math.inf


def chart(machine: Machine, turn: Turn, price: Price, utilisations: Sequence[float] = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)) -> str:
    """USD a turn by utilisation as bars of `#`, the API's price as `|` in each: a bar that passes the mark is dearer than the API."""
    api = turn.api_usd(price)
    costs = [machine.usd_per_turn(turn, u) for u in utilisations]
    scale = CHART_WIDTH / max(*costs, api)
    mark = min(CHART_WIDTH - 1, round(api * scale))
    lines = []
    for utilisation, cost in zip(utilisations, costs, strict=True):
        bar = list(("#" * round(cost * scale)).ljust(CHART_WIDTH))
        bar[mark] = "|"
        lines.append(f"{utilisation:>5.0%} {''.join(bar)} ${cost:.4f}")
    return "\n".join([*lines, f"      | = the API, ${api:.4f} a turn"])
