"""The tools channel as grammar: calls by name, arguments by schema, in K3's own elements.

A call is `‹call tool="…" index="…"›` with one `‹argument key="…" type="…"›value‹/argument›` a property: strings raw, everything else as
JSON. So a schema's top level becomes rules here, and what lies below is llguidance's JSON grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chat.attributes import escape
from chat.lark import Lark, close, literal
from chat.schema import ANNOTATIONS, DEFINITIONS, KEYWORDS_OF_A_TYPE, Schema, check_schema, resolve
from chat.tools import Tool
from chat.types import ChatError
from chat.value_grammar import value_bodies

# So few properties may come in any order; more would need too many rules (two to that power), so they come as declared.
ANY_ORDER = 6

_FREE = True  # the schema that everything satisfies
_QUOTE = '"'
_TYPE = '" type="'


def tools_channel(lark: Lark, tools: Sequence[Tool], *, forced: bool, several: bool) -> str:
    """The rule of the whole channel, with at least one call.

    The arguments of a strict tool satisfy its schema. A forced call of another tool keeps to its schema as well where that can be
    enforced; otherwise the arguments are free, and still one JSON object. Raises `ChatError` for a strict schema that cannot be enforced.
    """
    calls = [_call(lark, tool, forced=forced) for tool in tools]
    call = lark.rule(" | ".join(calls))
    return lark.rule(f'<|open|> "tools" <|sep|> {call}{"+" if several else ""} {close("tools")}')


def _call(lark: Lark, tool: Tool, *, forced: bool) -> str:
    if tool.strict:
        arguments = _arguments(lark, tool)
    else:
        arguments = _arguments_if_possible(lark, tool) if forced else _any_arguments(lark, {}, _FREE, tool.path)
    head = literal(f'call tool="{escape(tool.name)}" index="')
    index = lark.terminal("/[1-9][0-9]?/")
    return lark.rule(f"<|open|> {head} {index} {literal(_QUOTE)} <|sep|> {arguments} {close('call')}")


def _arguments_if_possible(lark: Lark, tool: Tool) -> str:
    try:
        return _arguments(lark, tool)
    except ChatError:
        return _any_arguments(lark, {}, _FREE, tool.path)


def _arguments(lark: Lark, tool: Tool) -> str:
    """All arguments of a call, by the tool's schema. A tool without parameters takes none."""
    path = f"{tool.path}.function.parameters"
    if tool.parameters is None:
        return ""
    root = tool.parameters
    check_schema(root, path)
    schema = _object_schema(root, path)
    others = schema.get("additionalProperties", _FREE)
    properties = dict(schema.get("properties", {}))
    required = list(dict.fromkeys(schema.get("required", ())))
    for name in required:
        properties.setdefault(name, others)
    if not properties:
        return _any_arguments(lark, root, others, f"{path}.additionalProperties")
    rules: dict[str, str] = {}
    for name, value in properties.items():
        bodies = value_bodies(lark, root, value, f"{path}.properties.{name}")
        assert bodies or name not in required, "check_schema finds what cannot be met"
        if bodies:
            rules[name] = _argument(lark, literal(f'argument key="{escape(name)}{_TYPE}'), bodies)
    must = [name in required for name in rules]
    return _in_any_order(lark, list(rules.values()), must) if len(rules) <= ANY_ORDER else _as_declared(list(rules.values()), must)


def _object_schema(root: Schema, path: str) -> Mapping[str, Any]:
    schema: Any = root
    seen = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        schema = resolve(root, reference)
    if not isinstance(schema, Mapping) or "$ref" in schema:
        raise ChatError("the schema's `$ref` points to no object schema", f"{path}.$ref")
    if schema.get("type", "object") not in ("object", ["object"]):
        raise ChatError(f"arguments are an object, so the schema's `type` cannot be {schema['type']!r}", f"{path}.type")
    enforced = {"type", "properties", "required", "additionalProperties", *ANNOTATIONS, *DEFINITIONS}
    of_objects = {"patternProperties", "minProperties", "maxProperties"}
    for key in schema:
        if key not in enforced and (key in of_objects or key not in KEYWORDS_OF_A_TYPE):
            raise ChatError(f"the schema's `{key}` cannot be enforced on the arguments of a call", f"{path}.{key}")
    return schema


def _any_arguments(lark: Lark, root: Schema, schema: Any, path: str) -> str:
    """Arguments with any keys. Of equal keys the last one wins, so these are one object as well."""
    bodies = value_bodies(lark, root, schema, path)
    if not bodies:
        return ""
    key = lark.terminal('/([^"&]|&amp;|&quot;)+/')
    argument = _argument(lark, f"{literal('argument key=' + _QUOTE)} {key} {literal(_TYPE)}", bodies)
    return f"{argument}*"


def _argument(lark: Lark, head: str, bodies: Mapping[str, str]) -> str:
    values = (f"{literal(kind + _QUOTE)} <|sep|> {lark.rule(body)}" for kind, body in bodies.items())
    return lark.rule(f"<|open|> {head} ({' | '.join(values)}) {close('argument')}")


def _in_any_order(lark: Lark, arguments: Sequence[str], must: Sequence[bool]) -> str:
    """Each at most once, the `must` ones exactly once: one rule for every set of arguments that are still to come."""
    rules: dict[int, str] = {}
    for left in range(1 << len(arguments)):
        come = [i for i in range(len(arguments)) if left >> i & 1]
        choices = [f"{arguments[i]} {rules[left & ~(1 << i)]}" for i in come]
        if not any(must[i] for i in come):
            choices.append('""')
        rules[left] = lark.rule(" | ".join(choices))
    return rules[(1 << len(arguments)) - 1]


def _as_declared(arguments: Sequence[str], must: Sequence[bool]) -> str:
    return " ".join(argument if needed else f"{argument}?" for argument, needed in zip(arguments, must, strict=True))
