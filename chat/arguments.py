"""The values of one tool call → one strict JSON object, written as it grows.

A string goes out as it comes, escaped piece by piece. Any other value is held until it is closed: one that is not strict JSON becomes a
string, and that is known only at its end. Numbers keep the model's own spelling, so big ones lose nothing.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any, NoReturn


class _Value(Enum):
    NONE = auto()  # no value is open, or one to be ignored
    STRING = auto()
    JSON = auto()
    WHOLE = auto()  # a ‹json› element: all arguments at once


class ArgumentsWriter:
    """Every method returns the fragment that the object grows by; all fragments joined are the object. Of equal keys the last one wins."""

    def __init__(self) -> None:
        self._value = _Value.NONE
        self._key = ""
        self._held: list[str] = []
        self._empty = True  # nothing was written
        self._complete = False  # the object is closed

    def open(self, key: str | None, kind: str) -> str:
        """An argument begins. One without a key is ignored."""
        self._held = []
        if key is None or self._complete:
            self._value = _Value.NONE
            return ""
        self._key = key
        self._value = _Value.STRING if kind == "string" else _Value.JSON
        return f'{self._lead()}"' if kind == "string" else ""

    def whole(self) -> str:
        """A ‹json› element begins: the raw object. Ignored when arguments came before it."""
        self._held = []
        self._value = _Value.WHOLE if self._empty else _Value.NONE
        return ""

    def text(self, text: str) -> str:
        if self._value is _Value.STRING:
            return _escaped(text)
        self._held.append(text)
        return ""

    def close(self) -> str:
        """The open value ends."""
        value, text = self._value, "".join(self._held)
        self._value, self._held = _Value.NONE, []
        match value:
            case _Value.STRING:
                return '"'
            case _Value.JSON:
                return self._lead() + (text.strip() if _strict_json(text) is not _INVALID else f'"{_escaped(text)}"')
            case _Value.WHOLE if isinstance(_strict_json(text), dict):
                self._empty, self._complete = False, True
                return text.strip()
        return ""

    def end(self) -> str:
        """The call ends: what is missing of the object."""
        if self._complete:
            return ""
        return "{}" if self._empty else "}"

    def _lead(self) -> str:
        opening = "{" if self._empty else ", "
        self._empty = False
        return f"{opening}{json.dumps(self._key, ensure_ascii=False)}: "


_INVALID = object()


def _strict_json(text: str) -> Any:
    """The decoded value, or `_INVALID`: not JSON, NaN or Infinity (which Python accepts), or too deep to read."""
    try:
        return json.loads(text, parse_constant=_reject, parse_int=str)
    except (ValueError, RecursionError):
        return _INVALID


def _reject(constant: str) -> NoReturn:
    raise ValueError(constant)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
