"""Work that is too long for the event loop, and how long it will be: by the text and the values that it goes through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Prompts longer than this are rendered beside the event loop, which meanwhile goes on with everybody else's tokens.
LONG_CHARS = 20_000
NODE_CHARS = 200  # text that is rendered while a node of a schema is compiled


async def beside_the_loop(chars: int, work: Callable[[], T]) -> T:
    """In a thread when it goes through many characters."""
    return work() if chars < LONG_CHARS else await asyncio.to_thread(work)


def nodes(value: Any) -> int:
    """How many values there are inside one another, however deep."""
    found, waiting = 0, [value]
    while waiting:
        found += 1
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Roughly how much text there is: strings and the texts of parts."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return total
