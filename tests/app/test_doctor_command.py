"""`k3 doctor`: words in, findings and an exit code out. Golden tokens through real shards are in tests/e2e."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner, Result

from app.cli import cli
from tests.app.edge import Edge, says
from tests.app.listening import listening

GOLDEN = Path(__file__).parent.parent / "data" / "k3" / "tiny-a" / "model"
REPLY = [7, 8, 9]


def k3(*words: str) -> Result:
    return CliRunner().invoke(
        cli, ["doctor", *words], catch_exceptions=False, env={"COLUMNS": "250", "TERM": "dumb", "RAY_ADDRESS": "local"}
    )


def told(result: Result) -> dict[str, list[dict[str, Any]]]:
    """By check."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in result.stdout.splitlines():
        finding = json.loads(line)
        assert bool(finding["fix"]) == (finding["status"] != "ok")
        assert finding["why"]
        found.setdefault(finding["check"], []).append(finding)
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose every reply is the same three ids."""
    edge = Edge(says(REPLY), keys=("secret",))
    edge.api.router.routes.append(Route("/health", lambda request: JSONResponse({"status": "ok"})))
    with listening(edge) as base:
        yield f"{base}/v1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


def golden(tmp_path: Path, tokens: list[int]) -> str:
    file = tmp_path / "golden.json"
    file.write_text(json.dumps({"greeting": {"ids": [1, 2, 3], "tokens": tokens}}))
    return str(file)


def test_a_running_server_that_is_well(url: str, model: Path, tmp_path: Path) -> None:
    words = ("--url", url, "--api-key", "secret", f"model={model}", f"durable_url=file://{tmp_path}/store")
    result = k3(*words, "--golden", golden(tmp_path, REPLY), "--json")
    found = told(result)
    assert result.exit_code == 0, result.stdout
    checks = {
        "server",
        "files",
        "fingerprint",
        "software",
        "accelerators",
        "disk",
        "configuration",
        "memory",
        "links",
        "golden",
        "durable store",
    }
    assert set(found) - {"limits", "object store"} == checks
    assert found["golden"][0]["what"] == "greeting: all 3 tokens"


def test_wrong_golden_tokens_are_told_by_place(url: str, model: Path, tmp_path: Path) -> None:
    words = ("--url", url, "--api-key", "secret", f"model={model}")
    result = k3(*words, "--golden", golden(tmp_path, [7, 100, 9]), "--skip", "links")
    assert result.exit_code == 1
    assert "greeting: token 1 of 3 is 8, expected 100" in result.stdout
    assert "why: equal tokens are the only proof" in result.stdout
    assert "fix: compare files" in result.stdout
    assert "1 failed" in result.stdout


def test_another_model_than_the_embedded_one_may_be_served(url: str) -> None:
    found = told(k3("--url", url, "--api-key", "secret", "--skip", "links", "--json"))
    assert found["golden"][0]["status"] == "fail"
    assert "if another model is served there" in found["golden"][0]["fix"]


def test_a_server_that_is_not_there(model: Path, tmp_path: Path) -> None:
    words = ("--url", "http://127.0.0.1:9/v1", f"model={model}", "--golden", golden(tmp_path, REPLY), "--skip", "links", "--json")
    result = k3(*words)
    found = told(result)
    assert result.exit_code == 1
    assert (found["server"][0]["status"], found["golden"][0]["status"]) == ("fail", "fail")


def test_damaged_files_and_a_busy_port_at_once(model: Path) -> None:
    file = model / "model-00001-of-000003.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = k3(f"model={model}", "--port", str(taken.getsockname()[1]), "--skip", "links", "--json")
    found = told(result)
    assert result.exit_code == 1
    assert "Address already in use" in found["ports"][0]["what"]
    assert "model-00001" in found["files"][0]["what"]
    assert "golden" not in found, "a broken checkpoint is not loaded"


def test_no_room_and_a_dead_store_and_too_few_accelerators(model: Path) -> None:
    words = (
        f"model={model}",
        "store_bytes=1000PB",
        "durable_url=s3://b/p",
        "durable_endpoint_url=http://127.0.0.1:9",
        "device=cuda",
        "tp=64",
    )
    found = told(k3(*words, "--skip", "links", "--json"))
    assert "to spill to" in found["object store"][0]["what"]
    assert found["durable store"][0]["status"] == "fail"
    assert "64 are needed" in found["accelerators"][0]["what"]
    assert found["configuration"][0]["status"] == "fail"


def test_pools_larger_than_the_memory(model: Path) -> None:
    found = told(k3(f"model={model}", "cache_bytes=500TB", "--port", "1", "--skip", "links", "--json"))
    assert found["configuration"][0]["status"] == "ok"
    assert found["memory"][0]["status"] == "fail"
    assert "1 shards of up to 500 TB" in found["memory"][0]["what"]


def test_without_golden_tokens_it_says_that_none_were_checked(model: Path) -> None:
    found = told(k3(f"model={model}", "--port", "1", "--skip", "links", "--json"))
    assert found["golden"][0]["status"] == "warn"


def test_a_cluster_that_is_dead_is_told_within_its_time(model: Path) -> None:
    found = told(k3(f"model={model}", "--address", "127.0.0.1:9", "--timeout", "10", "--json"))
    assert "127.0.0.1:9" in found["ray"][0]["what"]
    assert found["ray"][0]["status"] == "fail"
    assert {"files", "links", "golden"}.isdisjoint(found), "nobody is there to be looked at"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not a readable JSON"),
        ("[]", "with at least one entry"),
        ('{"a": {"ids": [1]}}', "'a': tokens"),
        ('{"a": {"ids": [], "tokens": [1]}}', "'a': ids"),
    ],
)
def test_golden_files_that_are_none(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "golden.json"
    file.write_text(content)
    result = k3("--golden", str(file))
    assert result.exit_code == 2
    assert words in result.stderr
