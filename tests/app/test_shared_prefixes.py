"""Beginnings of prompts that all tenants share, as the operator writes them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.adapter import conversation
from app.openai import ChatRequest
from app.past import unpack_tokens
from app.shared_prefixes import read_shared_prefixes
from chat.render import render
from engine.errors import ConfigError
from tests.app.edge import WEATHER, tokenizer

SYSTEM = {"role": "system", "content": "You answer for a bank. " * 20}
ENTRIES: list[dict[str, Any]] = [{"messages": [SYSTEM]}, {"messages": [SYSTEM], "tools": [WEATHER]}, {"tools": [WEATHER]}]


def written(tmp_path: Path, entries: Any) -> Path:
    path = tmp_path / "shared.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


def prompt(entry: dict[str, Any], text: str) -> tuple[int, ...]:
    messages = [*entry.get("messages", []), {"role": "user", "content": text}]
    return tuple(render(conversation(ChatRequest.model_validate({**entry, "messages": messages})), tokenizer()).ids)


def test_every_prompt_that_begins_so_begins_with_its_tokens(tmp_path: Path) -> None:
    for entry, raw in zip(ENTRIES, read_shared_prefixes(written(tmp_path, ENTRIES), tokenizer()), strict=True):
        shared = unpack_tokens(raw)
        for text in ("hello", "", "<b>", "a long question, " * 50):
            assert prompt(entry, text)[: len(shared)] == shared
        assert len(shared) > 20
        assert len(tokenizer().encode(str(entry.get("messages", "")))) <= len(prompt(entry, "x"))
    assert prompt({}, "hello")[: len(shared)] != shared


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{", "not JSON"),
        ({"messages": []}, "expected an array"),
        ([{"messages": [SYSTEM]}, 7], "entry 1: expected an object"),
        ([{"messages": "hi"}], "entry 0: expected an object with `messages`"),
        ([{"messages": [{"role": "what"}]}], "entry 0"),
        ([{"messages": [SYSTEM], "reasoning_effort": "colossal"}], "entry 0"),
    ],
)
def test_what_is_none_is_refused_at_start(tmp_path: Path, entries: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shared_prefixes(written(tmp_path, entries), tokenizer())


def test_an_absent_file_and_an_absent_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_shared_prefixes(tmp_path / "none.json", tokenizer())
    with pytest.raises(ConfigError, match="tokenizer"):
        read_shared_prefixes(written(tmp_path, []), None)
