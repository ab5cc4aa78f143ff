"""/v1/chat/completions: Moonshot's streaming contract point by point, and that a stream says what the single body says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from app.adapter import Limits
from chat.history import HistoryPolicy
from chat.render import render
from chat.types import Conversation
from engine.errors import InvalidRequest, QueueFull, ShardLost
from tests.app.edge import HI, PLAIN, WEATHER, Edge, deltas, joined, joined_calls, reply, says, tokenizer, toys

THINKING = reply()("Hello 世界 🌍!", reasoning="Let me think, ok")
CALLING = reply()(
    "I will look.",
    reasoning="They ask for weather.",
    calls=[reply().call("get_weather", city='San "Francisco"\n, far away'), reply().call("get_weather", index=2, city="Rome")],
)
WITH_TOOLS = HI | {"tools": [WEATHER]}


async def test_every_frame_has_the_same_head_and_one_choice() -> None:
    async with Edge(says(THINKING)) as edge:
        frames = await edge.frames(HI)
    heads = {(f["id"], f["object"], f["created"], f["model"]) for f in frames}
    assert len(heads) == 1
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", frames[0]["id"])
    assert frames[0]["object"] == "chat.completion.chunk"
    assert type(frames[0]["created"]) is int
    for frame in frames:
        [choice] = frame["choices"]
        assert {"index", "delta", "finish_reason"} <= choice.keys()


async def test_first_frame_has_the_role_and_nobody_else() -> None:
    async with Edge(says(THINKING)) as edge:
        frames = await edge.frames(HI)
    assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert frames[0]["choices"][0]["finish_reason"] is None
    assert all("role" not in frame["choices"][0]["delta"] for frame in frames[1:])


async def test_frames_are_of_one_kind_and_without_nulls() -> None:
    async with Edge(says(CALLING, per_chunk=7)) as edge:
        frames = await edge.frames(WITH_TOOLS)
    for delta in deltas(frames):
        assert len(delta) == 1
        assert set(delta) <= {"content", "reasoning_content", "tool_calls"}
        assert None not in delta.values()


@pytest.mark.parametrize("ids", [THINKING, CALLING, reply()("hi", reasoning="")], ids=["answer", "calls", "no reasoning"])
@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_thinking_ends_with_one_empty_frame_before_anything_else(ids: list[int], per_chunk: int) -> None:
    async with Edge(says(ids, per_chunk=per_chunk)) as edge:
        seen = deltas(await edge.frames(WITH_TOOLS))
    ends = [i for i, delta in enumerate(seen) if delta.get("reasoning_content") == ""]
    assert len(ends) == 1
    assert all(delta.get("reasoning_content") for delta in seen[: ends[0]])
    assert all("reasoning_content" not in delta for delta in seen[ends[0] + 1 :])


async def test_reasoning_that_was_cut_off_has_no_end() -> None:
    async with Edge(says(THINKING)) as edge:
        frames = await edge.frames(HI | {"max_tokens": 2})
    assert [set(delta) for delta in deltas(frames)] == [{"reasoning_content"}] * 2
    assert all(delta["reasoning_content"] for delta in deltas(frames))
    assert frames[-1]["choices"][0]["finish_reason"] == "length"


async def test_without_thinking_no_frame_has_reasoning() -> None:
    async with Edge(says(reply()("just this"))) as edge:
        frames = await edge.frames(PLAIN)
        body = await edge.chat(PLAIN)
    assert joined(frames, "content") == "just this"
    assert all("reasoning_content" not in delta for delta in deltas(frames))
    assert "reasoning_content" not in body["choices"][0]["message"]


async def test_tool_calls_begin_named_and_empty_and_then_only_grow() -> None:
    async with Edge(says(CALLING)) as edge:
        pieces = [delta["tool_calls"] for delta in deltas(await edge.frames(WITH_TOOLS)) if "tool_calls" in delta]
    assert all(len(piece) == 1 for piece in pieces)
    flat = [piece[0] for piece in pieces]
    assert [piece["index"] for piece in flat] == sorted(piece["index"] for piece in flat)
    for index in (0, 1):
        first, *rest = [piece for piece in flat if piece["index"] == index]
        assert first.keys() == {"index", "id", "type", "function"}
        assert re.fullmatch(r"call_[0-9a-f]{24}", first["id"])
        assert first["type"] == "function"
        assert first["function"] == {"name": "get_weather", "arguments": ""}
        assert all(piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"} for piece in rest)
    assert len([piece for piece in flat if piece["index"] == 0]) > 4, "a long string argument comes in several pieces"


@pytest.mark.parametrize("per_chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize(("ids", "body"), [(THINKING, HI), (CALLING, WITH_TOOLS), (CALLING, HI), (CALLING[:-20], WITH_TOOLS)])
async def test_stream_and_body_agree(ids: list[int], body: dict[str, Any], per_chunk: int) -> None:
    async with Edge(says(ids, per_chunk=per_chunk)) as edge:
        frames = await edge.frames(body)
        whole = await edge.chat(body)
    [choice] = whole["choices"]
    message = choice["message"]
    assert joined(frames, "content") == (message["content"] or "")
    assert joined(frames, "reasoning_content") == message["reasoning_content"]
    streamed = joined_calls(frames)
    complete = message.get("tool_calls", [])
    assert [call["function"] for call in streamed[: len(complete)]] == [call["function"] for call in complete]
    assert len(streamed) - len(complete) == (1 if ids == CALLING[:-20] else 0)
    end = frames[-1]["choices"][0]
    assert (end["finish_reason"], end["usage"]) == (choice["finish_reason"], whole["usage"])


async def test_calls_and_content_of_the_body() -> None:
    async with Edge(says(CALLING)) as edge:
        body = await edge.chat(WITH_TOOLS)
        [choice] = body["choices"]
        silent = await edge.chat(HI)
        refused = await edge.chat(WITH_TOOLS | {"tool_choice": "none"})
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I will look."
    arguments = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert arguments == [{"city": 'San "Francisco"\n, far away'}, {"city": "Rome"}]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    for without in (silent, refused):
        assert "tool_calls" not in without["choices"][0]["message"]
        assert without["choices"][0]["finish_reason"] == "stop"


async def test_empty_content_beside_calls_is_null() -> None:
    async with Edge(says(reply()("", reasoning="x", calls=[reply().call("get_weather", city="Rome")]))) as edge:
        message = (await edge.chat(WITH_TOOLS))["choices"][0]["message"]
    assert message["content"] is None


async def test_end_frame_is_empty_and_carries_the_usage_of_its_choice() -> None:
    async with Edge(says(THINKING, cached=2)) as edge:
        frames = await edge.frames(HI)
    end = frames[-1]["choices"][0]
    assert end["delta"] == {}
    assert end["finish_reason"] == "stop"
    usage = end["usage"]
    assert usage["prompt_tokens"] == len(edge.asked.prompt)
    assert usage["completion_tokens"] == len(THINKING)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["cached_tokens"] == 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer().encode("Let me think, ok"))
    assert all("usage" not in frame and "usage" not in frame["choices"][0] for frame in frames[:-1])


async def test_include_usage_adds_one_frame_after_all_choices() -> None:
    async with Edge(toys(), max_model_len=1000) as edge:
        frames = await edge.frames(PLAIN | {"n": 2, "max_tokens": 4, "stream_options": {"include_usage": True}})
        without = await edge.frames(PLAIN | {"max_tokens": 4, "stream_options": {"include_usage": False}})
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == 8
    assert frames[-1]["usage"]["prompt_tokens"] == len(edge.asked.prompt), "a prompt is counted once however many choices it has"
    assert all(frame["choices"] for frame in frames[:-1])
    assert all(frame["choices"] for frame in without)


async def test_continuous_usage_only_grows_and_freezes_reasoning() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_internal_content": True}
    async with Edge(says(CALLING)) as edge:
        frames = await edge.frames(WITH_TOOLS | {"stream_options": options})
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    reasoning = [frame["usage"]["completion_tokens_details"]["reasoning_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert reasoning == sorted(reasoning)
    final = reasoning[-1]
    assert final == frames[-2]["choices"][0]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    for frame, count in zip(frames[:-1], reasoning[:-1], strict=True):
        delta = frame["choices"][0]["delta"]
        assert count > 0 or not delta.get("reasoning_content")
        assert count == final or "tool_calls" not in delta


@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
async def test_internal_content_is_on_every_increment_and_adds_up_to_the_stream(per_chunk: int) -> None:
    async with Edge(says(CALLING, per_chunk=per_chunk)) as edge:
        frames = await edge.frames(WITH_TOOLS | {"stream_options": {"include_internal_content": True}})
    ids: list[int] = []
    for delta in deltas(frames):
        taken = delta.get("internal_content", {"token_ids": []})["token_ids"]
        if delta.keys() & {"content", "reasoning_content", "tool_calls"} and delta.get("reasoning_content") != "":
            assert taken
        ids += taken
    assert ids == CALLING
    assert frames[-1]["choices"][0]["delta"] == {}


async def test_characters_are_never_cut() -> None:
    text = "你好,世界 🌍 한국어 日本語 — café résumé 🚀✨"
    ids = reply()(text, reasoning=text)
    async with Edge(says(ids)) as edge:
        seen = deltas(await edge.frames(HI))
    assert "".join(delta.get("content", "") for delta in seen) == text
    assert not any("\ufffd" in json.dumps(delta, ensure_ascii=False) for delta in seen)


async def test_logprobs_have_bytes_and_skip_the_first_frame() -> None:
    ids = reply()("Hello 世界", reasoning="mm")
    async with Edge(says(ids)) as edge:
        asked = HI | {"logprobs": True, "top_logprobs": 2}
        frames = await edge.frames(asked)
        body = await edge.chat(asked)
        plain = await edge.frames(HI)
    assert "logprobs" not in frames[0]["choices"][0]
    entries = [entry for frame in frames[1:] for entry in frame["choices"][0].get("logprobs", {}).get("content", [])]
    assert entries == body["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(ids)
    for entry, token_id in zip(entries, ids, strict=True):
        assert len(entry["top_logprobs"]) == 2
        special = tokenizer().is_special(token_id)
        assert entry["bytes"] == (None if special else list(tokenizer().token_bytes(token_id)))
    assert all("logprobs" not in frame["choices"][0] for frame in plain)


async def test_choices_interleave_and_each_is_a_whole_sequence() -> None:
    async with Edge(toys()) as edge:
        frames = await edge.frames(PLAIN | {"n": 3, "max_tokens": 5, "seed": 1})
        whole = await edge.chat(PLAIN | {"n": 3, "max_tokens": 5, "seed": 1})
    order = [frame["choices"][0]["index"] for frame in frames]
    assert order != sorted(order)
    texts = [joined(frames, "content", i) for i in range(3)]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3, "choices of one request differ"
    for i in range(3):
        mine = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == i]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_a_stop_string_cuts_the_answer_and_cancels_the_engine(per_chunk: int) -> None:
    ids = reply()("one STOP two", reasoning="think STOP think")
    async with Edge(says(ids, per_chunk=per_chunk)) as edge:
        frames = await edge.frames(HI | {"stop": ["STOP", "never"]})
        body = await edge.chat(HI | {"stop": "STOP"})
    assert joined(frames, "content") == body["choices"][0]["message"]["content"] == "one "
    assert joined(frames, "reasoning_content") == "think STOP think", "the thinking is not looked at"
    assert frames[-1]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] < len(ids)
    assert edge.engine.cancelled == (2 if per_chunk < 1000 else 0)


async def test_a_held_tail_that_did_not_become_a_stop_string_is_shown() -> None:
    calls = [reply().call("get_weather", city="Rome")]
    async with Edge(says(reply()("almost ST", reasoning="", calls=calls))) as edge:
        frames = await edge.frames(WITH_TOOLS | {"stop": ["STOP"]})
        cut = await edge.frames(WITH_TOOLS | {"stop": ["STOP"], "max_tokens": 22})
    assert joined(frames, "content") == "almost ST"
    kinds = [next(iter(delta)) for delta in deltas(frames)]
    assert kinds.index("tool_calls") > max(i for i, kind in enumerate(kinds) if kind == "content")
    assert joined(cut, "content") == "almost ST"


async def test_a_sampled_stop_token_is_not_shown() -> None:
    word = tokenizer().encode("stop")[-1]
    async with Edge(says([*tokenizer().encode("go "), word, *tokenizer().encode(" more")])) as edge:
        body = await edge.chat(PLAIN | {"stop_token_ids": [word], "return_token_ids": True})
    assert body["choices"][0]["message"]["content"] == "go "
    assert body["choices"][0]["token_ids"][-1] == word
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["prompt_token_ids"] == list(edge.asked.prompt)


async def test_ignore_eos_goes_on_and_shows_nothing_after_the_end() -> None:
    async with Edge(says([*reply()("done"), *tokenizer().encode("tail")])) as edge:
        body = await edge.chat(PLAIN | {"ignore_eos": True})
    assert edge.asked.stop_token_ids == ()
    assert body["choices"][0]["message"]["content"] == "done"
    assert body["usage"]["completion_tokens"] > len(reply()("done"))


async def test_usage_headers_equal_the_usage() -> None:
    async with Edge(says(THINKING, cached=5)) as edge:
        for body in (HI, HI | {"stream": True}):
            response = await edge.post("/v1/chat/completions", body)
            assert response.headers["x-msh-usage-prompt-tokens"] == str(len(edge.asked.prompt))
            assert response.headers["x-msh-usage-cached-tokens"] == "5"


async def test_cost_is_in_the_usage_and_in_a_header() -> None:
    async with Edge(says(THINKING, cached=5)) as edge:
        response = await edge.post("/v1/chat/completions", HI)
    usage = response.json()["usage"]
    expected = ((usage["prompt_tokens"] - 5) * 3 + 5 * 0.3 + usage["completion_tokens"] * 15) / 1e6
    assert usage["cost"] == pytest.approx(expected)
    assert float(response.headers["x-cost"]) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("error", "status"), [(QueueFull("256 requests wait", 2.2), 429), (ShardLost("shard 3 died"), 503), (InvalidRequest("no", "n"), 400)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_byte_is_an_ordinary_error(error: Any, status: int, stream: bool) -> None:
    async with Edge(says(THINKING, error=error)) as edge:
        response = await edge.post("/v1/chat/completions", HI | {"stream": stream})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == str(error)
    if status == 429:
        assert response.headers["retry-after"] == "3"


async def test_an_engine_that_fails_later_ends_the_stream_with_an_error_frame() -> None:
    async with Edge(says(THINKING, error=ShardLost("shard 3 died"), error_at=4)) as edge:
        response = await edge.post("/v1/chat/completions", HI | {"stream": True})
        whole = await edge.post("/v1/chat/completions", HI)
    events = response.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "shard 3 died"
    assert "data: [DONE]" not in events
    assert whole.status_code == 503


async def test_one_failed_choice_cancels_the_others() -> None:
    engine = says(THINKING, error=ShardLost("gone"), error_at=3)
    async with Edge(engine) as edge:
        assert (await edge.post("/v1/chat/completions", HI | {"n": 4})).status_code == 503
    assert engine.cancelled == 4


async def test_what_the_engine_is_asked() -> None:
    async with Edge(says(THINKING), max_model_len=4096) as edge:
        await edge.chat(
            HI
            | {"temperature": 0, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1, "presence_penalty": 1, "frequency_penalty": -1}
            | {"repetition_penalty": 1.1, "logit_bias": {"5": -100}, "max_tokens": 3, "max_completion_tokens": 4, "priority": -2}
        )
        asked = edge.asked
        await edge.chat(HI)
    prompt = render(Conversation(messages=HI["messages"]), tokenizer())
    assert asked.prompt == prompt.ids
    assert asked.max_tokens == 4
    assert asked.priority == -2
    s = asked.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0, 0.9, 7, 0.1, 2**64 - 1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.1)
    assert s.logit_bias == ((5, -100.0),)
    assert asked.stop_token_ids == tokenizer().stop_ids
    assert edge.asked.max_tokens == 4096 - len(prompt.ids), "without a budget: what the context leaves"
    assert edge.asked.sampling.seed != s.seed


TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": ""},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three"},
]


async def test_a_lost_thinking_history_is_told() -> None:
    async with Edge(says(THINKING)) as edge:
        lost = await edge.post("/v1/chat/completions", {"messages": TURNS})
        kept = await edge.post("/v1/chat/completions", {"messages": TURNS[:3]})
        off = await edge.post("/v1/chat/completions", {"messages": TURNS, "thinking": {"type": "disabled"}})
        frames = await edge.frames({"messages": TURNS})
    assert lost.headers["x-thinking-history"] == "missing; turn=2"
    assert lost.json()["usage"]["thinking_history"] == {"state": "missing", "turn": 2}
    assert frames[-1]["choices"][0]["usage"]["thinking_history"] == {"state": "missing", "turn": 2}
    assert kept.headers["x-thinking-history"] == "complete"
    assert kept.json()["usage"]["thinking_history"] == {"state": "complete", "turn": None}
    assert "x-thinking-history" not in off.headers


async def test_a_lost_thinking_history_can_be_refused() -> None:
    async with Edge(says(THINKING), limits=Limits(history=HistoryPolicy.REJECT)) as edge:
        lost = await edge.post("/v1/chat/completions", {"messages": TURNS})
        kept = await edge.post("/v1/chat/completions", {"messages": TURNS[:3]})
    assert (lost.status_code, lost.json()["error"]["param"]) == (400, "messages[3].reasoning_content")
    assert kept.status_code == 200


async def test_history_and_tools_are_not_changed() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$id": "x", "properties": {"größe": {}}}, "extra": [1]}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": " because ", "tool_calls": [call("f", '{"b": 1, "a": 2}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    async with Edge(says(THINKING)) as edge:
        await edge.chat({"messages": messages, "tools": [tool], "user": "me", "prompt_cache_key": "k", "unknown": {"a": 1}})
    assert edge.asked.prompt == render(Conversation(messages=messages, tools=[tool]), tokenizer()).ids


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
