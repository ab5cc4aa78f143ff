"""The real `openai` and `anthropic` clients, unmodified, against the app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from pydantic import BaseModel

from tests.app.edge import WEATHER, Edge, reply, says
from tests.fakes import FakeEngineClient

CALLING = reply()("I look.", reasoning="They ask.", calls=[reply().call("get_weather", city="Rome")])
TEXT = reply()("Hello 世界", reasoning="Hm.")
USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [WEATHER]


class Clients:
    def __init__(self, engine: FakeEngineClient, key: str = "k") -> None:
        self.edge = Edge(engine, keys=("k",))
        transport = httpx2.ASGITransport(self.edge.api)
        self.openai = openai.AsyncOpenAI(
            base_url="http://edge/v1", api_key=key, max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
        )
        self.anthropic = anthropic.AsyncAnthropic(
            base_url="http://edge", api_key=key, max_retries=0, http_client=httpx2.AsyncClient(transport=transport)
        )

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.openai.close()
        await self.anthropic.close()


@pytest.fixture
async def calling() -> AsyncIterator[Clients]:
    async with Clients(says(CALLING, cached=3)) as clients:
        yield clients


@pytest.fixture
async def texting() -> AsyncIterator[Clients]:
    async with Clients(says(TEXT)) as clients:
        yield clients


async def test_openai_chat(calling: Clients) -> None:
    answer = await calling.openai.chat.completions.create(model="kimi-k3", messages=USER, tools=TOOLS)
    message = answer.choices[0].message
    assert message.content == "I look."
    assert message.reasoning_content == "They ask."  # type: ignore[attr-defined]
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    history = [*USER, message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert (await calling.openai.chat.completions.create(model="kimi-k3", messages=history, tools=TOOLS)).choices


async def test_openai_chat_stream(calling: Clients) -> None:
    reasoning = content = arguments = ""
    usage = None
    async for chunk in await calling.openai.chat.completions.create(
        model="kimi-k3", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function
                arguments += call.function.arguments or ""
    assert (reasoning, content, arguments) == ("They ask.", "I look.", '{"city": "Rome"}')
    assert usage
    assert usage.completion_tokens == len(CALLING)


async def test_openai_stream_helper_accumulates(calling: Clients) -> None:
    async with calling.openai.chat.completions.stream(model="kimi-k3", messages=USER, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    assert final.choices[0].finish_reason == "tool_calls"


async def test_openai_structured_output() -> None:
    class City(BaseModel):
        name: str

    async with Clients(says(reply()('{"name":"Rome"}', reasoning="x"))) as clients:
        parsed = await clients.openai.chat.completions.parse(model="kimi-k3", messages=USER, response_format=City)
        assert parsed.choices[0].message.parsed == City(name="Rome")
        assert clients.edge.asked.constraint


async def test_openai_completions(texting: Clients) -> None:
    answer = await texting.openai.completions.create(model="kimi-k3", prompt=[1, 2, 3], max_tokens=2, logprobs=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs
    assert answer.choices[0].logprobs.top_logprobs
    assert len(answer.choices[0].logprobs.top_logprobs) == 2
    texts = [
        c.choices[0].text async for c in await texting.openai.completions.create(model="kimi-k3", prompt="x", stream=True, max_tokens=2)
    ]
    assert "".join(texts) == answer.choices[0].text


async def test_openai_models(texting: Clients) -> None:
    assert [model.id async for model in await texting.openai.models.list()] == ["kimi-k3"]
    assert (await texting.openai.models.retrieve("kimi-k3")).id == "kimi-k3"


async def test_openai_errors_are_the_clients_own(texting: Clients) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await texting.openai.chat.completions.create(model="kimi-k3", messages=USER, max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        await texting.openai.chat.completions.create(model="gpt", messages=USER)
    async with Clients(says(TEXT), key="wrong") as clients:
        with pytest.raises(openai.AuthenticationError):
            await clients.openai.models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await clients.anthropic.messages.create(model="kimi-k3", max_tokens=5, messages=USER)


async def test_openai_mid_stream_error_is_raised() -> None:
    from engine.errors import ShardLost

    async with Clients(says(TEXT, error=ShardLost("shard 3 died"), error_at=3)) as clients:
        with pytest.raises(openai.APIError, match="shard 3 died"):
            async for _ in await clients.openai.chat.completions.create(model="kimi-k3", messages=USER, stream=True):
                pass
        with pytest.raises(anthropic.APIStatusError, match="shard 3 died"):
            async for _ in await clients.anthropic.messages.create(model="kimi-k3", max_tokens=99, messages=USER, stream=True):
                pass


async def test_openai_responses(calling: Clients) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    answer = await calling.openai.responses.create(model="kimi-k3", input="hi", tools=[tool])
    assert answer.output_text == "I look."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.usage
    assert answer.usage.input_tokens_details.cached_tokens == 3
    following: Any = [{"role": "user", "content": "hi"}, *answer.output]
    following.append({"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "sunny"})  # type: ignore[union-attr]
    assert (await calling.openai.responses.create(model="kimi-k3", input=following, tools=[tool])).status == "completed"


async def test_openai_responses_stream(calling: Clients) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    async with calling.openai.responses.stream(model="kimi-k3", input="hi", tools=[tool]) as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        final = await stream.get_final_response()
    assert text == final.output_text == "I look."
    assert final.status == "completed"


async def test_anthropic_messages(calling: Clients) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    message = await calling.anthropic.messages.create(model="kimi-k3", max_tokens=200, messages=USER, tools=[tool])
    thinking, text, use = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "They ask."
    assert text.type == "text"
    assert use.type == "tool_use"
    assert use.input == {"city": "Rome"}
    assert message.stop_reason == "tool_use"
    history: Any = [
        *USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
    ]
    again = await calling.anthropic.messages.create(model="kimi-k3", max_tokens=200, messages=history, tools=[tool])
    counted = await calling.anthropic.messages.count_tokens(model="kimi-k3", messages=history, tools=[tool])
    assert again.usage.cache_read_input_tokens == 3
    assert counted.input_tokens == again.usage.input_tokens + 3


async def test_anthropic_stream(calling: Clients) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    async with calling.anthropic.messages.stream(model="kimi-k3", max_tokens=200, messages=USER, tools=[tool]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "I look."
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Rome"}  # type: ignore[union-attr]
    assert final.usage.output_tokens == len(CALLING)
