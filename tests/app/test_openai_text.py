"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from app.logprobs import token_text
from tests.app.edge import Edge, says, tokenizer, toys

TEXT = "/v1/completions"


async def complete(edge: Edge, body: dict[str, Any]) -> dict[str, Any]:
    response = await edge.post(TEXT, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("Hello world", [tuple(tokenizer().encode("Hello world"))]),
        ([5, 6, 7], [(5, 6, 7)]),
        (["a", "b"], [tuple(tokenizer().encode("a")), tuple(tokenizer().encode("b"))]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
        ("<|open|>", [tuple(tokenizer().encode("<|open|>"))]),
    ],
)
async def test_prompts_in_all_four_shapes(prompt: Any, asked: list[tuple[int, ...]]) -> None:
    async with Edge(toys()) as edge:
        body = await complete(edge, {"prompt": prompt, "max_tokens": 2})
    assert [request.prompt for request in edge.engine.requests] == asked
    assert all(token_id < tokenizer().base for prompt_ids in asked for token_id in prompt_ids)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(asked)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, asked))


async def test_a_prompt_in_a_batch_gives_what_it_gives_alone() -> None:
    async with Edge(toys()) as edge:
        batch = await complete(edge, {"prompt": ["a", "b"], "n": 2, "max_tokens": 6, "seed": 3})
        alone = await complete(edge, {"prompt": "b", "n": 2, "max_tokens": 6, "seed": 3})
    assert [choice["text"] for choice in batch["choices"][2:]] == [choice["text"] for choice in alone["choices"]]


async def test_default_budget_is_the_older_endpoints() -> None:
    async with Edge(toys()) as edge:
        body = await complete(edge, {"prompt": "a"})
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("per_chunk", [1, 2, 100])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_stream_and_body_agree(per_chunk: int, echo: bool, logprobs: int | None) -> None:
    engine = says(tokenizer().encode("Some 世界 text 🌍 here"), per_chunk=per_chunk)
    asked = {"prompt": ["Hello", "世界"], "echo": echo, "logprobs": logprobs, "max_tokens": 30, "return_token_ids": True}
    async with Edge(engine) as edge:
        body = await complete(edge, asked)
        frames = await edge.frames(asked, TEXT)
    for choice in body["choices"]:
        mine = [frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == choice["index"]]
        assert "".join(entry["text"] for entry in mine) == choice["text"]
        assert [i for entry in mine for i in entry["token_ids"]] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [entry["finish_reason"] for entry in mine if entry["finish_reason"]] == ["length"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for entry in mine if entry["logprobs"] for value in entry["logprobs"][key]]
            assert streamed == (choice["logprobs"][key] if logprobs is not None else [])


async def test_echo_gives_the_prompt_and_its_logprobs() -> None:
    async with Edge(says(tokenizer().encode("!"))) as edge:
        body = await complete(edge, {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 1})
    [choice] = body["choices"]
    ids = [*tokenizer().encode("Hello"), *tokenizer().encode("!")]
    assert choice["text"] == "Hello!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [token_text(i, tokenizer()) for i in ids]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
    assert [choice["text"][at:][: len(token)] for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)] == logprobs[
        "tokens"
    ]
    assert edge.asked.sampling.prompt_logprobs == 2


async def test_tokens_can_be_named_by_id() -> None:
    async with Edge(says([5, 6])) as edge:
        body = await complete(edge, {"prompt": [1], "logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": True})
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]


async def test_parts_of_characters_are_named_by_their_bytes() -> None:
    ids = tokenizer().encode("𓀀")
    async with Edge(says(ids)) as edge:
        body = await complete(edge, {"prompt": [1], "logprobs": 0, "max_tokens": len(ids)})
    assert len(ids) > 1
    assert body["choices"][0]["text"] == "𓀀"
    spelled = "".join(token.removeprefix("bytes:") for token in body["choices"][0]["logprobs"]["tokens"])
    assert spelled == "\\xf0\\x93\\x80\\x80"


async def test_special_tokens_show_only_when_asked() -> None:
    ids = [*tokenizer().encode("a"), tokenizer().open, *tokenizer().encode("b")]
    async with Edge(says(ids)) as edge:
        hidden = await complete(edge, {"prompt": "x", "max_tokens": 3})
        shown = await complete(edge, {"prompt": "x", "max_tokens": 3, "skip_special_tokens": False})
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<|open|>b"


@pytest.mark.parametrize("per_chunk", [1, 100])
async def test_stop_strings_and_stop_tokens(per_chunk: int) -> None:
    word = tokenizer().encode("stop")[-1]
    ids = [*tokenizer().encode("one two three "), word, *tokenizer().encode("four")]
    async with Edge(says(ids, per_chunk=per_chunk)) as edge:
        text = await complete(edge, {"prompt": "x", "max_tokens": 50, "stop": "o th"})
        token = await complete(edge, {"prompt": "x", "max_tokens": 50, "stop_token_ids": [word], "return_token_ids": True})
    assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"], text["choices"][0]["stop_reason"]) == (
        "one tw",
        "stop",
        "o th",
    )
    assert (token["choices"][0]["text"], token["choices"][0]["finish_reason"]) == ("one two three ", "stop")
    assert token["choices"][0]["token_ids"][-1] == word


async def test_usage_frames() -> None:
    async with Edge(toys()) as edge:
        frames = await edge.frames(
            {"prompt": "a", "max_tokens": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, TEXT
        )
        plain = await edge.frames({"prompt": "a", "max_tokens": 3}, TEXT)
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == 3
    assert [frame["usage"]["completion_tokens"] for frame in frames] == [1, 2, 3, 3, 3]
    assert all("usage" not in frame for frame in plain)


async def test_tokenize_and_back() -> None:
    text = "Hello 世界 <|open|>"
    async with Edge(toys()) as edge:
        answer = (await edge.post("/tokenize", {"prompt": text, "return_token_strs": True})).json()
        back = (await edge.post("/detokenize", {"tokens": answer["tokens"]})).json()
        messages = {"messages": [{"role": "user", "content": text}]}
        chat = (await edge.post("/tokenize", messages)).json()
        await edge.chat(messages | {"max_tokens": 1})
        open_ended = (await edge.post("/tokenize", messages | {"add_generation_prompt": False})).json()
        wrong = [await edge.post("/tokenize", body) for body in ({}, messages | {"prompt": "x"}, {"prompt": 5}, {"messages": []})]
        outside = await edge.post("/detokenize", {"tokens": [1, 1024]})
    assert answer["tokens"] == tokenizer().encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert len(answer["token_strs"]) == answer["count"]
    assert back == {"prompt": text}
    assert chat["tokens"] == list(edge.asked.prompt)
    assert open_ended["count"] < chat["count"]
    assert [response.status_code for response in wrong] == [400] * 4
    assert outside.json()["error"]["param"] == "tokens[1]"
