"""`k3 doctor` of the embedded model: real shards on a Ray of its own say the golden tokens, and wrong ones are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from app.cli import cli
from app.golden import EMBEDDED

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_tokens_of_the_embedded_model(tmp_path: Path) -> None:
    place = 5
    wrong = [*EMBEDDED.tokens[:place], EMBEDDED.tokens[place] ^ 1, *EMBEDDED.tokens[place + 1 :]]
    file = tmp_path / "golden.json"
    file.write_text(
        json.dumps({"right": {"ids": EMBEDDED.ids, "tokens": EMBEDDED.tokens}, "wrong": {"ids": EMBEDDED.ids, "tokens": wrong}})
    )
    words = ["doctor", "--golden", str(file), "--skip", "links", "--port", "1", "--timeout", "120", "--json"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False, env={"RAY_ADDRESS": "local"})
    found = [f for f in map(json.loads, result.stdout.splitlines()) if f["check"] == "golden"]
    assert [(f["status"], f["where"]) for f in found] == [("ok", "2 shards, cpu, float32"), ("fail", "2 shards, cpu, float32")]
    assert found[1]["what"] == f"wrong: token {place} of 8 is {EMBEDDED.tokens[place]}, expected {wrong[place]}"
    assert result.exit_code == 1
    assert not ray.is_initialized(), "the command joined or started a Ray in this process"
