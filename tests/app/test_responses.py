"""/v1/responses: items of a turn become one message, and a stream ends with the very object that the plain answer is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.responses import seal
from engine.errors import ShardLost
from tests.app.edge import HI, WEATHER, Edge, reply, says, toys
from tests.app.test_anthropic import CALLING, events

RESPONSES = "/v1/responses"
ASK = {"model": "kimi-k3", "input": "hi"}
TOOL = {"type": "function", **WEATHER["function"]}


async def stream(edge: Edge, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await edge.post(RESPONSES, body | {"stream": True})
    assert response.status_code == 200, response.text
    return events(response)


async def whole(edge: Edge, body: dict[str, Any]) -> dict[str, Any]:
    response = await edge.post(RESPONSES, body)
    assert response.status_code == 200, response.text
    return response.json()


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from request to request."""
    output = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": output}


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    "ids", [CALLING, reply()("Hello 世界", reasoning=""), reply()("", reasoning="only thoughts"), CALLING[:-20]], ids=range(4)
)
async def test_a_stream_ends_with_the_plain_answer(ids: list[int], per_chunk: int) -> None:
    async with Edge(says(ids, per_chunk=per_chunk, cached=3)) as edge:
        found = await stream(edge, ASK | {"tools": [TOOL], "include": ["message.output_text.logprobs"], "top_logprobs": 1})
        plain = await whole(edge, ASK | {"tools": [TOOL], "include": ["message.output_text.logprobs"], "top_logprobs": 1})
    assert nameless(found[-1]["response"]) == nameless(plain)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == f"response.{plain['status']}"


async def test_events_build_the_items() -> None:
    async with Edge(says(CALLING)) as edge:
        found = await stream(edge, ASK | {"tools": [TOOL]})
    items: list[dict[str, Any]] = []
    grown = ""
    for event in found[2:-1]:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append(event["item"])
                grown = ""
            case "content_part.added":
                assert event["part"]["text"] == ""
            case "reasoning_text.delta" | "output_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == items[-1]["id"]
                grown += event["delta"]
            case "reasoning_text.done" | "output_text.done":
                assert event["text"] == grown
            case "function_call_arguments.done":
                assert event["arguments"] == grown
            case "content_part.done":
                assert event["part"]["text"] == grown
            case "output_item.done":
                assert event["item"]["id"] == items[-1]["id"]
                assert event["item"]["status"] == "completed"
                items[-1] = event["item"]
            case unknown:
                raise AssertionError(unknown)
    assert items == found[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "They ask."}]
    assert items[1]["content"][0]["text"] == "I look."
    assert json.loads(items[2]["arguments"]) == {"city": 'San "Francisco"'}


async def test_usage_and_status() -> None:
    ids = reply()("ok", reasoning="hm")
    async with Edge(says(ids, cached=4)) as edge:
        done = await whole(edge, ASK)
        cut = await whole(edge, ASK | {"max_output_tokens": 1})
    usage = done["usage"]
    assert usage["input_tokens"] == len(edge.asked.prompt)
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["output_tokens"] == len(ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert (done["status"], done["incomplete_details"]) == ("completed", None)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"


async def test_a_call_that_was_cut_off_is_not_given_out() -> None:
    async with Edge(says(CALLING[:-25])) as edge:
        response = await whole(edge, ASK | {"tools": [TOOL]})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]


ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": " I look. "}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": seal("sealed thoughts")},
    {"role": "assistant", "content": "Mixed."},
    {"role": "assistant", "content": "Really."},
    {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "another provider's"},
    {"type": "function_call", "call_id": "c3", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": "fog"},
]


def calls(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"id": i, "type": "function", "function": {"name": "get_weather", "arguments": arguments}} for i, arguments in pairs]


SAME_IN_CHAT = [
    {"role": "system", "content": "You are K3."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": " I look. ",
        "tool_calls": calls(("c1", '{"city": "Rome"}'), ("c2", "{}")),
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    {"role": "assistant", "content": "Mixed.", "reasoning_content": "sealed thoughts"},
    {"role": "assistant", "content": "Really."},
    {"role": "assistant", "content": None, "tool_calls": calls(("c3", "{}"))},
    {"role": "tool", "tool_call_id": "c3", "content": "fog"},
]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"thinking": {"type": "disabled"}}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "get_weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ],
)
async def test_a_conversation_has_the_tokens_of_its_chat_form(options: dict[str, Any], same: dict[str, Any]) -> None:
    async with Edge(says(CALLING)) as edge:
        await whole(edge, ASK | {"instructions": "You are K3.", "input": ITEMS, "tools": [TOOL]} | options)
        translated = edge.asked
        await edge.chat(HI | {"messages": SAME_IN_CHAT, "tools": [WEATHER]} | same)
    assert translated.prompt == edge.asked.prompt
    assert translated.constraint == edge.asked.constraint


@pytest.mark.parametrize("reasoning", ["", "They ask."])
async def test_what_is_sent_back_unchanged_is_a_complete_history(reasoning: str) -> None:
    async with Edge(says(reply()("Hi!", reasoning=reasoning))) as edge:
        output = (await whole(edge, ASK))["output"]
        asked = [{"role": "user", "content": "hi"}, *output, {"role": "user", "content": "more"}]
        kept = await edge.post(RESPONSES, ASK | {"input": asked})
        lost = await edge.post(RESPONSES, ASK | {"input": [item for item in asked if item.get("type") != "reasoning"]})
    assert kept.headers["x-thinking-history"] == "complete"
    assert lost.headers["x-thinking-history"] == "missing; turn=1"


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
async def test_output_sent_back_is_the_same_history_in_every_dialect(include: list[str]) -> None:
    async with Edge(says(CALLING)) as edge:
        first = await whole(edge, ASK | {"tools": [TOOL], "include": include})
        message = (await edge.chat(HI | {"tools": [WEATHER]}))["choices"][0]["message"]
        output = [dict(item) for item in first["output"]]
        if include:
            del output[0]["content"]  # some clients keep only the sealed form
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in output[2:]]
        await whole(edge, ASK | {"input": [{"role": "user", "content": "hi"}, *output, *results], "tools": [TOOL]})
        again = edge.asked.prompt
        tools = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]
        await edge.chat(HI | {"messages": [*HI["messages"], message, *tools], "tools": [WEATHER]})
    assert again == edge.asked.prompt
    assert edge.asked.prompt[: len(edge.engine.requests[0].prompt)] == edge.engine.requests[0].prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": 5, "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "k3-!"}]}, "input[0].encrypted_content"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"reasoning": {"effort": "banana"}}, "reasoning_effort"),
        ({"text": {"format": {"type": "yaml"}}}, "response_format.type"),
        ({"model": "other"}, "model"),
    ],
)
async def test_mistakes_are_named(body: dict[str, Any], param: str) -> None:
    async with Edge(toys()) as edge:
        response = await edge.post(RESPONSES, ASK | body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param
    assert edge.engine.requests == []


async def test_a_stream_that_breaks_says_so() -> None:
    async with Edge(says(CALLING, error=ShardLost("gone"), error_at=3)) as edge:
        found = events(await edge.post(RESPONSES, ASK | {"stream": True}))
    assert (found[-1]["type"], found[-1]["message"]) == ("error", "gone")
