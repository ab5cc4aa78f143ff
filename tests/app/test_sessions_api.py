"""/v1/sessions: what can be done with a session, and that nobody can do it with another tenant's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.session_file import Arrays
from engine.bundle import StateBundle
from engine.session import BundleAt
from tests.app.edge import Edge, reply, says
from tests.app.sessions import check, messages, record, store, tokens
from tests.app.test_sessions import ANSWER, turn, user

ONE = "/v1/sessions/s"


async def test_listed_and_shown() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        await turn(edge, user("hi"))
        await turn(edge, user("hi"), session_id="t")
        listed = (await edge.http.get("/v1/sessions")).json()
        assert [card["id"] for card in listed["data"]] == ["t", "s"]
        assert [card["id"] for card in (await edge.http.get("/v1/sessions?limit=1")).json()["data"]] == ["t"]
        assert (await edge.http.get("/v1/sessions?limit=x")).status_code == 400
        shown = (await edge.http.get(ONE)).json()
    assert shown["tokens"] == len(edge.asked.prompt) + len(ANSWER)
    assert [m["content"] for m in shown["messages"]] == ["hi", "Hello."]
    assert (shown["turns"], shown["pinned"], shown["marks"]) == (1, False, {})
    assert shown["cost"] > 0


async def test_forks_go_their_own_ways() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await turn(edge, user("one"))
        marked = await edge.post(f"{ONE}/mark", {"name": "early"})
        assert list(marked.json()["marks"]) == ["early"]
        early = tokens(await record(sessions, "s"))
        await turn(edge, user("two"), session_mode="append")
        forked = await edge.post(f"{ONE}/fork", {"session_id": "t", "mark": "early"})
        assert (forked.json()["id"], forked.json()["parent"], forked.json()["tokens"]) == ("t", "s", len(early))
        await turn(edge, user("other"), session_mode="append", session_id="t")
        assert edge.asked.prompt[: len(early)] == early
        unnamed = (await edge.post(f"{ONE}/fork", {})).json()["id"]
    assert [m["content"] for m in messages(await record(sessions, "t"))] == ["one", "Hello.", "other", "Hello."]
    assert [m["content"] for m in messages(await record(sessions, "s"))] == ["one", "Hello.", "two", "Hello."]
    assert tokens(await record(sessions, unnamed)) == tokens(await record(sessions, "s"))
    for name in ("s", "t", unnamed):
        check(await record(sessions, name))


async def test_what_is_missing_or_taken_is_told_apart() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        await turn(edge, user("one"))
        refused = [
            await edge.post(f"{ONE}/fork", {"mark": "none"}),
            await edge.post("/v1/sessions/other/fork", {}),
            await edge.post("/v1/sessions", {"session_id": "s"}),
            await edge.post("/v1/responses", {"input": "x", "previous_response_id": "resp_nothing"}),
            await edge.http.get("/v1/sessions?limit=-1"),
            await edge.http.get("/v1/sessions/" + "x" * 5000),
        ]
    found = [(r.status_code, r.json()["error"]["code"], r.json()["error"]["param"]) for r in refused]
    assert found == [
        (404, "mark_not_found", "mark"),
        (404, "session_not_found", "session_id"),
        (409, "session_exists", "session_id"),
        (404, "response_not_found", "previous_response_id"),
        (400, None, "limit"),
        (404, "session_not_found", "session_id"),
    ]
    assert all(len(r.content) < 400 for r in refused)


async def test_an_edit_takes_later_marks_along() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        first = (await turn(edge, user("one")))["choices"][0]["message"]
        await edge.post(f"{ONE}/mark", {"name": "early"})
        await turn(edge, user("two"), session_mode="append")
        await edge.post(f"{ONE}/mark", {"name": "late"})
        await turn(edge, user("one"), first, user("edited"))
        assert list((await edge.http.get(ONE)).json()["marks"]) == ["early"]
        assert (await edge.post(f"{ONE}/fork", {"mark": "late"})).status_code == 404


async def test_a_conversation_from_elsewhere_is_gone_on_with() -> None:
    async with Edge(says(ANSWER), sessions=store()) as edge:
        before = [user("one"), {"role": "assistant", "content": "Yes.", "reasoning_content": "Ok."}]
        created = await edge.post("/v1/sessions", {"session_id": "s", "messages": before})
        assert created.status_code == 200
        await turn(edge, user("two"), session_mode="append")
        appended = edge.asked.prompt
        await edge.chat({"model": "kimi-k3", "messages": [*before, user("two")]})
        assert edge.asked.prompt == appended
        assert (await edge.post("/v1/sessions", {"session_id": "s"})).status_code == 409
        wrong = await edge.post("/v1/sessions", {"messages": [{"role": "what"}]})
        assert wrong.json()["error"]["param"] == "messages[0].role"
        assert (await edge.post("/v1/sessions", {})).json()["id"].startswith("sess-")


async def test_pinned_and_deleted() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await turn(edge, user("hi"))
        assert (await edge.post(f"{ONE}/pin", {})).json()["pinned"] is True
        assert (await edge.post(f"{ONE}/pin", {"pinned": False})).json()["pinned"] is False
        assert (await edge.http.delete(ONE)).json()["deleted"] is True
        assert (await edge.http.get(ONE)).status_code == 404
        await turn(edge, user("hi"), session_mode="append")
    assert (await record(sessions, "s")).turns == 1


class Mirrors:
    """A bundle port that notes what it is to mirror."""

    def __init__(self) -> None:
        self.mirrored: list[str] = []

    async def read(self, lineage: str) -> None:
        return None

    async def write(self, bundle: StateBundle, arrays: Arrays) -> None:
        raise AssertionError("nothing is imported here")

    async def mirror(self, lineage: str) -> None:
        self.mirrored.append(lineage)


@pytest.mark.parametrize(("mirror", "expected"), [(True, ["longest"]), (False, [])])
async def test_a_pinned_session_is_mirrored_where_that_is_on(*, mirror: bool, expected: list[str]) -> None:
    sessions, bundles = store(), Mirrors()
    async with Edge(says(ANSWER), sessions=sessions, bundles=bundles, mirrored=(lambda r: r.bundles[:1]) if mirror else None) as edge:
        await turn(edge, user("hi"))
        await edge.post(f"{ONE}/pin", {})
        assert bundles.mirrored == [], "there is no state yet"
        assert await sessions.attach("", "s", BundleAt(position=9, lineage="longest")) is True, "later ones are mirrored by the replica"
        await sessions.attach("", "s", BundleAt(position=7, lineage="shorter"))
        await edge.post(f"{ONE}/pin", {"pinned": False})
        await edge.post(f"{ONE}/pin", {})
    assert bundles.mirrored == expected


async def test_states_that_come_after_a_sessions_end_are_not_attached() -> None:
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions) as edge:
        await turn(edge, user("hi"))
        await edge.http.delete(ONE)
        assert await sessions.attach("", "s", BundleAt(position=9, lineage="late")) is None
        assert (await edge.http.get(ONE)).status_code == 404
        await turn(edge, user("hi"))
        assert await sessions.attach("", "s", BundleAt(position=9, lineage="new")) is False


async def test_a_running_session_is_not_deleted() -> None:
    gate = asyncio.Semaphore(len(ANSWER))
    async with Edge(says(ANSWER, gate=gate), sessions=store()) as edge:
        await turn(edge, user("hi"))
        running = asyncio.ensure_future(turn(edge, user("more"), session_mode="append"))
        await edge.engine.has_open(1)
        assert (await edge.http.delete(ONE)).status_code == 409
        for _ in ANSWER:
            gate.release()
        await running


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", ONE, None),
        ("DELETE", ONE, None),
        ("POST", f"{ONE}/fork", {"session_id": "mine"}),
        ("POST", f"{ONE}/mark", {"name": "x"}),
        ("POST", f"{ONE}/pin", {}),
    ],
)
async def test_another_tenants_session_does_not_exist(method: str, path: str, body: dict[str, Any] | None) -> None:
    sessions = store()
    async with Edge(says(reply()("canary", reasoning="")), keys=("a", "b"), sessions=sessions) as edge:
        asked = {"model": "kimi-k3", "messages": [user("hi")], "session_id": "s"}
        assert (await edge.post("/v1/chat/completions", asked, **{"x-api-key": "a"})).status_code == 200
        for key, status in (("b", 404), ("c", 401)):
            response = await edge.http.request(method, path, json=body, headers={"x-api-key": key})
            assert response.status_code == status
            assert "canary" not in response.text
        assert (await edge.http.get("/v1/sessions", headers={"x-api-key": "b"})).json()["data"] == []
        assert (await edge.http.request(method, path, json=body, headers={"x-api-key": "a"})).status_code == 200


async def test_a_server_without_sessions_or_key_says_so() -> None:
    async with Edge(says(ANSWER)) as edge:
        response = await edge.http.get("/v1/sessions")
        assert response.status_code == 400
        assert "state_store" in response.text
    async with Edge(says(ANSWER), sessions=store()) as edge:
        response = await edge.http.get(f"{ONE}/export")
        assert response.status_code == 400
        assert "export_key" in response.text
