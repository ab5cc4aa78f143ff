"""/v1/messages: the translation keeps every text, and the events come in the one order that clients accept."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from engine.errors import QueueFull, ShardLost
from tests.app.edge import HI, WEATHER, Edge, reply, says, toys

MESSAGES = "/v1/messages"
ASK = {"model": "kimi-k3", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALLING = reply()(
    "I look.",
    reasoning="They ask.",
    calls=[reply().call("get_weather", city='San "Francisco"'), reply().call("get_weather", index=2, city="Rome")],
)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Data of every event, after checking that it is named by its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")[-2:]  # in sessions an id comes first
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def stream(edge: Edge, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await edge.post(MESSAGES, body | {"stream": True})
    assert response.status_code == 200, response.text
    return events(response)


async def whole(edge: Edge, body: dict[str, Any]) -> dict[str, Any]:
    response = await edge.post(MESSAGES, body)
    assert response.status_code == 200, response.text
    return response.json()


def rebuilt(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content blocks put together as clients do; checks that each starts once, grows, and stops once before the next one."""
    blocks: list[dict[str, Any]] = []
    open_block: int | None = None
    arguments: dict[int, str] = {}
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(blocks)
                open_block = event["index"]
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == open_block
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        blocks[-1]["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        blocks[-1]["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        blocks[-1]["signature"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments[open_block] = arguments.get(open_block, "") + text
                    case unknown:
                        raise AssertionError(unknown)
            case "content_block_stop":
                assert event["index"] == open_block
                if blocks[-1]["type"] == "tool_use":
                    assert blocks[-1]["input"] == {}
                    blocks[-1]["input"] = json.loads(arguments[open_block])
                open_block = None
    assert open_block is None
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
@pytest.mark.parametrize("ids", [CALLING, reply()("Hello 世界", reasoning=""), reply()("", reasoning="only thoughts")])
async def test_stream_and_message_agree(ids: list[int], per_chunk: int) -> None:
    async with Edge(says(ids, per_chunk=per_chunk, cached=3)) as edge:
        found = await stream(edge, ASK | {"tools": [TOOL]})
        message = await whole(edge, ASK | {"tools": [TOOL]})
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_delta") == 1
    assert without_ids(rebuilt(found)) == without_ids(message["content"])
    start, end = found[0]["message"], found[-2]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert start["id"].startswith("msg_")
    assert end["delta"] == {"stop_reason": message["stop_reason"], "stop_sequence": None}
    assert end["usage"] == message["usage"]
    assert start["usage"]["input_tokens"] == end["usage"]["input_tokens"]


async def test_thinking_is_signed_and_calls_are_tool_uses() -> None:
    async with Edge(says(CALLING)) as edge:
        message = await whole(edge, ASK | {"tools": [TOOL]})
    thinking, text, first, second = message["content"]
    assert thinking["thinking"] == "They ask."
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I look."}
    assert (first["name"], first["input"]) == ("get_weather", {"city": 'San "Francisco"'})
    assert second["input"] == {"city": "Rome"}
    assert first["id"] != second["id"]
    assert message["stop_reason"] == "tool_use"


async def test_signature_comes_last_in_its_block_also_when_cut_off() -> None:
    async with Edge(says(CALLING)) as edge:
        found = await stream(edge, ASK | {"max_tokens": 2})
    deltas = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


async def test_stop_reasons() -> None:
    async with Edge(says(reply()("one STOP two", reasoning="x"))) as edge:
        stopped = await whole(edge, ASK | {"stop_sequences": ["STOP"]})
        ended = await whole(edge, ASK)
        cut = await whole(edge, ASK | {"max_tokens": 3})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "STOP")
    assert stopped["content"][-1]["text"] == "one "
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    assert cut["stop_reason"] == "max_tokens"


async def test_input_tokens_leave_out_the_cached_ones() -> None:
    ids = reply()("ok", reasoning="hm")
    async with Edge(says(ids, cached=7)) as edge:
        usage = (await whole(edge, ASK))["usage"]
    assert usage["input_tokens"] == len(edge.asked.prompt) - 7
    assert usage["cache_read_input_tokens"] == 7
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == len(ids)


HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "weather in "}, {"type": "text", "text": "Rome?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": " I should look. ", "signature": "anything"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome", "n": 1.5}},
            {"type": "tool_use", "id": "t2", "name": "get_weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "and hurry"},
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        ],
    },
]
SAME_IN_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "weather in "}, {"type": "text", "text": "Rome?"}]},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": " I should look. ",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome", "n": 1.5}'}},
            {"id": "t2", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "t2", "content": ""},
    {"role": "user", "content": "and hurry"},
]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "get_weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        ),
    ],
)
async def test_a_conversation_has_the_tokens_of_its_chat_form(options: dict[str, Any], same: dict[str, Any]) -> None:
    async with Edge(says(CALLING)) as edge:
        await whole(edge, ASK | {"system": "Be brief.", "messages": HISTORY, "tools": [TOOL]} | options)
        translated = edge.asked
        counted = await edge.post(MESSAGES + "/count_tokens", {"system": "Be brief.", "messages": HISTORY, "tools": [TOOL]} | options)
        await edge.chat(HI | {"messages": SAME_IN_CHAT, "tools": [WEATHER], "max_tokens": 500} | same)
    assert translated.prompt == edge.asked.prompt
    assert translated.constraint == edge.asked.constraint
    assert counted.json() == {"input_tokens": len(translated.prompt)}


@pytest.mark.parametrize("reasoning", ["", "They ask."])
async def test_what_is_sent_back_unchanged_is_a_complete_history(reasoning: str) -> None:
    async with Edge(says(reply()("Hi!", reasoning=reasoning))) as edge:
        content = (await whole(edge, ASK))["content"]
        turns = [*ASK["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
        kept = await edge.post(MESSAGES, ASK | {"messages": turns})
        turns[1] = {"role": "assistant", "content": [block for block in content if block["type"] != "thinking"]}
        lost = await edge.post(MESSAGES, ASK | {"messages": turns})
    assert kept.headers["x-thinking-history"] == "complete"
    assert lost.headers["x-thinking-history"] == "missing; turn=1"


@pytest.mark.parametrize("result", [{}, {"content": ""}, {"content": []}, {"content": None}])
async def test_a_tool_result_may_be_empty_in_every_spelling(result: dict[str, Any]) -> None:
    messages = [
        *HISTORY[:1],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", **result}]},
    ]
    async with Edge(says(CALLING)) as edge:
        await whole(edge, ASK | {"messages": messages})
        asked = edge.asked.prompt
        await whole(edge, ASK | {"messages": [*messages[:2], {**messages[2], "content": [messages[2]["content"][0] | {"content": ""}]}]})
    assert asked == edge.asked.prompt


@pytest.mark.parametrize("line", ["cc_version=1; cch=abc", "cc_version=2; cch=def"])
async def test_the_attribution_line_does_not_reach_the_prompt(line: str) -> None:
    header = {"type": "text", "text": f"x-anthropic-billing-header: {line}"}
    rest = {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}
    async with Edge(says(CALLING)) as edge:
        await whole(edge, ASK | {"system": [rest]})
        plain = edge.asked.prompt
        await whole(edge, ASK | {"system": [header, rest]})
        assert edge.asked.prompt == plain
        await whole(edge, ASK | {"system": header["text"] + "\nYou are helpful."})
        assert edge.asked.prompt == plain


async def test_a_last_assistant_turn_is_continued() -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The answer is"}]
    async with Edge(says(reply()(" 42."))) as edge:
        message = await whole(edge, ASK | {"messages": messages})
        await edge.chat(HI | {"messages": [*HI["messages"], {"role": "assistant", "content": "The answer is", "partial": True}]})
    assert edge.engine.requests[0].prompt == edge.asked.prompt
    assert message["content"] == [{"type": "text", "text": " 42."}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].source"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "1bad", "input_schema": {}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "banana"}}, "effort"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
        ({"temperature": "x"}, "temperature"),
    ],
)
async def test_mistakes_are_named_in_anthropics_shape(body: dict[str, Any], words: str) -> None:
    async with Edge(toys()) as edge:
        for path in (MESSAGES, MESSAGES + "/count_tokens"):
            response = await edge.post(path, ASK | body)
            if path == MESSAGES or "max_tokens" not in body:
                error = response.json()
                assert (response.status_code, error["type"]) == (400, "error")
                assert error["error"]["type"] == "invalid_request_error"
                assert words in error["error"]["message"]
    assert edge.engine.requests == []


async def test_errors_have_anthropics_shape() -> None:
    async with Edge(says(CALLING, error=QueueFull("full"))) as edge:
        full = await edge.post(MESSAGES, ASK | {"stream": True})
    async with Edge(says(CALLING, error=ShardLost("gone"), error_at=3)) as edge:
        broken = events(await edge.post(MESSAGES, ASK | {"stream": True}))
    async with Edge(toys(), keys=("k",)) as edge:
        locked = await edge.post(MESSAGES, ASK)
    assert (full.status_code, full.json()["error"]["type"], full.headers["retry-after"]) == (429, "rate_limit_error", "1")
    assert broken[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    assert (locked.status_code, locked.json()["error"]["type"]) == (401, "authentication_error")
