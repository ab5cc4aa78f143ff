"""Request fields → thinking on or off, and how hard. Implementations differ; where K3's own tests say something, they decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chat.types import ChatError

DEFAULT_EFFORT = "max"
# What K3 knows is low, high and max; the other names are common among clients.
EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}
_OFF = "none"


@dataclass(frozen=True, slots=True)
class Options:
    thinking: bool
    effort: str | None  # low, high or max; None without thinking


def read_options(request: Mapping[str, Any]) -> Options:
    """Reads `thinking`, `reasoning_effort` and `chat_template_kwargs` of a chat request; other fields are not looked at.

    An explicit switch wins over an effort of "none"; `thinking.effort` wins over `reasoning_effort`. `thinking.keep` is not read:
    K3 always keeps the whole thinking history. Raises `ChatError` for a value that is none of the known ones.
    """
    thinking = _mapping(request, "thinking")
    template = _mapping(request, "chat_template_kwargs")
    efforts = [
        _effort(thinking.get("effort"), "thinking.effort"),
        _effort(request.get("reasoning_effort"), "reasoning_effort"),
        _effort(template.get("thinking_effort"), "chat_template_kwargs.thinking_effort"),
    ]
    effort = next((e for e in efforts if e is not None), None)
    switches = [
        _type(thinking.get("type")),
        _switch(template, "thinking"),
        _switch(template, "enable_thinking"),
        False if effort == _OFF else None,
    ]
    if not next((s for s in switches if s is not None), True):
        return Options(thinking=False, effort=None)
    return Options(thinking=True, effort=DEFAULT_EFFORT if effort in (None, _OFF) else effort)


def _mapping(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ChatError(f"expected an object, got {type(value).__name__}", key)
    return value


def _effort(value: Any, param: str) -> str | None:
    if value is None or value == _OFF:
        return value
    if not isinstance(value, str) or value not in EFFORTS:
        raise ChatError(f"unknown thinking effort {value!r}, expected one of {', '.join(('none', *EFFORTS))}", param)
    return EFFORTS[value]


def _type(value: Any) -> bool | None:
    match value:
        case None:
            return None
        case "enabled" | "adaptive":
            return True
        case "disabled":
            return False
    raise ChatError(f"unknown thinking type {value!r}, expected enabled, disabled or adaptive", "thinking.type")


def _switch(template: Mapping[str, Any], key: str) -> bool | None:
    value = template.get(key)
    if value is not None and not isinstance(value, bool):
        raise ChatError(f"expected true or false, got {type(value).__name__}", f"chat_template_kwargs.{key}")
    return value
