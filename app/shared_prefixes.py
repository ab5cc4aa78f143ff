"""Beginnings of prompts that all tenants share: named by the operator as chat requests begin, rendered once at start."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from app.adapter import conversation
from app.openai import ChatRequest
from app.past import pack_tokens
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.types import ChatError
from engine.errors import ConfigError, InvalidRequest


def read_shared_prefixes(path: Path, tokenizer: Tokenizer | None) -> tuple[bytes, ...]:
    """`path`: a JSON array of objects with what a chat request begins with: `messages` (a system prompt), `tools`, `reasoning_effort`, …

    As little-endian u32. Raises ConfigError naming the entry.
    """
    if tokenizer is None:
        raise ConfigError("shared_prefixes are rendered with a tokenizer, and this model has none")
    try:
        entries = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"shared_prefixes: {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"shared_prefixes: {path}: not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"shared_prefixes: {path}: expected an array of objects with `messages`")
    return tuple(pack_tokens(_beginning(f"shared_prefixes: {path}: entry {i}", entry, tokenizer)) for i, entry in enumerate(entries))


def _beginning(where: str, entry: Any, tokenizer: Tokenizer) -> list[int]:
    """What the prompts of two conversations have in common that begin with the entry and go on differently."""
    if not isinstance(entry, dict) or not isinstance(entry.get("messages", []), list):
        raise ConfigError(f"{where}: expected an object with `messages`")
    try:
        asked = [
            ChatRequest.model_validate({**entry, "messages": [*entry.get("messages", []), {"role": "user", "content": text}]})
            for text in ("a", "b")
        ]
        one, other = (render(conversation(request), tokenizer).ids for request in asked)
    except (ValidationError, ChatError, InvalidRequest) as error:
        raise ConfigError(f"{where}: {error}") from error
    return [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
