"""The real `openai` and `anthropic` clients, unmodified, in sessions."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.app.edge import Edge, says
from tests.app.sessions import messages, record, store
from tests.app.test_sessions import ANSWER

USER: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai(*, streamed: bool) -> None:
    sessions = store()
    edge = Edge(says(ANSWER), sessions=sessions)
    transport = httpx2.ASGITransport(edge.api)
    async with openai.AsyncOpenAI(
        base_url="http://edge/v1", api_key="k", max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        for _ in range(2):
            made = await client.chat.completions.create(
                model="kimi-k3", messages=USER, stream=streamed, extra_body={"session_id": "s", "session_mode": "append"}
            )
            if streamed:
                assert [chunk async for chunk in made]  # type: ignore[union-attr]
        one = await client.responses.create(model="kimi-k3", input="one")
        two = await client.responses.create(model="kimi-k3", input="two", previous_response_id=one.id)
        assert two.previous_response_id == one.id
        talk = await client.responses.create(model="kimi-k3", input="three", conversation="conv")
        assert talk.conversation
        assert talk.conversation.id == "conv"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="kimi-k3", input="x", previous_response_id="resp_none")
        await sessions.begin("", "s", "somebody", 60.0)
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="kimi-k3", messages=USER, extra_headers={"x-session-id": "s"})
    assert len(messages(await record(sessions, "s"))) == 4


async def test_anthropic() -> None:
    sessions = store()
    edge = Edge(says(ANSWER), sessions=sessions)
    transport = httpx2.ASGITransport(edge.api)
    async with anthropic.AsyncAnthropic(
        base_url="http://edge", api_key="k", max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        ask: Any = {"model": "kimi-k3", "max_tokens": 99, "system": "Be kind.", "extra_headers": {"x-session-id": "s"}}
        first = await client.messages.create(messages=USER, **ask)
        own = (await record(sessions, "s")).tokens
        history: Any = [*USER, {"role": "assistant", "content": first.content}, *USER]
        await client.messages.create(messages=history, **ask)
        found = await record(sessions, "s")
        assert found.tokens[: len(own)] == own
        ask.pop("system")
        await client.messages.create(messages=USER, extra_body={"session_mode": "append"}, **ask)
        await sessions.begin("", "s", "somebody", 60.0)
        with pytest.raises(anthropic.ConflictError):
            await client.messages.create(messages=USER, **ask)
    assert [m["role"] for m in messages(await record(sessions, "s"))] == ["system", *["user", "assistant"] * 3]
