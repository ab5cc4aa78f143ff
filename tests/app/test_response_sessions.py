"""Stored responses are turns of sessions: the next request names the last one and sends only what is new."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.responses import response_id, session_of
from engine.errors import UnknownSession
from tests.app.edge import WEATHER, Edge, reply, says
from tests.app.sessions import check, messages, record, store, tokens
from tests.app.test_anthropic import events
from tests.app.test_sessions import ANSWER

RESPONSES = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}


async def respond(edge: Edge, text: Any, **more: Any) -> dict[str, Any]:
    response = await edge.post(RESPONSES, {"model": "kimi-k3", "input": text} | more)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_chain_of_responses_is_one_session() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        one = await respond(edge, "one")
        assert one["store"] is True
        before = tokens(await record(sessions, session_of(one["id"])))
        two = await respond(edge, "two", previous_response_id=one["id"])
        assert edge.asked.prompt[: len(before)] == before
        assert session_of(two["id"]) == session_of(one["id"])
        assert two["previous_response_id"] == one["id"]
        await edge.post("/v1/chat/completions", {"messages": messages(await record(sessions, session_of(two["id"])))[:3]})
        whole = edge.asked.prompt
        await respond(edge, "two", previous_response_id=one["id"])  # from the earlier one again: a branch of its own
        assert edge.asked.prompt == whole
        assert len(await sessions.list("")) == 2
    found = await record(sessions, session_of(one["id"]))
    assert [m["content"] for m in messages(found)] == ["one", "Hello.", "two", "Hello."]
    check(found)


async def test_a_stream_is_stored_and_continued() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        response = await edge.post(RESPONSES, {"model": "kimi-k3", "input": "one", "stream": True})
        found = events(response)
        assert found[0]["response"]["id"] == found[-1]["response"]["id"]
        two = await respond(edge, "two", previous_response_id=found[-1]["response"]["id"])
    assert two["status"] == "completed"


async def test_beside_a_running_turn_there_is_a_branch() -> None:
    gate = asyncio.Semaphore(len(ANSWER))
    sessions = store()
    async with Edge(says(ANSWER, gate=gate), sessions=sessions) as edge:
        one = await respond(edge, "one")
        both = [asyncio.ensure_future(respond(edge, text, previous_response_id=one["id"])) for text in ("a", "b")]
        await edge.engine.has_open(2)
        for _ in range(2 * len(ANSWER)):
            gate.release()
        a, b = await asyncio.gather(*both)
    assert session_of(a["id"]) != session_of(b["id"])
    said = [[m["content"] for m in messages(await record(sessions, session_of(r["id"])))][2] for r in (a, b)]
    assert said == ["a", "b"]


async def test_a_conversation_is_a_session() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        one = await respond(edge, "one", conversation="conv_1")
        assert one["conversation"] == {"id": "conv_1"}
        await respond(edge, "two", conversation={"id": "conv_1"})
        again = await edge.post(RESPONSES, {"input": "x", "conversation": "conv_1", "previous_response_id": one["id"]})
        assert again.status_code == 400
        assert (await edge.post(RESPONSES, {"input": "x", "conversation": {"id": 5}})).status_code == 400
        assert (await edge.post(RESPONSES, {"input": "x", "conversation": "a b"})).status_code == 400
    assert [m["content"] for m in messages(await record(sessions, "conv_1"))] == ["one", "Hello.", "two", "Hello."]


async def test_instructions_are_for_one_request() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        one = await respond(edge, "one", instructions="Be brief.")
        same = await respond(edge, "two", instructions="Be brief.", previous_response_id=one["id"])
        kept = edge.asked.prompt
        found = await record(sessions, session_of(same["id"]))
        assert tokens(found)[: len(kept)] == kept
        assert messages(found)[0] == {"role": "user", "content": "one"}
        await respond(edge, "three", instructions="Be long.", previous_response_id=same["id"])
        shown = reply().tokenizer.decode(edge.asked.prompt)
        assert "Be long." in shown
        assert "Be brief." not in shown
        assert all(text in shown for text in ("one", "two", "three"))


async def test_tool_results_alone_go_on() -> None:
    calling = reply()("", reasoning="Hm.", calls=[reply().call("get_weather", city="Rome")])
    async with Edge(says(calling), sessions=store()) as edge:
        one = await respond(edge, "one", tools=[TOOL])
        call = next(item for item in one["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        await respond(edge, [output], tools=[TOOL], previous_response_id=one["id"])
        assert "sunny" in reply().tokenizer.decode(edge.asked.prompt)


async def test_not_stored_when_not_wanted() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        one = await respond(edge, "one", store=False)
        assert one["store"] is False
        assert edge.asked.session is None
        refused = await edge.post(RESPONSES, {"input": "two", "previous_response_id": one["id"]})
        assert refused.status_code == 404
        kept = await respond(edge, "one")
        half = await edge.post(RESPONSES, {"input": "two", "previous_response_id": kept["id"], "store": False})
        assert half.json()["error"]["param"] == "store"
    assert len(await sessions.list("")) == 1


async def test_another_tenants_response_does_not_exist() -> None:
    async with Edge(says(reply()("canary", reasoning="")), keys=("a", "b"), sessions=store()) as edge:
        one = (await edge.post(RESPONSES, {"input": "one"}, **{"x-api-key": "a"})).json()
        refused = await edge.post(RESPONSES, {"input": "two", "previous_response_id": one["id"]}, **{"x-api-key": "b"})
        assert refused.status_code == 404
        assert "canary" not in refused.text
        assert (await edge.post(RESPONSES, {"input": "x", "previous_response_id": one["id"]}, **{"x-api-key": "a"})).status_code == 200


@pytest.mark.parametrize("name", ["s", "auto-1", "x" * 128, "a_b.c:d+e=f@g-h"])
def test_response_ids_know_their_session(name: str) -> None:
    assert session_of(response_id(name)) == name


@pytest.mark.parametrize("wrong", ["", "resp_", "resp_1", "resp__1", "x_czI_1", "resp_!!_1", "resp_" + "é" * 3 + "_1"])
def test_other_ids_are_of_no_session(wrong: str) -> None:
    with pytest.raises(UnknownSession):
        session_of(wrong)
