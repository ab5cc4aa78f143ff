"""The HTTP edge: bad input is a clear 4xx, keys, limits, request ids, and a client that leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.http import REQUEST_ID
from tests.app.edge import HI, PLAIN, WEATHER, Edge, reply, says, toys

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


BAD_CHATS: list[tuple[Any, str | None]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    (message(role="robot"), "messages[0].role"),
    (message(content=5), "messages[0].content"),
    (message(content=None), "messages[0].content"),
    (message(content=[{"type": "text"}]), "messages[0].content[0]"),
    (message(role="tool"), "messages[0].tool_call_id"),
    (HI | {"temperature": -0.1}, "temperature"),
    (HI | {"temperature": "hot"}, "temperature"),
    (HI | {"temperature": True}, "temperature"),
    (HI | {"top_p": 0}, "top_p"),
    (HI | {"max_tokens": 0}, "max_tokens"),
    (HI | {"max_tokens": -5}, "max_tokens"),
    (HI | {"max_tokens": 2.5}, "max_tokens"),
    (HI | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (HI | {"n": 0}, "n"),
    (HI | {"n": 129}, "n"),
    (HI | {"stream": "yes"}, "stream"),
    (HI | {"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    (HI | {"stop": ["a"] * 6}, "stop"),
    (HI | {"stop": ["x" * 33]}, "stop[0]"),
    (HI | {"stop": [""]}, "stop[0]"),
    (HI | {"stop": {"a": 1}}, "stop"),
    (HI | {"logit_bias": {"one": 1}}, "logit_bias"),
    (HI | {"logit_bias": {"1024": 1}}, "logit_bias.1024"),
    (HI | {"logit_bias": {"1": 101}}, "logit_bias.1"),
    (HI | {"stop_token_ids": [1024]}, "stop_token_ids[0]"),
    (HI | {"top_logprobs": 3}, "top_logprobs"),
    (HI | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (HI | {"seed": 2**64}, "seed"),
    (HI | {"tool_choice": "required"}, "tool_choice"),
    (HI | {"tool_choice": "sometimes"}, "tool_choice"),
    (HI | {"tool_choice": 1}, "tool_choice"),
    (HI | {"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    (HI | {"response_format": {"type": "yaml"}}, "response_format.type"),
    (HI | {"reasoning_effort": "banana"}, "reasoning_effort"),
    (HI | {"thinking": {"type": "bogus"}}, "thinking.type"),
    (HI | {"thinking": "on"}, "thinking"),
    (HI | {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD_CHATS)])
async def test_bad_chats_name_what_is_wrong(body: Any, param: str | None) -> None:
    async with Edge(toys(), max_model_len=1024) as edge:
        response = await edge.post(CHAT, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert edge.engine.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], [3, 1024]]}, "prompt[1][1]"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": [1] * 2000}, "prompt"),
    ],
)
async def test_bad_completions_name_what_is_wrong(body: dict[str, Any], param: str) -> None:
    async with Edge(toys(), max_model_len=1024) as edge:
        response = await edge.post(TEXT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"a":' * 5000,
        b"\x00",
    ],
)
async def test_what_is_not_json_is_refused(raw: bytes) -> None:
    async with Edge(toys()) as edge:
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            response = await edge.post(path, raw)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("raw", "headers", "words"),
    [
        (b'{"prompt": "\xff"}', {}, "not valid UTF-8: byte 0xff at 12"),
        (b"\x1f\x8b\x08\x00", {"content-encoding": "gzip"}, "'gzip'-encoded"),
    ],
)
async def test_bodies_in_another_encoding_are_told(raw: bytes, headers: dict[str, str], words: str) -> None:
    async with Edge(toys()) as edge:
        response = await edge.post(CHAT, raw, **headers)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_too_large_bodies_are_refused_unread() -> None:
    async with Edge(toys(), max_body_bytes=1000) as edge:
        announced = await edge.post(CHAT, b"x" * 10_000_000)

        async def endless() -> Any:
            while True:
                yield b" " * 400

        chunked = await edge.http.post(CHAT, content=endless())
        exact = await edge.post(CHAT, json.dumps(PLAIN | {"max_tokens": 1}).encode().ljust(1000))
    assert announced.status_code == chunked.status_code == 413
    assert announced.json()["error"]["code"] == "request_too_large"
    assert exact.status_code == 200


@pytest.mark.parametrize("depth", [100, 500, 900, 1000, 5000])
async def test_deep_nesting_is_rendered_or_refused(depth: int) -> None:
    tool = '{"type": "function", "function": {"name": "f", "parameters": ' + '{"a":' * depth + "{}" + "}" * depth + "}}"
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": [{tool}], "max_tokens": 1}}'
    async with Edge(toys(), max_model_len=20_000) as edge:
        response = await edge.post(CHAT, body.encode())
    assert response.status_code == (200 if depth < 200 else response.status_code)
    assert response.status_code in (200, 400)


async def test_unknown_models_and_paths_are_404() -> None:
    async with Edge(toys(), aliases=("kimi-k3-256k",)) as edge:
        for path, body in ((CHAT, HI), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
            response = await edge.post(path, body | {"model": "gpt-5"})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert (await edge.http.get("/v1/models/gpt-5")).status_code == 404
        assert (await edge.http.get("/nope")).json()["error"]["message"] == "Not Found"
        assert (await edge.http.get(CHAT)).status_code == 405
        answered = await edge.chat(PLAIN | {"model": "kimi-k3-256k", "max_tokens": 1})
    assert answered["model"] == "kimi-k3-256k", "a client gets back the name that it used"


async def test_model_cards_say_what_clients_look_up() -> None:
    async with Edge(toys(), aliases=("k3",)) as edge:
        cards = (await edge.http.get("/v1/models")).json()
        one = (await edge.http.get("/v1/models/kimi-k3")).json()
    assert [card["id"] for card in cards["data"]] == ["kimi-k3", "k3"]
    assert one == cards["data"][0]
    assert one["context_length"] == 4096
    assert one["supports_reasoning"] is True
    assert one["support_efforts"] == ["low", "high", "max"]


async def test_keys_open_the_door_in_both_spellings() -> None:
    async with Edge(toys(), keys=("secret-1", "secret-2")) as edge:
        body = PLAIN | {"max_tokens": 1}
        bearer = await edge.post(CHAT, body, authorization="Bearer secret-1")
        tenant = edge.asked.tenant
        plain = await edge.post(CHAT, body, **{"x-api-key": "secret-2"})
        assert tenant != edge.asked.tenant
        assert "secret" not in tenant + edge.asked.tenant
        refused = [
            await edge.post(CHAT, body),
            await edge.post(CHAT, body, authorization="Bearer wrong"),
            await edge.post(CHAT, body, authorization="Basic secret-1"),
            await edge.post(CHAT, body, **{"x-api-key": "SECRET-1"}),
            await edge.http.get("/v1/models"),
        ]
    assert bearer.status_code == plain.status_code == 200
    assert [response.status_code for response in refused] == [401] * 5
    assert refused[0].json()["error"]["type"] == "authentication_error"
    assert len(edge.engine.requests) == 2


async def test_request_ids_are_kept_or_made() -> None:
    """Ray Serve repeats a request's own id in the response; `tests/e2e` looks at that."""
    async with Edge(toys()) as edge:
        await edge.post(CHAT, PLAIN | {"max_tokens": 1}, **{REQUEST_ID: "trace-7"})
        assert edge.asked.request_id.startswith("trace-7-")
        made = await edge.http.get("/nope")
        await edge.post(CHAT, PLAIN | {"max_tokens": 1}, **{REQUEST_ID: "a b\tc"})
        assert edge.asked.request_id.startswith("req_")
    assert made.headers[REQUEST_ID].startswith("req_")


async def test_one_request_id_twice_gives_two_engine_requests() -> None:
    async with Edge(toys()) as edge:
        for _ in range(2):
            await edge.post(CHAT, PLAIN | {"max_tokens": 1, "n": 2}, **{REQUEST_ID: "same"})
    assert len({request.request_id for request in edge.engine.requests}) == 4


async def test_what_nobody_foresaw_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> Any:
        raise ZeroDivisionError("the secret reason")

    engine = says(())
    engine.script = broken
    async with Edge(engine) as edge:
        response = await edge.post(CHAT, HI)
    error = response.json()["error"]
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error["code"] in caplog.text
    assert "the secret reason" in caplog.text


async def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    async with Edge(toys(), with_tokenizer=False) as edge:
        ids = await edge.post(TEXT, {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True, "logprobs": 1, "echo": True})
        refused = [
            await edge.post(CHAT, HI),
            await edge.post(TEXT, {"prompt": "text"}),
            await edge.post(TEXT, {"prompt": [1], "stop": "x"}),
            await edge.post("/tokenize", {"prompt": "text"}),
            await edge.post("/detokenize", {"tokens": [1]}),
        ]
    [choice] = ids.json()["choices"]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == 3
    assert choice["logprobs"]["tokens"][:2] == ["token_id:1", "token_id:2"]
    assert [(r.status_code, r.json()["error"]["code"]) for r in refused] == [(400, "no_tokenizer")] * 5


class Client:
    """A client at the ASGI level: sends one request, reads what comes, leaves when told."""

    def __init__(self, api: Any, body: dict[str, Any], path: str = CHAT) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._left = asyncio.Event()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"", "headers": [], "scheme": "http", "server": ("edge", 80)}
        scope |= {"client": ("127.0.0.1", 1), "root_path": ""}
        self._body: bytes | None = json.dumps(body).encode()
        self.task = asyncio.ensure_future(api(scope, self._receive, self.sent.put))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def frame(self) -> bytes:
        return (await self.sent.get()).get("body", b"")

    def leave(self) -> None:
        self._left.set()


async def test_the_first_token_leaves_before_the_second_is_made() -> None:
    gate = asyncio.Semaphore(0)
    edge = Edge(says(reply()("ab"), gate=gate))
    client = Client(edge.api, PLAIN | {"stream": True})
    start = await client.sent.get()
    assert start["type"] == "http.response.start"
    assert b'"role":"assistant"' in await client.frame()
    assert client.sent.empty()
    gate.release()
    assert b'"content":"a' in await client.frame()
    assert client.sent.empty()
    client.leave()
    await client.task
    assert edge.engine.open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_its_request(stream: bool, n: int) -> None:
    gate = asyncio.Semaphore(0)
    edge = Edge(says(reply()("a long answer"), gate=gate))
    client = Client(edge.api, PLAIN | {"stream": stream, "n": n})
    await edge.engine.has_open(n)
    gate.release()
    client.leave()
    await client.task
    assert edge.engine.open == 0
    assert edge.engine.cancelled == n


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_server_task_cancels_its_request(stream: bool) -> None:
    edge = Edge(says(reply()("a long answer"), gate=asyncio.Semaphore(0)))
    client = Client(edge.api, PLAIN | {"stream": stream})
    await edge.engine.has_open(1)
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert (edge.engine.open, edge.engine.cancelled) == (0, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "model", "messages", "prompt", "tools", "tool_choice", "stream", "stream_options", "n", "seed", "temperature", "top_p", "top_k",
    "min_p", "logit_bias", "max_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs", "response_format", "thinking",
    "reasoning_effort", "chat_template_kwargs", "echo", "tokens", "priority", "return_token_ids", "input", "instructions", "text",
    "reasoning", "include", "system", "output_config", "stop_sequences", "metadata", "max_output_tokens", "previous_response_id",
]  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | JSON},
    optional={
        "content": st.text(max_size=10) | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), max_size=2) | JSON,
        "reasoning_content": JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"id": JSON, "function": st.fixed_dictionaries({"name": JSON, "arguments": JSON}) | JSON}), max_size=2
        )
        | JSON,
        "tool_call_id": JSON,
        "tools": JSON,
        "partial": JSON,
        "name": JSON,
    },
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "input_text", "output_text"]) | JSON},
    optional={key: JSON for key in ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "source", "image_url")},
)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"])}, optional={"content": st.lists(BLOCK, max_size=3) | JSON})
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | JSON},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | JSON,
        "content": st.lists(BLOCK, max_size=2) | JSON,
        **{key: JSON for key in ("call_id", "name", "arguments", "output", "encrypted_content", "summary")},
    },
)
SPECIAL = {
    "messages": st.lists(MESSAGE | TURN, max_size=3),
    "input": st.lists(ITEM, max_size=3) | JSON,
    "system": st.lists(BLOCK, max_size=2) | JSON,
}
BODY = st.fixed_dictionaries({}, optional={field: SPECIAL.get(field, JSON) for field in FIELDS})
POSTS = [CHAT, TEXT, "/tokenize", "/detokenize", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODY, path=st.sampled_from(POSTS))
async def test_no_body_gives_a_500(body: Any, path: str) -> None:
    async with Edge(toys(), max_model_len=300) as edge:
        response = await edge.post(path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text


@settings(max_examples=60, deadline=None)
@given(raw=st.binary(max_size=40))
async def test_no_bytes_give_a_500(raw: bytes) -> None:
    async with Edge(toys()) as edge:
        response = await edge.post(CHAT, raw)
    assert response.status_code == 400
