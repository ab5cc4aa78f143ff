"""litellm, unmodified, by three of its providers: they understand the same answer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.app.edge import Edge, reply, says
from tests.app.listening import listening
from tests.clients.installed import program

pytestmark = pytest.mark.slow


def test_thinking_answer_and_tool_call_arrive(tmp_path: Path) -> None:
    python = program("litellm", "python")
    ids = reply()("I look.", reasoning="They ask.", calls=[reply().call("get_weather", city="Rome")])
    environment = {"HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch a price list from the internet
    with listening(Edge(says(ids, per_chunk=2))) as url:
        done = subprocess.run(
            [python, Path(__file__).with_name("litellm_asks.py"), url],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {f"{provider} {way}" for provider in ("openai", "moonshot", "anthropic") for way in ("whole", "stream")}
    for way, understood in found.items():
        said = (understood["reasoning"], understood["content"], understood["calls"], understood["finish"])
        assert said == ("They ask.", "I look.", [["get_weather", {"city": "Rome"}]], "tool_calls"), way
        assert understood["tokens"][1] == len(ids), way
