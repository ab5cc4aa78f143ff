"""What a request consumed: added up over its choices, written in both spellings clients read, and priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.choice import Update
from app.pricing import Price
from chat.history import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """`cached` of the prompt's tokens were not computed again; `reasoning` of the completion's tokens were thinking."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    resume_source: str | None = None  # where the skipped tokens' state came from
    miss_reason: str | None = None  # why nothing was skipped


class Meter:
    """Counts one API request. The n choices of a prompt share it: it is counted once, with what its first choice found cached."""

    def __init__(self, prompt_tokens: Sequence[int], choices: int = 1) -> None:
        self._prompts = tuple(prompt_tokens)
        self._per_prompt = choices
        self._cached: dict[int, int] = {}
        self._resumed: dict[int, tuple[str | None, str | None]] = {}  # by prompt: source, or why there was none
        self._generated: dict[int, tuple[int, int]] = {}

    def count(self, update: Update) -> None:
        self._generated[update.choice] = update.completion_tokens, update.reasoning_tokens
        if update.cached_tokens is not None:
            self._cached.setdefault(update.choice // self._per_prompt, update.cached_tokens)
            self._resumed.setdefault(update.choice // self._per_prompt, (update.resume_source, update.miss_reason))

    @property
    def admitted(self) -> bool:
        """Whether the engine has told the cached tokens of every prompt."""
        return len(self._cached) == len(self._prompts)

    def of_choice(self, choice: int) -> Tokens:
        prompt = choice // self._per_prompt
        completion, reasoning = self._generated.get(choice, (0, 0))
        source, miss = self._resumed.get(prompt, (None, None))
        return Tokens(
            prompt=self._prompts[prompt],
            cached=self._cached.get(prompt, 0),
            completion=completion,
            reasoning=reasoning,
            resume_source=source,
            miss_reason=miss,
        )

    def total(self) -> Tokens:
        """Where states came from is said of the first prompt."""
        source, miss = self._resumed.get(0, (None, None))
        return Tokens(
            resume_source=source,
            miss_reason=miss,
            prompt=sum(self._prompts),
            cached=sum(self._cached.values()),
            completion=sum(completion for completion, _ in self._generated.values()),
            reasoning=sum(reasoning for _, reasoning in self._generated.values()),
        )


@dataclass(frozen=True, slots=True)
class Bill:
    """What final usage figures say beside the counts."""

    price: Price | None = None
    history: Verdict | None = None
    repaired: bool = False  # what the verdict misses was put back from the session
    session: str | None = None
    spent: float = 0.0  # USD, by the session's earlier turns

    def cost(self, tokens: Tokens) -> float | None:
        """USD, None without a price."""
        if self.price is None:
            return None
        return self.price.cost(prompt_tokens=tokens.prompt, cached_tokens=tokens.cached, completion_tokens=tokens.completion)

    def extras(self, tokens: Tokens) -> dict[str, Any]:
        """Further keys of a usage object: `cost` in USD, and whether the thinking history came back (`turn` counts from 1)."""
        extras: dict[str, Any] = {}
        if (amount := self.cost(tokens)) is not None:
            extras["cost"] = amount
        if self.history is not None:
            extras["thinking_history"] = {"state": self.history.state.value, "turn": self.history.turn}
            if self.repaired:
                extras["thinking_history"]["repaired"] = True
        if tokens.resume_source is not None:
            extras["resume_source"] = tokens.resume_source
        if tokens.miss_reason is not None:
            extras["miss_reason"] = tokens.miss_reason
        if self.session is not None:
            extras["session"] = {"id": self.session, "cost": self.spent + (amount or 0.0)}
        return extras

    def headers(self, tokens: Tokens, *, final: bool) -> dict[str, str]:
        """Usage as response headers: they reach a client even when the connection breaks before the last frame. The cost is known last."""
        sent = {"x-msh-usage-prompt-tokens": str(tokens.prompt), "x-msh-usage-cached-tokens": str(tokens.cached)}
        if self.history is not None:
            turn = "" if self.history.turn is None else f"; turn={self.history.turn}"
            sent["x-thinking-history"] = f"{self.history.state.value}{turn}{'; repaired' if self.repaired else ''}"
        if self.session is not None:
            sent["x-session-id"] = self.session
        if final and (amount := self.cost(tokens)) is not None:
            sent["x-cost"] = f"{amount:.8f}"
            if self.session is not None:
                sent["x-session-cost"] = f"{self.spent + amount:.8f}"
        return sent


def openai_usage(tokens: Tokens) -> dict[str, Any]:
    """`cached_tokens` stands twice: some clients read Moonshot's spelling first, some only OpenAI's."""
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "cached_tokens": tokens.cached,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "completion_tokens_details": {"reasoning_tokens": tokens.reasoning},
    }
