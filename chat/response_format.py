"""`response_format` read once, for the renderer and the grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chat.types import ChatError

_PATH = "response_format"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    kind: Literal["text", "json_object", "json_schema"]
    schema: Mapping[str, Any] | None = None  # of json_schema alone
    strict: bool = True


def read_response_format(value: Any) -> ResponseFormat:
    """OpenAI's `response_format`; absent means text, `strict` defaults to true. Raises `ChatError` with the path of a bad field."""
    if value is None:
        return ResponseFormat("text")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text" or kind == "json_object":
        return ResponseFormat(kind)
    if kind != "json_schema":
        raise ChatError(f"unknown response format {kind!r}, expected text, json_object or json_schema", f"{_PATH}.type")
    form = value.get("json_schema")
    if not isinstance(form, Mapping):
        raise ChatError("expected {'name': …, 'schema': {…}}", f"{_PATH}.json_schema")
    if not isinstance(form.get("schema"), Mapping):
        raise ChatError("expected a JSON schema object", f"{_PATH}.json_schema.schema")
    strict = form.get("strict", True)
    if strict is not None and not isinstance(strict, bool):
        raise ChatError("expected true or false", f"{_PATH}.json_schema.strict")
    return ResponseFormat(kind, form["schema"], strict is not False)
