"""The rest of an answer: a session's open request can be had again, whole or behind the tokens that were received."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from engine.errors import ShardLost
from tests.app.edge import WEATHER, Edge, deltas, joined, joined_calls, read_sse, reply, says, toys
from tests.app.sessions import messages, record, store
from tests.app.test_sessions import ANSWER, CHAT, ask, turn, user
from tests.fakes import FakeEngineClient

AGAIN = "/v1/sessions/s/answer"
LONG = reply()("Hello, this is a long answer to a short question.", reasoning="Let me see.")


def breaking(ids: list[int] | None, at: int, per_chunk: int = 1) -> FakeEngineClient:
    """An engine whose first answer breaks off before chunk `at`."""
    engine = toys() if ids is None else says(ids, per_chunk=per_chunk)
    engine.per_chunk, engine.error, engine.error_at = per_chunk, ShardLost("gone"), at
    return engine


def received(text: str) -> tuple[list[dict[str, Any]], int]:
    """The frames that came before the stream broke off, and the id of the last one."""
    ids = [int(found) for found in re.findall(r"^id: (\d+)$", text, re.MULTILINE)]
    assert ids == sorted(ids)
    events = [event for event in text.split("\n\n") if '"error"' not in event and event]
    return [json.loads(event.rpartition("data: ")[2]) for event in events], ids[-1]


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("at", range(1, 8))
async def test_what_was_received_and_the_rest_are_the_answer(at: int, per_chunk: int) -> None:
    sessions = store()
    engine = breaking(LONG, at, per_chunk)
    async with Edge(engine, sessions=sessions) as edge:
        broken = await edge.post(CHAT, ask(user("hi"), stream=True))
        first, place = received(broken.text)
        assert (await edge.http.get("/v1/sessions/s")).json()["open_answer"] is True
        engine.error, engine.per_chunk = None, 2  # tokens come in other groups this time
        again = await edge.http.get(AGAIN, headers={"last-event-id": str(place)})
        rest = read_sse(again)
        whole = await edge.post(CHAT, {"messages": [user("hi")], "stream": True})
    for key in ("reasoning_content", "content"):
        both = "".join(d.get(key, "") for f in first for c in f["choices"] for d in [c["delta"]]) + joined(rest, key)
        assert both == joined(read_sse(whole), key)
    assert [m["content"] for m in messages(await record(sessions, "s"))] == ["hi", "Hello, this is a long answer to a short question."]
    assert (await record(sessions, "s")).turns == 1


async def test_sampled_without_a_seed_gives_the_same_tokens_again() -> None:
    engine = breaking(None, 3)
    body = ask(user("hi"), stream=True, max_tokens=12, return_token_ids=True, thinking={"type": "disabled"})
    async with Edge(engine, sessions=store()) as edge:
        await edge.post(CHAT, body)
        engine.error = None
        await edge.http.get(AGAIN)
        first, second = edge.engine.requests
    assert (first.prompt, first.sampling) == (second.prompt, second.sampling)


async def test_ids_of_tool_calls_are_those_that_were_received() -> None:
    r = reply()
    answer = r("", reasoning="Hm.", calls=[r.call("get_weather", city="Paris, in France")])
    engine = breaking(answer, len(answer) - 10)
    async with Edge(engine, sessions=store()) as edge:
        broken = await edge.post(CHAT, ask(user("hi"), stream=True, tools=[WEATHER]))
        ids = re.findall(r"call_[0-9a-f]+", broken.text)
        engine.error = None
        again = read_sse(await edge.http.get(AGAIN))
    assert ids
    assert joined_calls(again)[0]["id"] == ids[0]


async def test_an_answer_that_was_not_streamed_comes_whole() -> None:
    engine = breaking(ANSWER, 3)
    async with Edge(engine, sessions=store()) as edge:
        assert (await edge.post(CHAT, ask(user("hi")))).status_code == 503
        engine.error = None
        answer = (await edge.http.get(AGAIN)).json()
        assert (await edge.http.get(AGAIN)).json()["error"]["code"] == "no_open_answer"
    assert answer["choices"][0]["message"]["content"] == "Hello."


async def test_messages_and_completions_come_in_their_dialect() -> None:
    engine = breaking(ANSWER, 3)
    async with Edge(engine, sessions=store()) as edge:
        body = {"model": "kimi-k3", "messages": [user("hi")], "max_tokens": 50, "session_id": "s"}
        await edge.post("/v1/messages", body)
        engine.error = None
        assert (await edge.http.get(AGAIN)).json()["type"] == "message"
        engine.error = ShardLost("gone")
        await edge.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "session_id": "p"})
        engine.error = None
        assert (await edge.http.get("/v1/sessions/p/answer")).json()["object"] == "text_completion"


async def test_an_answer_on_its_way_is_waited_for_and_then_is_not_open_any_more() -> None:
    gate = asyncio.Semaphore(0)
    sessions = store()
    async with Edge(says(ANSWER, gate=gate), sessions=sessions) as edge:
        running = asyncio.ensure_future(turn(edge, user("hi")))
        await edge.engine.has_open(1)
        again = asyncio.ensure_future(edge.http.get(AGAIN))
        for _ in range(20):
            await asyncio.sleep(0)
        for _ in ANSWER:
            gate.release()
        await running
        assert (await again).json()["error"]["code"] == "no_open_answer"
    assert (await record(sessions, "s")).turns == 1


async def test_a_refused_request_is_not_open_and_a_new_one_takes_its_place() -> None:
    sessions = store()
    engine = breaking(ANSWER, 2)
    async with Edge(engine, sessions=sessions) as edge:
        assert (await edge.post(CHAT, ask(user("hi"), max_tokens=-1))).status_code == 400
        assert (await edge.http.get(AGAIN)).status_code == 404
        await edge.post(CHAT, ask(user("one")))
        await edge.post(CHAT, ask(user("two")))
        engine.error = None
        await edge.http.get(AGAIN)
    assert [m["content"] for m in messages(await record(sessions, "s"))] == ["two", "Hello."]


@pytest.mark.parametrize("place", ["x", "-1", "1.5", "9" * 30, "²"])
async def test_a_place_that_is_none(place: str) -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        response = await edge.http.get(AGAIN, params={"after": place})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


async def test_several_choices_come_from_the_beginning_only() -> None:
    engine = breaking(ANSWER, 2)
    async with Edge(engine, sessions=store()) as edge:
        broken = await edge.post(CHAT, ask(user("hi"), n=2, stream=True))
        assert "id: " not in broken.text
        engine.error = None
        assert (await edge.http.get(AGAIN, params={"after": "2"})).status_code == 400
        assert {f["choices"][0]["index"] for f in read_sse(await edge.http.get(AGAIN)) if f["choices"]} == {0, 1}


async def test_a_fork_and_another_tenant_have_no_part_in_it() -> None:
    engine = breaking(ANSWER, 2)
    async with Edge(engine, sessions=store(), keys=("a", "b")) as edge:
        mine, other = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        await edge.http.post(CHAT, json=ask(user("hi")), headers=mine)
        assert (await edge.http.get(AGAIN, headers=other)).json()["error"]["code"] == "session_not_found"
        await edge.http.post("/v1/sessions/s/fork", json={"session_id": "t"}, headers=mine)
        assert (await edge.http.get("/v1/sessions/t/answer", headers=mine)).json()["error"]["code"] == "no_open_answer"


async def test_without_a_session_frames_have_no_ids() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        response = await edge.post(CHAT, {"messages": [user("hi")], "stream": True})
    assert "id: " not in response.text
    assert deltas(read_sse(response))
