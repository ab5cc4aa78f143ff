"""JSON schemas that the grammar can enforce: checked at the edge, with the keyword that it cannot.

jsonschema says whether it is a schema, llguidance whether it can be compiled; here their verdicts are given a place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
from llguidance import LLMatcher

from chat.types import ChatError

Schema = Mapping[str, Any]

# Keywords that say nothing about a value.
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$id", "$schema", "$anchor", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
DEFINITIONS = frozenset(("$defs", "definitions"))
# Keywords that speak of values of one type only.
KEYWORDS_OF_A_TYPE = frozenset(
    (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)

MAX_DEPTH = 64  # levels of objects and lists inside one another: compiling grows with the square of it
MAX_COUNT = 1 << 20  # of what a value must at least have; K3's context holds no more tokens
_VALUES = frozenset(("const", "enum", "default", "example", "examples"))
_COUNTS = ("minLength", "minItems", "minProperties")

_SCHEMA_MAPS = ("properties", "patternProperties", *DEFINITIONS)
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")


def check_schema(root: Schema, path: str) -> None:
    """Raises `ChatError` naming the keyword of `root`, at `path` in the request, that is unsupported or cannot be met."""
    try:
        _check_size(root, path, path, 0)
        _check_form(root, path)
        if error := _error(root):
            _blame(root, root, path, error)
        if not _has_finite_value(root):
            raise ChatError("the schema's `$ref` makes every value contain itself, so none can be finished", path)
    except RecursionError as deep:
        raise ChatError("schema nested too deeply", path) from deep


def embed(root: Schema, part: Any) -> dict[str, Any]:
    """`part` of `root` as a schema of its own, whose references still mean the same."""
    moved = _moved(part)
    if not isinstance(moved, dict):
        moved = {} if moved is True else {"anyOf": []}
    if moved == part:
        return moved
    return {**moved, "$defs": {**moved.get("$defs", {}), "root": _moved(root)}}


def resolve(root: Schema, reference: str) -> Any:
    """What a reference inside the schema (`#/a/b`) points to; None where nothing is."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target: Any = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            return None
        target = target[key]
    return target


def _check_size(value: Any, path: str, where: str, depth: int) -> None:
    """Nothing is compiled of what is nested too deeply or can never be finished."""
    if depth > MAX_DEPTH:
        raise ChatError(f"schema nested too deeply: more than {MAX_DEPTH} levels", path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in _COUNTS and type(inner) is int and inner > MAX_COUNT:
                raise ChatError(f"the schema's `{key}` cannot be met: at most {MAX_COUNT:,}", f"{where}.{key}")
            if key not in _VALUES:
                _check_size(inner, path, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_size(inner, path, f"{where}[{i}]", depth + 1)


def _check_form(root: Schema, path: str) -> None:
    """Is it a JSON schema at all, of the draft that it names?"""
    try:
        jsonschema.validators.validator_for(root, default=jsonschema.Draft202012Validator).check_schema(root)
    except jsonschema.SchemaError as error:
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
        raise ChatError(f"not a JSON schema, at `{where.removeprefix('.')}`: {error.message[:300]}", f"{path}{where}") from error


def _error(schema: Schema) -> str:
    """llguidance's complaint, "" for none."""
    try:
        return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a Rust panic has no importable type
            raise
        return "llguidance cannot read it"


def _blame(root: Schema, schema: Schema, path: str, error: str) -> None:
    """Adds keyword by keyword until the schema fails; goes on inside that keyword's value where the fault lies there."""
    grown: dict[str, Any] = {}
    for key, value in schema.items():
        grown[key] = value
        if (key in DEFINITIONS and schema is root) or not (failed := _error(embed(root, grown))):
            continue
        for part, where in _parts(key, value, f"{path}.{key}"):
            if inner := _error(embed(root, part)):
                _blame(root, part, where, inner)
        raise ChatError(f"the schema's `{key}` cannot be enforced: {_reason(failed)}", f"{path}.{key}")
    raise ChatError(f"the schema cannot be enforced: {_reason(error)}", path)


def _parts(key: str, value: Any, path: str) -> Iterator[tuple[Schema, str]]:
    if key in _SCHEMA_MAPS and isinstance(value, Mapping):
        found = [(part, f"{path}.{name}") for name, part in value.items()]
    elif key in _SCHEMA_LISTS and isinstance(value, list):
        found = [(part, f"{path}[{i}]") for i, part in enumerate(value)]
    else:
        found = [(value, path)] if key in _SCHEMAS else []
    yield from ((part, where) for part, where in found if isinstance(part, Mapping))


def _has_finite_value(root: Schema) -> bool:
    """Can a value end? Grows the set of references that have a finite value until nothing is added."""
    targets = {reference: resolve(root, reference) for reference in _references(root)}
    finite: set[str] = set()
    while added := {r for r, target in targets.items() if r not in finite and _is_finite(target, finite)}:
        finite |= added
    return _is_finite(root, finite)


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Has `schema` a finite value, when of the references those in `finite` have one?"""
    if not isinstance(schema, Mapping):
        return schema is not False
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in finite:
        return False
    if not all(_is_finite(part, finite) for part in schema.get("allOf", ())):
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_is_finite(part, finite) for part in schema[key]):
            return False
    match schema.get("type"):
        case "object" | ["object"]:
            properties = schema.get("properties", {})
            return all(_is_finite(properties.get(name, True), finite) for name in schema.get("required", ()))
        case "array" | ["array"]:
            first = schema.get("prefixItems", ())[: schema.get("minItems", 0)]
            rest = schema.get("minItems", 0) > len(schema.get("prefixItems", ()))
            return all(_is_finite(part, finite) for part in first) and (not rest or _is_finite(schema.get("items", True), finite))
    return True


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = [inner for key, inner in value.items() if key not in ("const", "enum")]
    if isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _reason(error: str) -> str:
    """llguidance's sentence without its advice on options and its drawing of a regex."""
    first = error.split("Enable '")[0].strip()
    return " ".join(first.split())[:300]


def _moved(value: Any) -> Any:
    if isinstance(value, Mapping):
        moved = {}
        for key, inner in value.items():
            local = key == "$ref" and isinstance(inner, str) and inner.startswith("#")
            moved[key] = f"#/$defs/root{inner[1:]}" if local else inner if key in ("const", "enum") else _moved(inner)
        return moved
    return [_moved(inner) for inner in value] if isinstance(value, list) else value
