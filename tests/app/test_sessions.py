"""Sessions over HTTP: one turn at a time, the server's own tokens as the truth, and nobody else's business."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.adapter import Limits
from app.past import Outcome
from app.turn import Turn
from cluster.sessions import SessionStore
from engine.errors import SessionBusy, ShardLost
from tests.app.edge import WEATHER, Edge, reply, says, toys
from tests.app.sessions import check, messages, record, store, tokens
from tests.fakes import FakeEngineClient

CHAT = "/v1/chat/completions"
ANSWER = reply()("Hello.", reasoning="Hm.")


T = reply().tokenizer


def odd_answer() -> list[int]:
    """`Hello.` spelled letter by letter."""
    r = reply()
    letters = [i for letter in "Hello." for i in T.encode(letter)]
    return [*T.encode("Hm."), *r.close("think"), *r.open("response"), *letters, *r.close("response"), *r.close("message"), T.end_of_msg]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(*new: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "kimi-k3", "messages": list(new), "session_id": "s", **more}


async def turn(edge: Edge, *new: dict[str, Any], **more: Any) -> dict[str, Any]:
    response = await edge.post(CHAT, ask(*new, **more))
    assert response.status_code == 200, response.text
    return response.json()


async def test_without_a_session_nothing_is_kept() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await edge.chat({"model": "kimi-k3", "messages": [user("hi")]})
    assert edge.asked.session is None
    assert await sessions.list("") == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_is_recorded_before_its_end_is_seen(*, streamed: bool) -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        response = await edge.post(CHAT, ask(user("hi"), stream=streamed))
    assert response.status_code == 200
    assert response.headers["x-session-id"] == "s"
    found = await record(sessions, "s")
    assert tokens(found) == (*edge.asked.prompt, *ANSWER)
    assert messages(found) == [user("hi"), {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}]
    assert (found.turns, len(found.ends), found.rendering != "") == (1, 1, True)
    assert edge.asked.session == "s"
    check(found)


@pytest.mark.parametrize("answer", [ANSWER, odd_answer(), odd_answer()[:-9], ANSWER[:2]], ids=["whole", "odd", "cut", "cut-thinking"])
async def test_append_and_full_history_give_the_same_prompt(answer: list[int]) -> None:
    sessions = store()
    async with Edge(says(answer), sessions=sessions) as edge:
        first = await turn(edge, user("hi"))
        message = first["choices"][0]["message"]
        before = tokens(await record(sessions, "s"))
        await sessions.fork("", "s", "t")
        await turn(edge, user("more"), session_mode="append")
        appended = edge.asked.prompt
        await turn(edge, user("hi"), message, user("more"), session_id="t")
        assert edge.asked.prompt == appended
    assert appended[: len(before)] == before, "the server's own tokens stand"
    assert tokens(await record(sessions, "s")) == tokens(await record(sessions, "t"))
    assert messages(await record(sessions, "s")) == messages(await record(sessions, "t"))


async def test_own_tokens_are_kept_where_rendering_would_spell_otherwise() -> None:
    async with Edge(says(odd_answer()), sessions=store()) as edge:
        message = (await turn(edge, user("hi")))["choices"][0]["message"]
        own = (*edge.asked.prompt, *odd_answer())
        await turn(edge, user("hi"), message, user("more"))
        assert edge.asked.prompt[: len(own)] == own
        await edge.chat({"model": "kimi-k3", "messages": [user("hi"), message, user("more")]})
        assert edge.asked.prompt[: len(own)] != own, "without the session the reply is spelled anew"


async def test_vanishing_segments_are_not_part_of_the_next_prompt() -> None:
    sessions = store()
    async with Edge(says(reply()("{}", reasoning="")), sessions=sessions) as edge:
        await turn(edge, user("hi"), response_format={"type": "json_object"}, tools=[WEATHER], tool_choice="none")
        kept = edge.asked.prompt[: edge.asked.boundaries[0]]
        found = tokens(await record(sessions, "s"))
        assert found[: len(kept)] == kept
        assert len(found) < len(edge.asked.prompt) + len(edge.engine.script(edge.asked))
        await turn(edge, user("more"), session_mode="append", tools=[WEATHER])
        assert edge.asked.prompt[: len(found)] == found


async def test_other_tools_or_effort_render_the_session_anew() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await turn(edge, user("hi"))
        await turn(edge, user("more"), session_mode="append", tools=[WEATHER])
        everything = [user("hi"), *messages(await record(sessions, "s"))[1:]]
        check(await record(sessions, "s"))
        appended = edge.asked.prompt
        await edge.chat({"model": "kimi-k3", "messages": everything[:3], "tools": [WEATHER]})
        assert edge.asked.prompt == appended


async def test_dropped_reasoning_loses_nothing_in_append_and_repair() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await turn(edge, user("hi"))
        await sessions.fork("", "s", "t")
        bare = {"role": "assistant", "content": "Hello."}
        await turn(edge, user("more"), session_mode="append")
        whole = edge.asked.prompt
        response = await edge.post(CHAT, ask(user("hi"), bare, user("more"), session_id="t"), **{"x-thinking-history": "repair"})
        assert edge.asked.prompt == whole
        assert response.headers["x-thinking-history"] == "missing; turn=1; repaired"
        assert response.json()["usage"]["thinking_history"] == {"state": "missing", "turn": 1, "repaired": True}
        refused = await edge.post(CHAT, ask(user("hi"), bare, user("more"), session_id="t"), **{"x-thinking-history": "reject"})
        assert refused.status_code == 400
        assert "turn 1" in refused.json()["error"]["message"]
        assert edge.service.histories["rejected"] == 1
        wrong = await edge.post(CHAT, ask(user("hi")), **{"x-thinking-history": "maybe"})
        assert wrong.status_code == 400
    async with Edge(says(ANSWER), sessions=sessions, limits=Limits()) as edge:
        response = await edge.post(CHAT, ask(user("hi"), bare, user("more"), session_id="t"))
        assert response.headers["x-thinking-history"] == "missing; turn=1"
        assert edge.asked.prompt != whole


async def test_two_turns_at_once_are_refused_and_the_session_is_free_afterwards() -> None:
    gate = asyncio.Semaphore(0)
    async with Edge(says(ANSWER, gate=gate), sessions=store()) as edge:
        first = asyncio.ensure_future(turn(edge, user("hi")))
        await edge.engine.has_open(1)
        second = await edge.post(CHAT, ask(user("hi")))
        assert second.status_code == 409
        assert second.json()["error"]["code"] == "session_busy"
        assert len(edge.engine.requests) == 1
        for _ in ANSWER:
            gate.release()
        await first
        for _ in ANSWER:
            gate.release()
        await turn(edge, user("more"), session_mode="append")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_that_fails_leaves_the_session_as_it_was(*, streamed: bool) -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await turn(edge, user("hi"))
        before = await record(sessions, "s")
        edge.engine.error, edge.engine.error_at = ShardLost("gone"), 3
        response = await edge.post(CHAT, ask(user("more"), session_mode="append", stream=streamed))
        assert response.status_code == (200 if streamed else 503)
        after = await record(sessions, "s")
        assert after.asked
        assert replace(after, asked=b"") == before, "but for the answer, which may be asked for again"
        edge.engine.error = None
        refused = await edge.post(CHAT, ask(user("more"), session_mode="append", max_tokens=5000, temperature=9))
        assert refused.status_code == 400
        await turn(edge, user("more"), session_mode="append")
    assert (await record(sessions, "s")).turns == 2


async def test_a_client_that_goes_away_frees_its_session() -> None:
    gate = asyncio.Semaphore(2)
    sessions = store()
    async with Edge(says(ANSWER, gate=gate), sessions=sessions) as edge:
        running = asyncio.ensure_future(turn(edge, user("hi")))
        await edge.engine.has_open(1)
        running.cancel()
        await edge.engine.has_open(0, exactly=True)
        await asyncio.gather(running, return_exceptions=True)
        for _ in range(50):
            gate.release()
        await turn(edge, user("hi"))
    assert (await record(sessions, "s")).turns == 1


async def test_tenants_do_not_see_each_other() -> None:
    sessions = store()
    seen: list[str] = []
    async with Edge(says(reply()("canary-7", reasoning="")), keys=("a", "b"), sessions=sessions) as edge:
        for key in ("a", "b"):
            response = await edge.post(CHAT, ask(user(f"I am {key}"), session_mode="append"), **{"x-api-key": key})
            assert response.status_code == 200
            seen.append(T.decode(edge.asked.prompt))
    assert "canary" not in seen[1]
    assert "I am a" not in seen[1]


async def test_the_cost_of_a_session_adds_up() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        costs = []
        for new in ("hi", "more"):
            response = await edge.post(CHAT, ask(user(new), session_mode="append"))
            costs.append(float(response.headers["x-cost"]))
        total = float(response.headers["x-session-cost"])
        assert total == pytest.approx(sum(costs), abs=2e-8)
        assert response.json()["usage"]["session"]["id"] == "s"
    assert (await record(sessions, "s")).cost == pytest.approx(total, abs=1e-8)


async def test_regenerate_and_edit_go_on_from_the_earlier_turn() -> None:
    sessions = store()
    async with Edge(says(odd_answer()), sessions=sessions) as edge:
        first = (await turn(edge, user("one")))["choices"][0]["message"]
        one = tokens(await record(sessions, "s"))
        await turn(edge, user("one"), first, user("two"))
        two = edge.asked.prompt
        await turn(edge, user("one"), first, user("two"))  # regenerate
        assert edge.asked.prompt == two
        check(await record(sessions, "s"))
        await turn(edge, user("one"), first, user("other"))  # edit
        assert edge.asked.prompt[: len(one)] == one
        found = await record(sessions, "s")
        check(found)
        assert [m["content"] for m in messages(found)] == ["one", "Hello.", "other", "Hello."]


async def test_n_choices_are_forks_and_the_first_is_remembered() -> None:
    sessions = store()
    async with Edge(FakeEngineClient(script=lambda r: reply()(f"No {r.choice}", reasoning="")), sessions=sessions) as edge:
        body = await turn(edge, user("hi"), n=3)
    assert [c["message"]["content"] for c in body["choices"]] == ["No 0", "No 1", "No 2"]
    assert messages(await record(sessions, "s"))[-1]["content"] == "No 0"


async def test_a_begun_reply_is_recorded_whole() -> None:
    sessions = store()
    answer = [*T.encode("lo."), *reply().close("response"), *reply().close("message"), T.end_of_msg]
    async with Edge(says(answer), sessions=sessions) as edge:
        await turn(edge, user("hi"), {"role": "assistant", "content": "Hel", "reasoning_content": "Hm.", "partial": True})
        found = await record(sessions, "s")
        assert messages(found)[1] == {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
        assert tokens(found) == (*edge.asked.prompt, *answer)
        await turn(edge, user("more"), session_mode="append")
        assert edge.asked.prompt[: found.num_tokens] == tokens(found)


async def test_tool_calls_are_answered_by_appending_results() -> None:
    sessions = store()
    calling = reply()("", reasoning="", calls=[reply().call("get_weather", city="Rome"), reply().call("get_weather", 2, city="Oslo")])
    async with Edge(says(calling), sessions=sessions) as edge:
        message = (await turn(edge, user("hi"), tools=[WEATHER]))["choices"][0]["message"]
        ids = [call["id"] for call in message["tool_calls"]]
        own = tokens(await record(sessions, "s"))
        results = [{"role": "tool", "tool_call_id": i, "content": c} for i, c in zip(reversed(ids), ("cold", "hot"), strict=True)]
        await turn(edge, *results, session_mode="append", tools=[WEATHER])
        assert edge.asked.prompt[: len(own)] == own
        shown = T.decode(edge.asked.prompt[len(own) :])
        assert shown.index("hot") < shown.index("cold"), "in the order of the calls"


async def test_raw_prompts_append_tokens() -> None:
    sessions = store()
    async with Edge(toys(), sessions=sessions) as edge:
        for number, expected in ((1, [5, 6, 7]), (2, None)):
            body = {"model": "kimi-k3", "prompt": [5, 6, 7], "max_tokens": 4, "session_id": "s", "session_mode": "append"}
            before = () if number == 1 else tokens(await record(sessions, "s"))
            response = await edge.post("/v1/completions", body | {"return_token_ids": True})
            assert response.status_code == 200, response.text
            assert edge.asked.prompt == (*before, 5, 6, 7)
            assert expected is None or list(edge.asked.prompt) == expected
            assert tokens(await record(sessions, "s")) == (*edge.asked.prompt, *response.json()["choices"][0]["token_ids"])
        mixed = await edge.post(CHAT, ask(user("hi"), session_mode="append"))
        assert mixed.status_code == 400
        two = await edge.post("/v1/completions", body | {"prompt": [[1], [2]]})
        assert two.status_code == 400
        assert (await edge.post("/v1/completions", body)).status_code == 200, "a refused turn frees the session"


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"session_id": "no spaces"}, {}, "session_id"),
        ({"session_id": ""}, {"x-session-id": "x" * 129}, "session_id"),
        ({"session_id": "a"}, {"x-session-id": "b"}, "session_id"),
        ({"session_id": None, "session_mode": "append"}, {}, "session_mode"),
        ({"session_mode": "both"}, {}, "session_mode"),
    ],
)
async def test_what_names_no_session_is_refused(body: dict[str, Any], headers: dict[str, str], param: str) -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        response = await edge.post(CHAT, ask(user("hi")) | body, **headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert edge.engine.requests == []


async def test_errors_name_the_message_that_was_sent() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        await turn(edge, user("hi"))
        response = await edge.post(CHAT, ask(user("ok"), {"role": "what", "content": ""}, session_mode="append"))
    assert response.json()["error"]["param"] == "messages[1].role"


async def test_a_server_without_sessions_says_so() -> None:
    async with Edge(says(ANSWER)) as edge:
        response = await edge.post(CHAT, ask(user("hi")))
    assert response.status_code == 400
    assert "keeps no sessions" in response.json()["error"]["message"]


class Renewals(SessionStore):
    """Counts renewals."""

    renewed: asyncio.Semaphore

    async def renew(self, tenant: str, session: str, owner: str, lease_s: float) -> bool:
        kept = await super().renew(tenant, session, owner, lease_s)
        if kept:
            self.renewed.release()
        return kept


async def test_the_lease_is_renewed_while_a_turn_runs() -> None:
    sessions = Renewals(3600.0, list_holders=list)
    sessions.renewed = asyncio.Semaphore(0)
    turn = await Turn.begin(sessions, "", "s", lease_s=0.03)
    async with asyncio.timeout(30):
        for _ in range(3):
            await sessions.renewed.acquire()
    await turn.abandon()
    assert (await sessions.begin("", "s", "me", 60.0)).turns == 0


async def test_a_turn_that_lost_its_lease_does_not_touch_the_session() -> None:
    sessions = store()
    turn = await Turn.begin(sessions, "", "s", lease_s=0.0)
    await sessions.begin("", "s", "me", 60.0)
    with pytest.raises(SessionBusy, match="taken over"):
        await turn.finish(Outcome(b"", b"[]", (), ""), 0.0)
    assert (await sessions.stats()).running_turns == 1
