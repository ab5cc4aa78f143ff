from __future__ import annotations

import json
from typing import Any

import pytest

from chat.cases import parse_case, read_cases, render_case
from chat.tokenizer import Tokenizer
from chat.types import ChatError
from tests.chat.conftest import DATA, goldens

REQUEST = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize("case", goldens("render"))
def test_render(case: dict[str, Any], tiny: Tokenizer) -> None:
    shown = render_case(case, tiny)
    assert shown["text"] == case["expected_text"]
    assert shown["ids"] == case["ids_tiny"]
    assert shown["segments"] == case["segments"]


@pytest.mark.parametrize("case", goldens("parse"))
def test_parse(case: dict[str, Any], tiny: Tokenizer) -> None:
    got = parse_case(case, tiny)
    calls = [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in got["tool_calls"]]
    expected = case["expected"]
    assert (got["reasoning"], got["content"], calls) == (expected["reasoning"], expected["content"], expected["tool_calls"])
    assert got["finish_reason"] == expected["finish_reason"]


def test_a_request_is_read_as_the_server_reads_it(tiny: Tokenizer) -> None:
    assert "`thinking_effort`" in render_case(REQUEST, tiny)["text"]
    shown = render_case({**REQUEST, "thinking": {"type": "disabled"}, "response_format": {"type": "json_object"}}, tiny)
    assert "thinking_effort" not in shown["text"]
    assert (shown["opened"], len(shown["boundaries"])) == ("response", 1)


def test_files() -> None:
    assert read_cases(json.dumps(REQUEST)) == [REQUEST]
    assert read_cases(json.dumps([REQUEST, REQUEST], indent=1)) == [REQUEST, REQUEST]
    assert len(read_cases((DATA / "golden_render.jsonl").read_text())) == 52  # some have U+2028 in a string


@pytest.mark.parametrize(("text", "message"), [("{}\n{", "line 2"), ("[3]", "case 1"), ("", "no cases")])
def test_a_bad_file_is_explained(text: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        read_cases(text)


@pytest.mark.parametrize(
    ("case", "param"),
    [
        ({}, "ids_tiny"),
        ({"ids": [1024]}, "ids"),
        ({"ids": "x"}, "ids"),
        ({"ids": [], "request": {"generation_prefix": "tools"}}, "request.generation_prefix"),
    ],
)
def test_a_bad_reply_is_explained(case: dict[str, Any], param: str, tiny: Tokenizer) -> None:
    with pytest.raises(ChatError) as error:
        parse_case(case, tiny)
    assert error.value.param == param


def test_a_bad_image_prompt_is_explained(tiny: Tokenizer) -> None:
    with pytest.raises(ChatError) as error:
        render_case({**REQUEST, "options": {"image_prompts": ["image 3x3"]}}, tiny)
    assert error.value.param == "options.image_prompts[0]"
