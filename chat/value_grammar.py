"""The schema of one tool argument → for every type its value may have, the grammar of that value.

K3 writes the type of an argument in its tag, strings raw and everything else as JSON, so unions are taken apart here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from chat.lark import SPACED, Lark, json_value
from chat.schema import ANNOTATIONS, DEFINITIONS, Schema, check_schema, embed, resolve
from chat.string_grammar import string_body
from chat.types import ChatError

# JSON schema's types and how K3 calls them.
TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}
_ALL = tuple(t for t in TYPES if t != "integer")


def value_bodies(lark: Lark, root: Schema, schema: Any, path: str) -> dict[str, str]:
    """K3's type → body, for `schema` at `path` inside `root`; empty when nothing satisfies it.

    Raises `ChatError` naming a keyword that cannot be enforced.
    """
    bodies: dict[str, str] = {}
    for single in _single_typed(root, schema, path, ()):
        kind = TYPES[single["type"]]
        body = string_body(lark, single, path) if kind == "string" else _json_body(root, single, path)
        bodies[kind] = f"{bodies[kind]} | {body}" if kind in bodies else body
    return bodies


def _json_body(root: Schema, schema: Schema, path: str) -> str:
    alone = embed(root, schema)
    check_schema(alone, path)
    return json_value(alone, SPACED)


def _single_typed(root: Schema, schema: Any, path: str, seen: tuple[str, ...]) -> list[dict[str, Any]]:
    """`schema` as alternatives that have one type each and no reference or combinator at their top."""
    if isinstance(schema, bool):
        return [{"type": t} for t in _ALL] if schema else []
    if not isinstance(schema, Mapping):
        raise ChatError("expected a JSON schema object", path)
    rest = {key: value for key, value in schema.items() if key not in ANNOTATIONS and key not in DEFINITIONS}
    if "$ref" in rest:
        reference = rest.pop("$ref")
        target = resolve(root, reference) if isinstance(reference, str) else None
        if target is None:
            raise ChatError(f"the schema's `$ref` points to nothing: {reference!r}", f"{path}.$ref")
        if reference in seen:
            return []  # a value cannot contain itself
        return _single_typed(root, _both(target, rest, f"{path}.$ref"), path, (*seen, reference))
    for key in ("anyOf", "oneOf"):
        if key in rest:
            branches = rest.pop(key)
            where = f"{path}.{key}"
            found = [_single_typed(root, _both(b, rest, where), f"{where}[{i}]", seen) for i, b in enumerate(branches)]
            kinds = [{TYPES[single["type"]] for single in branch} for branch in found]
            if key == "oneOf" and sum(map(len, kinds)) > len(set().union(*kinds)):
                raise ChatError("the schema's `oneOf` cannot be enforced: its branches share a type", where)
            return [single for branch in found for single in branch]
    if "allOf" in rest:
        parts = rest.pop("allOf")
        for part in parts:
            rest = _both(part, rest, f"{path}.allOf")
        return _single_typed(root, rest, path, seen)
    return _by_type(rest, path)


def _by_type(schema: dict[str, Any], path: str) -> list[dict[str, Any]]:
    named = schema.get("type", _ALL)
    types = [named] if isinstance(named, str) else list(named)
    for name in types:
        if name not in TYPES:
            raise ChatError(f"unknown type {name!r}, expected one of {', '.join(TYPES)}", f"{path}.type")
    if "enum" not in schema and "const" not in schema:
        return [{**schema, "type": t} for t in types]
    rest = {key: value for key, value in schema.items() if key not in ("enum", "const")}
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    singles = []
    for t in types:
        mine = [value for value in values if _has_type(value, t)]
        if mine:
            singles.append({**rest, "type": t, "enum": mine})
    if not singles:
        raise ChatError("the schema's `enum` has no value of its type", f"{path}.enum")
    return singles


def _has_type(value: Any, name: str) -> bool:
    match value:
        case bool():
            return name == "boolean"
        case int():
            return name in ("integer", "number")
        case float():
            return name == "number" or (name == "integer" and value.is_integer())
        case str():
            return name == "string"
        case None:
            return name == "null"
        case Mapping():
            return name == "object"
    return name == "array"


def _both(a: Any, b: Mapping[str, Any], path: str) -> Any:
    """What satisfies both, when no keyword would have to be intersected."""
    if isinstance(a, bool):
        return dict(b) if a else False
    if not isinstance(a, Mapping):
        raise ChatError("expected a JSON schema object", path)
    mine = {key: value for key, value in a.items() if key not in ANNOTATIONS}
    for key in mine.keys() & b.keys():
        if json.dumps(mine[key]) != json.dumps(b[key]):
            raise ChatError(f"`{key}` stands here and in what this is combined with: that cannot be enforced", path)
    return {**mine, **b}
