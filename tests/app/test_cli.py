"""The command line, its words in and its words out. `k3 score` and `k3 serve` on real shards are in tests/e2e."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import cli
from app.config import ServiceConfig
from tests.app.edge import Edge, reply, says
from tests.app.listening import listening
from tests.fakes import toy

GOLDEN = Path(__file__).parent.parent / "data"


def k3(*words: str, input: str | None = None) -> Result:
    return CliRunner().invoke(cli, words, input=input, catch_exceptions=False, env={"COLUMNS": "250", "TERM": "dumb"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that says hello, to those who have the key."""
    with listening(Edge(says(reply()("Hello you.", reasoning="A greeting.")), keys=("secret",))) as base:
        yield f"{base}/v1"


@pytest.fixture(scope="module")
def endless() -> Iterator[str]:
    """A server that always has another token."""
    edge = Edge(says([]))
    edge.engine.script = toy
    with listening(edge) as base:
        yield f"{base}/v1"


def test_help_names_every_command() -> None:
    shown = k3("--help").stdout
    for command in ("serve", "chat", "bench", "render", "parse", "score", "config", "plan", "cost", "doctor", "sessions"):
        assert f"{command} " in shown
        assert k3(command, "--help").exit_code == 0


def test_python_m_app_is_the_same_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "app", "config", "--json"], capture_output=True, text=True, check=True).stdout
    assert shown == k3("config", "--json").stdout


def test_config_lists_every_field() -> None:
    rows = [json.loads(line) for line in k3("config", "--json").stdout.splitlines()]
    assert {row["field"] for row in rows} == set(ServiceConfig.model_fields)
    assert all(row["meaning"] for row in rows)
    table = k3("config").stdout
    assert all(name in table for name in ServiceConfig.model_fields)


# -- what is refused before anything starts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "modle=x"), "did you mean model"),
        (("serve", "model"), "expected key=value"),
        (("serve", "tp=two"), "tp: Input should be a valid integer"),
        (("serve", "tp=2", "ep=3"), "multiple of tp=2"),
        (("serve", "model=/nowhere"), "/nowhere"),
        (("serve", f"model={GOLDEN}/k3/tiny-a/model", "tp=3"), "3"),
        (("serve", "--config", "/nowhere.yaml"), "/nowhere.yaml: No such file"),
        (("score", "--model", "/nowhere", "--prompts", "p.json", "--out", "o"), "/nowhere"),
        (("render", "/nowhere.json"), "/nowhere.json: No such file"),
        (("parse", "-", "--tokenizer", "/nowhere"), "/nowhere"),
        (("chat", "hi", "--url", "http://127.0.0.1:9/v1"), "no answer from http://127.0.0.1:9/v1"),
        (("chat", "hi", "--api-key", "file:/nowhere.key"), "/nowhere.key: No such file"),
        (("bench", "--url", "http://127.0.0.1:9/v1", "--streams", "2", "--requests", "1"), "all 2 requests failed"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    result = k3(*words, input="{}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("k3: ")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"), [("tp: [", "expected a mapping"), ("- 3", "expected a mapping"), ("applications: []", "expected")]
)
def test_a_config_file_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "k3.yaml"
    file.write_text(text)
    result = k3("serve", "--config", str(file))
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("prompts", "message"),
    [("[]", "expected an object of name"), ('{"a": []}', "'a'"), ('{"a": [99999]}', "99999"), ("{", "not a readable JSON")],
)
def test_score_names_the_faulty_prompt(tmp_path: Path, prompts: str, message: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(prompts)
    result = k3("score", "--model", f"{GOLDEN}/k3/tiny-a/model", "--prompts", str(file), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_refusal_leaves_ray_alone() -> None:
    """Ray reads its switches when it is imported: in a process that has only refused, neither has happened."""
    code = (
        "import os, sys; from typer.testing import CliRunner; from app.cli import cli; before = dict(os.environ)\n"
        "for words in (['serve', 'model=/nowhere'], ['serve', 'tp=7'], ['score', '--model', '/x', '--prompts', '/x', '--out', '/x']):\n"
        "    assert CliRunner().invoke(cli, words).exit_code == 2\n"
        "sys.exit('ray' in sys.modules or dict(os.environ) != before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- talking


def test_chat_answers_once(url: str) -> None:
    result = k3("chat", "Say", "hello", "--url", url, "--api-key", "secret")
    assert result.exit_code == 0
    assert result.stdout == "A greeting.\nHello you.\n"
    assert "completion tokens" in result.stderr


def test_chat_reads_what_is_piped_and_a_key_from_a_file(url: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    result = k3("chat", "--url", url, "--api-key", f"file:{key}", "--max-tokens", "100", input="Say hello.")
    assert result.stdout.endswith("Hello you.\n")


def test_chat_without_the_key(url: str) -> None:
    result = k3("chat", "hi", "--url", url)
    assert (result.exit_code, result.stderr.split(":")[0]) == (2, "k3")
    assert "401" in result.stderr


@pytest.mark.parametrize("more", [(), ("--chat",)], ids=["completions", "chat"])
def test_bench_counts_every_token(endless: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "bench.json"
    words = ("--streams", "1", "--streams", "3", "--requests", "2", "--prompt-tokens", "5", "--max-tokens", "9", "--out", str(out))
    result = k3("bench", "--url", endless, *words, "--json", *more)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows == json.loads(out.read_text())["rows"]
    assert [(row["streams"], row["requests"], row["failures"]) for row in rows] == [(1, 2, 0), (3, 6, 0)]
    for row in rows:
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(9 * row["requests"])
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p95_ms"]


def test_bench_prints_a_table(endless: str) -> None:
    result = k3("bench", "--url", endless, "--streams", "2", "--requests", "1", "--max-tokens", "3")
    assert "tokens_per_s" in result.stdout
    assert "ttft_p95_ms" in result.stdout


# -- rendering and parsing


def test_render_and_parse_golden_lines() -> None:
    for command, name in (("render", "golden_render"), ("parse", "golden_parse")):
        file = GOLDEN / "chat" / f"{name}.jsonl"
        result = k3(command, str(file), "--json")
        assert result.exit_code == 0, result.stderr
        shown = [json.loads(line) for line in result.stdout.splitlines()]
        cases = [json.loads(line) for line in file.read_text().split("\n") if line]
        if command == "render":
            assert [s["ids"] for s in shown] == [c["ids_tiny"] for c in cases]
        else:
            assert [s["content"] for s in shown] == [c["expected"]["content"] for c in cases]


def test_render_then_parse_to_read() -> None:
    shown = k3("render", "-", input=json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    assert '<|open|>message role="user"<|sep|>Hello' in shown.stdout
    assert " ids: " in shown.stdout
    ids = reply()("42.", reasoning="Sum.", calls=[reply().call("get_weather", city="Rome")])
    read = k3("parse", "-", input=json.dumps({"ids": ids}))
    assert read.stdout.splitlines() == ["reasoning: Sum.", "content: 42.", 'tool call: get_weather {"city": "Rome"}', "finish: tool_calls"]


def test_a_case_that_is_refused_does_not_hide_the_others() -> None:
    lines = '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": "nobody", "content": "b"}], "name": "odd"}\n'
    result = k3("render", "-", input=lines)
    assert result.exit_code == 1
    assert "--- case 2: odd" in result.stdout
    assert "messages[0].role" in result.stderr
    as_json = [json.loads(line) for line in k3("render", "-", "--json", input=lines).stdout.splitlines()]
    assert [next(iter(one)) for one in as_json] == ["text", "error"]
