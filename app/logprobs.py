"""Log-probabilities in OpenAI's two shapes: entries with bytes (chat) and parallel lists (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chat.tokenizer import Tokenizer
from engine.types import TokenLogprob

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token's text; `bytes:\\xe4\\xbd` when it is a part of a character, `token_id:7` without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One entry a token. `bytes` are the token's own, so that parts of a character can be joined; null for special tokens."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        special = tokenizer.is_special(token_id)
        return {
            "token": token_text(token_id, tokenizer),
            "logprob": max(logprob, LOWEST),
            "bytes": None if special else list(tokenizer.token_bytes(token_id)),
        }

    return [{**entry(item.token_id, item.logprob), "top_logprobs": [entry(*best) for best in item.top]} for item in logprobs]


class CompletionLogprobs:
    """Lists that grow with the text; `text_offset` counts characters from the beginning of what the choice shows."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def lists(self, items: Sequence[TokenLogprob | int]) -> dict[str, Any]:
        """A bare token id stands for the prompt's first token, which nothing predicts."""
        tokens: list[str] = []
        values: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for item in items:
            token_id = item if isinstance(item, int) else item.token_id
            text = token_text(token_id, self._tokenizer)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            if isinstance(item, int):
                values.append(None)
                best.append(None)
            else:
                values.append(max(item.logprob, LOWEST))
                # The sampled token is always there, also when it is none of the best.
                top = {token_text(i, self._tokenizer): max(value, LOWEST) for i, value in item.top}
                best.append(top | {text: max(item.logprob, LOWEST)})
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}
