"""Any order of turns, edits, forks, marks and deletions: records stay consistent, and the session's words are those of a client that
sends everything each time."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chat.render import render
from chat.types import Conversation
from tests.app.edge import Edge, reply, tokenizer
from tests.app.sessions import check, messages, record, store, tokens
from tests.app.test_sessions import turn, user
from tests.fakes import FakeEngineClient

NAMES = ("a", "b", "c")
ANSWERS = (
    reply()("Yes.", reasoning="Hm."),
    reply()("", reasoning=""),
    reply()("No.", reasoning="")[:-4],
    [*reply()("", reasoning="Hm.")[:-12], *tokenizer().encode("X")],
    reply()("So.", reasoning="", calls=[reply().call("f", x="1")]),
    [65, 66, 67],
)
Step = tuple[str, str, str, int, bool]
steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "full", "edit", "regenerate", "fork", "mark", "fork-mark", "delete", "fail"]),
        st.sampled_from(NAMES),
        st.sampled_from(NAMES),
        st.integers(0, len(ANSWERS) - 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def bare(message: dict[str, Any]) -> dict[str, Any]:
    """As a client sends it that drops reasoning."""
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def thought(message: dict[str, Any]) -> str:
    """A reply without reasoning is the same with an empty field as with none: nothing was dropped."""
    return message.get("reasoning_content") or ""


class Model:
    """What a client would know of its sessions."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.talks: dict[str, list[dict[str, Any]]] = {}
        self.marks: dict[str, list[dict[str, Any]]] = {}

    async def say(self, name: str, history: list[dict[str, Any]], new: str, *, mode: str, drop: bool) -> None:
        more = user(new)
        sent = [more] if mode == "append" else [*(map(bare, history) if drop else history), more]
        body = {"model": "kimi-k3", "messages": sent, "session_id": name, "session_mode": mode, "stream": drop}
        headers = {"x-thinking-history": "repair"} if drop else {}
        response = await self.edge.post("/v1/chat/completions", body, **headers)
        assert response.status_code == 200, response.text
        self.talks[name] = messages(await record(self.edge.sessions, name))  # type: ignore[arg-type]
        assert [m["content"] for m in self.talks[name][:-1]] == [m["content"] for m in [*history, more]]
        assert list(map(thought, self.talks[name][:-1])) == list(map(thought, [*history, more]))


async def walk(plan: list[Step]) -> None:
    answer = ANSWERS[0]
    engine = FakeEngineClient(script=lambda request: answer)
    sessions = store()
    async with Edge(engine, sessions=sessions) as edge:
        model = Model(edge)
        for number, (kind, name, other, pick, drop) in enumerate(plan):
            answer = ANSWERS[pick]
            talk = model.talks.get(name, [])
            match kind:
                case "append" | "full":
                    before = tokens(await record(sessions, name)) if name in model.talks else ()
                    await model.say(name, talk, f"n{number}", mode=kind, drop=drop)
                    assert edge.asked.prompt[: len(before)] == before, "all of the session's tokens are gone on from"
                case "edit" | "regenerate" if len(talk) >= 2:
                    last = max(i for i, m in enumerate(talk) if m["role"] == "user")
                    text = talk[last]["content"] if kind == "regenerate" else f"e{number}"
                    await model.say(name, talk[:last], text, mode="full", drop=drop)
                case "fork" | "fork-mark" if name in model.talks:
                    body = {"session_id": other} | ({"mark": "m"} if kind == "fork-mark" else {})
                    response = await edge.post(f"/v1/sessions/{name}/fork", body)
                    marked = "m" in (await record(sessions, name)).marks
                    expected = 404 if kind == "fork-mark" and not marked else 409 if other in model.talks else 200
                    assert response.status_code == expected
                    if response.status_code == 200:
                        model.talks[other] = messages(await record(sessions, other))
                        assert model.talks[other] == (talk if kind == "fork" else model.marks[name])
                case "mark" if name in model.talks:
                    assert (await edge.post(f"/v1/sessions/{name}/mark", {"name": "m"})).status_code == 200
                    model.marks[name] = talk
                case "delete" if name in model.talks:
                    assert (await edge.http.delete(f"/v1/sessions/{name}")).status_code == 200
                    del model.talks[name]
                case "fail":
                    body = {"messages": [user("x")], "session_id": name, "session_mode": "append", "max_tokens": 0}
                    assert (await edge.post("/v1/chat/completions", body)).status_code == 400
            for known in NAMES:
                if known in model.talks:
                    found = await record(sessions, known)
                    check(found)
                    assert messages(found) == model.talks[known]
        assert (await sessions.stats()).running_turns == 0


@settings(max_examples=25, deadline=None)
@given(steps)
def test_records_stay_consistent(plan: list[Step]) -> None:
    asyncio.run(walk(plan))


async def test_tokens_are_what_rendering_gives_for_replies_of_a_good_model() -> None:
    sessions = store()
    async with Edge(FakeEngineClient(script=lambda request: ANSWERS[0]), sessions=sessions) as edge:
        for number in range(3):
            await turn(edge, user(f"n{number}"), session_mode="append")
    found = await record(sessions, "s")
    rendered = render(Conversation(messages=messages(found), generation_prompt=False), tokenizer())
    assert tokens(found) == rendered.ids
