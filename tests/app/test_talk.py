"""A conversation as `k3 chat` holds it: what is sent, what is kept, what a failure says."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.talk import Said, Talk
from app.terminal import figures, hold_conversation
from engine.errors import EngineFailure, InvalidRequest, ShardLost
from tests.app.edge import WEATHER, Edge, reply, says, tokenizer
from tests.fakes import FakeEngineClient


def talk(edge: Edge, **fields: Any) -> Talk:
    return Talk(client=httpx.AsyncClient(transport=httpx.ASGITransport(edge.api), base_url="http://edge/v1"), **fields)


async def heard(conversation: Talk, text: str) -> list[Said]:
    return [said async for said in conversation.ask(text)]


async def test_the_history_goes_back_with_its_thinking() -> None:
    edge = Edge(says(reply()("Hi there.", reasoning="They greet.")))
    conversation = talk(edge, system="Be kind.")
    said = await heard(conversation, "Hello")
    assert "".join(s.text for s in said if s.kind == "reasoning") == "They greet."
    assert "".join(s.text for s in said if s.kind == "content") == "Hi there."
    await heard(conversation, "Again")
    seen = tokenizer().decode(edge.asked.prompt)
    for text in ("Be kind.", "Hello", "They greet.", "Hi there.", "Again"):
        assert seen.count(text) == 1, text
    assert [m["role"] for m in conversation.history] == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.usage["completion_tokens"] > 0
    assert conversation.finish == "stop"


async def test_tool_calls_are_shown_and_kept() -> None:
    edge = Edge(says(reply()("", reasoning="Look.", calls=[reply().call("get_weather", city="Rome")])))
    conversation = talk(edge, options={"tools": [WEATHER]})
    said = await heard(conversation, "Weather?")
    assert "".join(s.text for s in said if s.kind == "tool").startswith("get_weather {")
    [call] = conversation.history[-1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


async def test_with_a_session_only_the_new_turn_is_sent() -> None:
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, text='data: {"choices":[{"delta":{"content":"ok"}}]}\n\ndata: [DONE]\n\n')

    conversation = Talk(client=httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://edge/v1"), session="trip")
    for text in ("one", "two"):
        assert await heard(conversation, text) == [Said("content", "ok")]
    assert [[m["content"] for m in body["messages"]] for body in sent] == [["one"], ["two"]]
    assert all((body["session_id"], body["session_mode"]) == ("trip", "append") for body in sent)


async def test_a_refusal_is_in_the_servers_words_and_not_kept() -> None:
    conversation = talk(Edge(says([])), model="gpt-7")
    with pytest.raises(InvalidRequest, match=r"404.*gpt-7"):
        await heard(conversation, "Hello")
    assert conversation.history == []


async def test_a_stream_that_breaks_off_says_so() -> None:
    edge = Edge(says(reply()("Hello", reasoning="x"), error=ShardLost("shard 1 died"), error_at=3))
    with pytest.raises(EngineFailure, match="broke off: shard 1 died"):
        await heard(talk(edge), "Hello")


async def test_nobody_listens() -> None:
    conversation = Talk(client=httpx.AsyncClient(base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(EngineFailure, match="no answer from http://127"):
        await heard(conversation, "Hello")


async def test_a_conversation_goes_on_after_a_failed_turn(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["first", "", "second", None])
    engine = FakeEngineClient(script=lambda request: reply()("Fine.", reasoning=""), error=ShardLost("gone"), error_at=0)

    def read() -> str | None:
        line = next(lines)
        if line == "second":
            engine.error = None
        return line

    await hold_conversation(talk(Edge(engine)), read)
    out, err = capsys.readouterr()
    assert "Fine." in out
    assert "gone" in err


def test_figures() -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 11}, "cost": 0.00001}
    assert figures(usage, "length") == "12 prompt (11 cached) + 3 completion tokens · $0.000010 · length"
    assert figures({}, None) == "no usage was reported"
