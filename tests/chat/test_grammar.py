from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.constraint import Constraint
from chat.grammar import constraint_for
from chat.matcher import MatcherFactory
from chat.parse import OutputParser
from chat.render import render
from chat.reply import Reply, collect, parse
from chat.tokenizer import Tokenizer
from chat.types import Channel, ChatError, Conversation
from tests.chat.sampling import FACTORY, TINY, random_reply

USER = {"role": "user", "content": "q"}
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def tool(name: str = "f", parameters: Any = None, *, strict: bool | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


def reply_to(conversation: Conversation, seed: int, **options: Any) -> Reply:
    """A random reply, parsed; the turn is over behind it, and its canonical form is read the same in any grouping."""
    prompt = render(conversation, TINY)
    constraint = constraint_for(conversation, prompt.opened, **options)
    assert constraint is not None
    ids = random_reply(FACTORY.create(constraint.to_json()), seed)
    assert ids[-1] == TINY.end_of_msg
    assert TINY.decode(ids).endswith("<|close|>message<|sep|><|end_of_msg|>")
    parser = OutputParser(TINY, opened=prompt.opened)
    reply = collect([delta for i in ids for delta in parser.push([i])])
    assert reply == parse(ids, TINY, opened=prompt.opened)
    return reply


def assert_compact(text: str) -> None:
    assert not re.search(r"\s", STRING.sub('""', text))


TEXTS = st.builds(
    lambda **k: {"type": "string", **{key: v for key, v in k.items() if v is not None}},
    minLength=st.none() | st.integers(0, 2),
    maxLength=st.none() | st.integers(2, 6),
) | st.sampled_from(
    [
        {"type": "string", "pattern": "^[a-c]+$"},
        {"type": "string", "pattern": "x|^y$"},
        {"type": "string", "pattern": "a/b\\d", "maxLength": 9},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "enum": ["", "a", 'b"&', "é\n"]},
        {"const": "only"},
    ]
)
SCALARS = st.one_of(
    TEXTS,
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "number", "minimum": -2.5, "exclusiveMaximum": 1e3}),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, st.integers(-50, 50), st.integers(-50, 50)),
    st.just({"enum": [1, "a", None, True, [1, 2], {"k": 2.5}]}),
    st.just({"type": ["integer", "null"]}),
    st.just({"$ref": "#/$defs/item"}),
    st.just({"$ref": "#/$defs/tree", "description": "recursive"}),
)
NAMES = st.sampled_from(["a", "b", 'q"&', "größe", "$ref", "x y"])
DEFS = {
    "item": {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"], "additionalProperties": False},
    "tree": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
        "additionalProperties": False,
    },
}


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], required: set[str], closed: bool) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": sorted(required & properties.keys())}
        return {**schema, "additionalProperties": False} if closed else schema

    return st.builds(build, st.dictionaries(NAMES, values, max_size=4), st.sets(NAMES), st.booleans())


def arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        values,
        st.integers(0, 2),
        st.integers(0, 2),
    )


VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(objects(inner), arrays(inner), st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)), max_leaves=6
)
SCHEMAS = VALUES.map(lambda schema: {**schema, "$defs": DEFS})
PARAMETERS = objects(VALUES).map(lambda schema: {**schema, "$defs": DEFS})
SEEDS = st.integers(0, 2**32)


@settings(max_examples=40)
@given(SCHEMAS, SEEDS, st.booleans(), st.booleans())
def test_an_answer_satisfies_its_schema(schema: dict[str, Any], seed: int, thinking: bool, tools: bool) -> None:
    conversation = Conversation(
        messages=[USER], response_format=json_schema(schema), thinking=thinking, tools=[tool("g", {"type": "object"})] if tools else []
    )
    reply = reply_to(conversation, seed)
    if reply.content or not tools:
        jsonschema.validate(json.loads(reply.content), schema)
        assert_compact(reply.content)
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert reply.content or reply.tool_calls
    assert thinking or not reply.reasoning


@settings(max_examples=40)
@given(st.lists(PARAMETERS, min_size=1, max_size=3), SEEDS, st.booleans(), st.sampled_from(["auto", "required", "named"]))
def test_calls_of_strict_tools_satisfy_their_schema(parameters: list[dict[str, Any]], seed: int, thinking: bool, choice: str) -> None:
    tools = [tool(f"f{i}", schema, strict=True) for i, schema in enumerate(parameters)]
    named = {"type": "function", "function": {"name": "f0"}}
    conversation = Conversation(messages=[USER], tools=tools, tool_choice=named if choice == "named" else choice, thinking=thinking)
    reply = reply_to(conversation, seed)
    for call in reply.tool_calls:
        jsonschema.validate(json.loads(call.arguments), parameters[int(call.name[1:])])
    if choice == "named":
        assert [call.name for call in reply.tool_calls] == ["f0"]
    elif choice == "required":
        assert reply.tool_calls


@settings(max_examples=40)
@given(SEEDS, st.booleans())
def test_a_forced_call_of_a_loose_tool_has_an_object_for_arguments(seed: int, thinking: bool) -> None:
    """What cannot be enforced is left free where nobody asked for strictness."""
    tools = [tool("f", {"type": "object", "not": {"required": ["a"]}}), tool("g", {"type": "object"}), tool("h")]
    reply = reply_to(Conversation(messages=[USER], tools=tools, tool_choice="required", thinking=thinking), seed)
    assert reply.tool_calls
    for call in reply.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
        if call.name == "h":
            assert call.arguments == "{}"


def test_a_forced_call_of_a_loose_tool_keeps_to_a_schema_that_can_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    conversation = Conversation(messages=[USER], tools=[tool("f", schema)], tool_choice="required")
    for seed in range(5):
        for call in reply_to(conversation, seed).tool_calls:
            jsonschema.validate(json.loads(call.arguments), schema)


def test_properties_may_come_in_any_order() -> None:
    schema = {"type": "object", "properties": {n: {"type": "null"} for n in "abc"}, "required": ["c"]}
    conversation = Conversation(messages=[USER], tools=[tool("f", schema, strict=True)], tool_choice="required", thinking=False)
    seen = {tuple(json.loads(call.arguments)) for seed in range(60) for call in reply_to(conversation, seed).tool_calls}
    assert {("c",), ("a", "c"), ("c", "b")} <= seen
    assert all("c" in keys for keys in seen)


def test_many_properties_come_as_declared() -> None:
    names = "hgfedcba"
    schema = {"type": "object", "properties": {n: {"type": "null"} for n in names}, "required": list(names)}
    conversation = Conversation(messages=[USER], tools=[tool("f", schema, strict=True)], tool_choice="required", thinking=False)
    (call, *_) = reply_to(conversation, 1).tool_calls
    assert list(json.loads(call.arguments)) == list(names)


def test_without_parallel_calls_there_is_one_at_most() -> None:
    conversation = Conversation(messages=[USER], tools=[tool(), tool("g")], thinking=False)
    counts = {len(reply_to(conversation, seed, parallel_tool_calls=False).tool_calls) for seed in range(20)}
    assert counts == {0, 1}


def test_json_object() -> None:
    for seed in range(5):
        reply = reply_to(Conversation(messages=[USER], response_format={"type": "json_object"}), seed)
        assert isinstance(json.loads(reply.content), dict)
        assert_compact(reply.content)


def test_a_schema_that_is_not_strict_still_gives_json() -> None:
    for seed in range(5):
        json.loads(reply_to(Conversation(messages=[USER], response_format=json_schema({"not": {}}, strict=False)), seed).content)


def test_tool_choice_none_leaves_the_answer_alone() -> None:
    conversation = Conversation(messages=[USER], tools=[tool(strict=True)], tool_choice="none", response_format={"type": "json_object"})
    for seed in range(5):
        assert not reply_to(conversation, seed).tool_calls


def test_tools_of_system_messages_count() -> None:
    messages = [{"role": "system", "tools": [tool("late", {"type": "object", "properties": {}}, strict=True)]}, USER]
    reply = reply_to(Conversation(messages=messages, tool_choice="required"), 3)
    assert {call.name for call in reply.tool_calls} == {"late"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [tool("f", {"type": "object"})]},
        {"tools": [tool("f", {"not": {}}, strict=True)], "tool_choice": "none"},
    ],
)
def test_nothing_to_enforce(fields: dict[str, Any]) -> None:
    assert constraint_for(Conversation(messages=[USER], **fields), "think") is None


def test_a_constraint_travels_as_json() -> None:
    constraint = constraint_for(Conversation(messages=[USER], response_format={"type": "json_object"}), "think")
    assert constraint is not None
    assert Constraint.from_json(constraint.to_json()) == constraint
    assert json.loads(constraint.to_json())["trigger"] == "think_left"


@pytest.mark.parametrize(
    ("content", "whole"),
    [('{"a":', True), ("", True), ('{"a":12', True)],
)
def test_a_continued_answer_is_one_value_with_what_is_there(content: str, whole: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    messages = [USER, {"role": "assistant", "content": content, "partial": True}]
    reply = reply_to(Conversation(messages=messages, response_format=json_schema(schema), thinking=False), 5)
    jsonschema.validate(json.loads(content + reply.content), schema)


def test_a_continued_answer_that_cannot_become_valid_is_refused() -> None:
    messages = [USER, {"role": "assistant", "content": "Sure, here it is:", "partial": True}]
    with pytest.raises(ChatError) as error:
        constraint_for(Conversation(messages=messages, response_format={"type": "json_object"}), "response")
    assert error.value.param == "messages[1].content"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


ROOT = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"not": {}}, f"{ROOT}.not"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "a(?=b)"}}}, f"{ROOT}.properties.a.pattern"),
        (
            {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}},
            f"{ROOT}.items.anyOf[1].uniqueItems",
        ),
        ({"type": "integer", "minimum": 3, "maximum": 2}, f"{ROOT}.maximum"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, f"{ROOT}.maxLength"),
        ({"enum": []}, f"{ROOT}.enum"),
        ({"type": "object", "required": ["x"], "additionalProperties": False}, f"{ROOT}.additionalProperties"),
        ({"type": "thing"}, f"{ROOT}.type"),
        ({"$ref": "#/$defs/none"}, f"{ROOT}.$ref"),
        ({"$ref": "https://example.com/schema"}, f"{ROOT}.$ref"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ROOT),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ROOT),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ROOT),
        ({"type": "string", "minLength": 10**9}, f"{ROOT}.minLength"),
        ({"type": "object", "properties": {"a": {"type": "array", "minItems": 2**20 + 1}}}, f"{ROOT}.properties.a.minItems"),
        (nested(900), ROOT),
    ],
)
def test_an_answers_schema_that_cannot_be_enforced_is_refused_by_its_keyword(schema: Any, param: str) -> None:
    with pytest.raises(ChatError) as error:
        constraint_for(Conversation(messages=[USER], response_format=json_schema(schema)), "think")
    assert error.value.param == param
    if param != ROOT:
        assert re.split(r"[.\]]", param)[-1] in str(error.value)


ARGS = "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "array"}, f"{ARGS}.type"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, f"{ARGS}.anyOf"),
        ({"type": "object", "minProperties": 1}, f"{ARGS}.minProperties"),
        ({"$ref": "#/$defs/none"}, f"{ARGS}.$ref"),
        ({"$ref": "#"}, ARGS),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, f"{ARGS}.additionalProperties"),
        ({"properties": {"a": {"type": "string", "format": "uri"}}}, f"{ARGS}.properties.a.format"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, f"{ARGS}.properties.a.not"),
        ({"properties": {"a": {"type": "string", "pattern": "a(^b)"}}}, f"{ARGS}.properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "pattern": "^a$", "minLength": 2}}}, f"{ARGS}.properties.a.minLength"),
        ({"properties": {"a": {"type": "array", "contains": {}}}}, f"{ARGS}.properties.a.contains"),
        ({"properties": {"a": {"type": "widget"}}}, f"{ARGS}.properties.a.type"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, f"{ARGS}.properties.a.enum"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, f"{ARGS}.properties.a.$ref"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, f"{ARGS}.properties.a.oneOf"),
        ({"properties": {"a": {"allOf": [{"minLength": 1}, {"minLength": 2}]}}}, f"{ARGS}.properties.a.allOf"),
        ({"properties": {"a": 3}}, f"{ARGS}.properties.a"),
        ({"properties": {"a": {"type": "string", "minLength": 10**9}}}, f"{ARGS}.properties.a.minLength"),
        ({"properties": {"a": nested(100)}}, ARGS),
    ],
)
def test_a_strict_tools_schema_that_cannot_be_enforced_is_refused_by_its_keyword(schema: Any, param: str) -> None:
    with pytest.raises(ChatError) as error:
        constraint_for(Conversation(messages=[USER], tools=[tool("f", schema, strict=True)]), "think")
    assert error.value.param == param


@pytest.mark.parametrize(
    "value",
    [
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        {"allOf": [{"type": "string"}, {"maxLength": 3}]},
        {"$ref": "#/$defs/item", "title": "t"},
        {"anyOf": [{"minLength": 2}, {"maximum": 3}], "type": ["string", "integer"]},
        {"type": "string", "enum": ["aa", "b"], "pattern": "^a"},
        {"type": "object", "properties": {"self": {"$ref": "#/properties/v"}}, "additionalProperties": False},
        True,
        {},
    ],
)
def test_unions_references_and_anything(value: Any) -> None:
    schema = {"type": "object", "properties": {"v": value}, "required": ["v"], "$defs": DEFS}
    conversation = Conversation(messages=[USER], tools=[tool("f", schema, strict=True)], tool_choice="required", thinking=False)
    for seed in range(8):
        for call in reply_to(conversation, seed).tool_calls:
            jsonschema.validate(json.loads(call.arguments), schema)


def test_open_objects_take_any_key() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "boolean"}}
    conversation = Conversation(messages=[USER], tools=[tool("f", schema, strict=True)], tool_choice="required", thinking=False)
    calls = [call for seed in range(20) for call in reply_to(conversation, seed).tool_calls]
    assert any(json.loads(call.arguments) for call in calls)
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schema)


@pytest.fixture(scope="module")
def published_matchers(published: Tokenizer) -> MatcherFactory:
    return MatcherFactory(published)


@pytest.mark.parametrize("opened", ["think", "response"])
def test_the_published_vocabulary(opened: Channel, published: Tokenizer, published_matchers: MatcherFactory) -> None:
    """The canonical reply is what the grammar allows, id by id."""
    thinking = opened == "think"
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
    question = Conversation(messages=[USER], tools=[tool("f", schema, strict=True)], tool_choice="required", thinking=thinking)
    calls = [{"id": "1", "function": {"name": "f", "arguments": {"n": 2, "city": "北京 🫠"}}}]
    answer = {"role": "assistant", "content": "so", "reasoning_content": "because", "tool_calls": calls}
    whole = render(Conversation(messages=[USER, answer], tools=question.tools, thinking=thinking, generation_prompt=False), published)
    begin = len(render(Conversation(messages=[USER], tools=question.tools, thinking=thinking), published).ids)
    constraint = constraint_for(question, opened)
    assert constraint is not None
    matcher = published_matchers.create(constraint.to_json())
    for token_id in whole.ids[begin:]:
        assert matcher.consume(token_id)
    assert matcher.mask() is None
