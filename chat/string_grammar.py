"""A string schema → grammar of the raw text, for values that stand in an element and not in JSON quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark

from chat.lark import Lark, literal
from chat.schema import KEYWORDS_OF_A_TYPE, Schema, check_schema
from chat.types import ChatError

_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_ANY = "(?s:.*)"


def string_body(lark: Lark, schema: Schema, path: str) -> str:
    """The body of a value that satisfies `schema`, which says `type: string` and has no combinators or references left.

    Raises `ChatError` naming a keyword that cannot be enforced.
    """
    for key in schema:
        if key not in KEYWORDS_OF_A_TYPE and key not in ("type", "enum", "const"):
            raise ChatError(f"the schema's `{key}` cannot be enforced on a string argument", f"{path}.{key}")
    check_schema(schema, path)
    if "enum" in schema or "const" in schema:
        return _one_of(schema, path)
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    terms = []
    if least or most is not None:
        terms.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if "pattern" in schema:
        terms.append("|".join(_search(part, path) for part in _alternatives(schema["pattern"], f"{path}.pattern")))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise ChatError(f"the format {schema['format']!r} cannot be enforced, only {', '.join(FORMATS)}", f"{path}.format")
        terms.append(FORMATS[schema["format"]])
    return lark.terminal(" & ".join(f"/{term}/" for term in terms or [_ANY]))


def _one_of(schema: Schema, path: str) -> str:
    values: list[Any] = schema["enum"] if "enum" in schema else [schema["const"]]
    strings = [value for value in values if isinstance(value, str) and _allowed(value, schema, path)]
    return f"({' | '.join(literal(value) if value else '' for value in dict.fromkeys(strings))})"


def _allowed(value: str, schema: Schema, path: str) -> bool:
    try:
        matches = re.search(schema.get("pattern", ""), value) is not None
    except re.error as error:
        raise ChatError(f"the schema's `pattern` cannot be enforced: {error}", f"{path}.pattern") from error
    return matches and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))


def _search(alternative: str, path: str) -> str:
    """JSON schema's patterns match anywhere; a grammar's terminals match all of the text."""
    begin = alternative.startswith("^")
    end = alternative.endswith("$")
    body = regex_to_lark(alternative[begin : len(alternative) - end], "dw")
    return f"{'' if begin else _ANY}({body}){'' if end else _ANY}"


def _alternatives(pattern: str, path: str) -> Iterator[str]:
    """The branches of a pattern's top-level `|`. Anchors are understood at the ends of a branch only."""
    begin, depth, in_class = 0, 0, False
    escaped = False
    for i, char in enumerate(pattern):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "|" and depth == 0:
            yield pattern[begin:i]
            begin = i + 1
        elif char in "^$":
            at_edge = i == begin if char == "^" else pattern[i + 1 : i + 2] in ("", "|") and depth == 0
            if not at_edge:
                raise ChatError(f"the schema's `pattern` cannot be enforced: {char!r} inside of it", path)
        else:
            in_class = char == "["
            depth += (char == "(") - (char == ")")
    yield pattern[begin:]
