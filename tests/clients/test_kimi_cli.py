"""kimi-cli, unmodified and non-interactive: it reads a file by a tool call and answers from what it read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.types import GenerateRequest
from tests.app.edge import Edge, reply, tokenizer
from tests.app.listening import listening
from tests.clients.installed import program
from tests.fakes import FakeEngineClient

pytestmark = pytest.mark.slow
NOTE = "scripted-marker-7"


def model(request: GenerateRequest) -> list[int]:
    """Asks for the file; once the conversation ends in the tool's answer, quotes it."""
    last = tokenizer().decode(request.prompt).rpartition('message role="tool"')[2]
    if NOTE in last:
        return reply()(f"The note says {NOTE}.", reasoning="I have it.")
    return reply()("", reasoning="I must look.", calls=[reply().call("ReadFile", path="note.txt")])


def run(kimi: Path, url: str, home: Path, prompt: str) -> list[dict[str, Any]]:
    work = home / "work"
    work.mkdir()
    (work / "note.txt").write_text(NOTE + "\n")
    config = {
        "default_model": "k3",
        "default_thinking": True,
        "models": {"k3": {"provider": "here", "model": "kimi-k3", "max_context_size": 262_144, "capabilities": ["thinking"]}},
        "providers": {"here": {"type": "kimi", "base_url": f"{url}/v1", "api_key": "none"}},
    }
    command = [kimi, "--print", "--output-format", "stream-json", "--config", json.dumps(config), "-w", work, "-p", prompt]
    done = subprocess.run(
        command, env={"HOME": str(home)}, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_tool_call_and_an_answer(tmp_path: Path) -> None:
    kimi = program("kimi-cli", "kimi")
    edge = Edge(FakeEngineClient(script=model, per_chunk=3), max_model_len=400_000, max_body_bytes=8 << 20)
    with listening(edge) as url:
        called, tool, answered = run(kimi, url, tmp_path, "What does note.txt say?")
    [call] = called["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("ReadFile", {"path": "note.txt"})
    assert NOTE in json.dumps(tool["content"])
    assert [part.get("think") or part.get("text") for part in answered["content"]] == ["I have it.", f"The note says {NOTE}."]
    first, second = edge.engine.requests
    assert "I must look." in tokenizer().decode(second.prompt), "the thinking came back with the history"
    generated = tuple(reply()("", reasoning="I must look.", calls=[reply().call("ReadFile", path="note.txt")]))
    assert second.prompt[: len(first.prompt) + len(generated)] == first.prompt + generated, "the next turn continues the same tokens"
