"""A grammar under construction, in llguidance's dialect of lark. Control tokens are named as in the vocabulary: `<|open|>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# How values are written: no line breaks, and spaces only where K3's own rendering has them.
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """Collects rules and terminals; equal ones share a name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # body → name

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._name("r", body)

    def terminal(self, body: str) -> str:
        """The name of a terminal with this body: regexes, joined by `&` where all must match."""
        return self._name("T", body)

    def grammar(self, start: str) -> str:
        lines = [f"{name}: {body}" for body, name in self._names.items()]
        return "\n".join(("%llguidance {}", f"start: {start}", *lines))

    def _name(self, prefix: str, body: str) -> str:
        return self._names.setdefault(body, f"{prefix}{len(self._names)}")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def close(word: str) -> str:
    return f"<|close|> {literal(word)} <|sep|>"


def json_value(schema: Mapping[str, Any], style: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': style}, ensure_ascii=False)}"
