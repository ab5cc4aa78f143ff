from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.grammar import constraint_for
from chat.history import judge
from chat.render import render
from chat.tokenizer import Tokenizer
from chat.types import ChatError, Conversation
from chat.validate import validate


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}, **function}}


TINY = Tokenizer.tiny()
USER = {"role": "user", "content": "q"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$id": "x", "type": "object"}, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tools": [tool(), tool("g_2-x", strict=True), tool("größe")], "tool_choice": "required"},
        {"tools": [tool()], "tool_choice": NAMED},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "system", "content": "", "tools": [tool()]}, USER], "tool_choice": "required"},
        {"messages": [{"role": "system", "tools": [tool()]}, USER], "tool_choice": NAMED},
        {"messages": [USER, {"role": "assistant", "content": "a", "partial": True}]},
        {"messages": [{"role": "assistant", "content": "a", "partial": False}, USER]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c"}]},
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}]},
        {"response_format": {"type": "text"}},
        {"response_format": SCHEMA},
    ],
)
def test_accepted(fields: dict[str, Any]) -> None:
    validate(Conversation(**{"messages": [USER], **fields}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tools": [tool()]}]}, "messages[0].tools"),
        ({"messages": [{"role": "system", "tools": []}]}, "messages[0].tools"),
        ({"messages": [{"role": "system", "tools": 3}]}, "messages[0].tools"),
        ({"messages": [{"role": "system", "content": "x", "tools": [tool()]}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "tools": [tool("1f")]}]}, "messages[0].tools[0].function.name"),
        ({"tools": [tool()], "messages": [{"role": "system", "tools": [tool()]}]}, "messages[0].tools[0].function.name"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "partial": True}, USER]}, "messages[0].partial"),
        ({"messages": [{**USER, "partial": True}]}, "messages[0].partial"),
        ({"messages": [{"role": "assistant", "partial": 1}]}, "messages[0].partial"),
        ({"messages": [{"role": "assistant", "partial": True, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "content": [{"type": "image", "width": 1, "height": 1}]}]}, "messages[0].content[0]"),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "builtin_function", "function": {"name": "$web_search"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a@b")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 257)]}, "tools[0].function.name"),
        ({"tools": [tool(None)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ChatError) as error:
        validate(Conversation(**{"messages": [USER], **fields}))
    assert error.value.param == param


KEYS = (
    *(
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "name",
        "tool_calls",
        "tool_call_id",
        "function",
        "arguments",
        "parameters",
        "strict",
    ),
    *("partial", "tools", "reasoning_content", "reasoning", "id", "json_schema", "schema", "properties", "required", "items", "$ref"),
)
WORDS = (
    "system",
    "user",
    "assistant",
    "tool",
    "function",
    "text",
    "json_schema",
    "json_object",
    "required",
    "f",
    "{}",
    "#",
    "object",
    "string",
    "\ud800",
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(WORDS)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4), max_leaves=12
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", 3])
MESSAGES = st.fixed_dictionaries({"role": ROLES}, optional={key: ANYTHING for key in KEYS[1:] if key not in ("type", "text")})
FUNCTIONS = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "g", "1"])}, optional={"parameters": ANYTHING, "strict": ANYTHING}
        ),
    }
)


@given(
    st.lists(MESSAGES, max_size=4) | ANYTHING,
    st.lists(FUNCTIONS, max_size=2) | ANYTHING,
    st.sampled_from(["auto", "none", "required"]) | ANYTHING,
    st.just({"type": "json_object"}) | ANYTHING,
    st.booleans(),
)
def test_any_request_is_rendered_or_refused(messages: Any, tools: Any, choice: Any, form: Any, thinking: bool) -> None:
    """No other error than `ChatError`, whatever JSON comes in."""
    conversation = Conversation(messages=messages, tools=tools, tool_choice=choice, response_format=form, thinking=thinking)
    with contextlib.suppress(ChatError):
        validate(conversation)
        judge(messages)
        prompt = render(conversation, TINY)
        constraint_for(conversation, prompt.opened)
