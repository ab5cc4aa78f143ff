from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.tokenizer import PATTERN, TINY_TOKENIZER_DIR, IncrementalDecoder, Tokenizer, cut
from tests.chat.conftest import DATA, goldens

TINY = Tokenizer.tiny()


def pieces(case: dict[str, Any]) -> list[str]:
    return list(cut(case["text"], max_run=case["same_class_run_cap"]))


@pytest.mark.parametrize("case", goldens("tokenizer"))
def test_ids_of_the_tiny_vocabulary(case: dict[str, Any], tiny: Tokenizer) -> None:
    assert [i for p in pieces(case) for i in tiny.encode(p)] == case["tiny"]["ordinary"]
    assert [i for p in pieces(case) for i in tiny.encode_control(p)] == case["tiny"]["allow_special"]
    assert tiny.decode(case["tiny"]["ordinary"]) == case["text"]


@pytest.mark.parametrize("case", goldens("tokenizer"))
def test_ids_of_the_published_vocabulary(case: dict[str, Any], published: Tokenizer) -> None:
    assert [i for p in pieces(case) for i in published.encode(p)] == case["real"]["ordinary"]
    assert [i for p in pieces(case) for i in published.encode_control(p)] == case["real"]["allow_special"]


def test_constants() -> None:
    constants = json.loads((DATA / "constants.json").read_text())["tokenizer"]
    assert constants["pat_str"] == PATTERN
    for name, offset in constants["named_special_offsets"].items():
        assert TINY.special_ids[name] == TINY.base + offset
    assert len(TINY.special_ids) == constants["num_reserved_special_tokens"]
    assert TINY.vocab_size == 1024


def test_stop_ids_are_the_one_that_the_model_emits_and_the_one_that_the_config_names() -> None:
    assert TINY.stop_ids == (TINY.end_of_msg, TINY.eos)


def test_a_named_slot_has_no_reserved_spelling() -> None:
    assert all(i < TINY.base for i in TINY.encode_control(f"<|reserved_token_{TINY.open}|>"))
    assert TINY.encode_control("<|reserved_token_776|>") == [776]


@given(st.text())
def test_ordinary_text_is_kept_and_never_gives_a_special_id(text: str) -> None:
    ids = TINY.encode(text + "<|open|>" + text)
    assert all(i < TINY.base for i in ids)
    assert TINY.decode(ids) == text + "<|open|>" + text


@given(st.text(alphabet="ab \n", max_size=60), st.integers(1, 9), st.integers(1, 30))
def test_cut_keeps_the_text_and_its_limits(text: str, max_run: int, max_chars: int) -> None:
    parts = list(cut(text, max_chars=max_chars, max_run=max_run))
    assert "".join(parts) == text
    for part in parts:
        assert len(part) <= max_chars
        runs = "".join("x" if c.isspace() else "." for c in part)
        assert "x" * (max_run + 1) not in runs
        assert "." * (max_run + 1) not in runs


def test_long_runs_are_cut_before_encoding() -> None:
    text = "a" * 25_001
    assert TINY.encode(text) == [*TINY.encode("a" * 25_000), *TINY.encode("a")]


@given(st.text(), st.data())
def test_incremental_decoding_shows_whole_characters_only(text: str, data: st.DataObject) -> None:
    ids = TINY.encode(text)
    split = data.draw(st.integers(0, len(ids)))
    decoder = IncrementalDecoder(TINY)
    begin = decoder.push(ids[:split])
    assert text.startswith(begin)
    assert begin + decoder.push(ids[split:]) == text


def test_an_unfinished_character_is_forgotten_and_a_wrong_byte_is_replaced() -> None:
    ids = TINY.encode("🫠")
    assert len(ids) > 1
    decoder = IncrementalDecoder(TINY)
    assert decoder.push(ids[:-1]) == ""
    decoder.finish()
    assert decoder.push(TINY.encode("ok")) == "ok"
    assert decoder.push([*ids[:1], *TINY.encode("x")]) == "\ufffdx"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_TOKENIZER_DIR, tmp_path / "tokenizer"))


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / "tiktoken.model").unlink()
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.model"):
        Tokenizer.from_dir(directory)


@pytest.mark.parametrize("line", ["IQ==", "IQ== 1", "*** 0", "IQ== x"])
def test_a_malformed_rank_is_named(directory: Path, line: str) -> None:
    (directory / "tiktoken.model").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"tiktoken\.model, line 1"):
        Tokenizer.from_dir(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{", "not JSON"),
        ("{}", r"lacks .*<\|open\|>"),
        ('{"added_tokens_decoder": {"3": {"content": "x"}}}', "outside the 256 slots"),
    ],
)
def test_a_malformed_config_is_named(directory: Path, config: str, message: str) -> None:
    (directory / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(directory)
