"""`k3 sessions` against the edge on a real port: what the verbs do, in words and as JSON, and how refusals look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from app.cli import cli
from cluster.sessions import SessionStore
from tests.app.edge import Edge, says
from tests.app.listening import listening
from tests.app.sessions import store
from tests.app.test_session_file import FILES, Shelf
from tests.app.test_sessions import ANSWER, ask, user


class MadeWhileServing:
    """The store wants a running loop: it is made at the first call, inside the server's."""

    @cached_property
    def _store(self) -> SessionStore:
        return store()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def url() -> Iterator[str]:
    edge = Edge(says(ANSWER), keys=("secret", "other"), sessions=MadeWhileServing(), bundles=Shelf(), files=FILES)  # type: ignore[arg-type]
    with listening(edge) as base:
        yield f"{base}/v1"


@pytest.fixture
def talked(url: str) -> str:
    """A server with the session `s`."""
    answer = httpx.post(f"{url}/chat/completions", json=ask(user("hi")), headers={"authorization": "Bearer secret"})
    assert answer.status_code == 200, answer.text
    return url


def k3(url: str, *words: str, key: str = "secret") -> Result:
    line = ["sessions", *words, "--url", url, "--api-key", key]
    return CliRunner().invoke(cli, line, catch_exceptions=False, env={"COLUMNS": "250", "TERM": "dumb"})


def card(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def names(url: str, **more: str) -> list[str]:
    return [json.loads(line)["id"] for line in k3(url, "list", "--json", **more).stdout.splitlines()]


def test_listed_and_shown(talked: str) -> None:
    assert names(talked) == ["s"]
    assert names(talked, key="other") == []
    table = k3(talked, "list").stdout
    assert " s " in table
    assert "stored up to" in table
    shown = k3(talked, "show", "s").stdout
    assert "[user] hi" in shown
    assert "[assistant, thinking] Hm." in shown
    assert "[assistant] Hello." in shown
    assert card(k3(talked, "show", "s", "--json"))["turns"] == 1


def test_marked_forked_pinned_deleted(talked: str) -> None:
    assert list(card(k3(talked, "mark", "s", "early", "--json"))["marks"]) == ["early"]
    fork = card(k3(talked, "fork", "s", "t", "--mark", "early", "--json"))
    assert (fork["id"], fork["parent"]) == ("t", "s")
    assert card(k3(talked, "fork", "s", "--json"))["id"].startswith("sess-")
    assert card(k3(talked, "pin", "t", "--json"))["pinned"]
    assert not card(k3(talked, "pin", "t", "--off", "--json"))["pinned"]
    assert "early" in k3(talked, "show", "s").stdout
    assert k3(talked, "delete", "s", "t").stdout == "deleted s\ndeleted t\n"
    assert len(names(talked)) == 1


def test_there_and_back_as_a_file(talked: str, tmp_path: Path) -> None:
    file = tmp_path / "back.safetensors"
    assert card(k3(talked, "export", "s", str(file), "--json")) == {"id": "s", "file": str(file), "bytes": file.stat().st_size}
    before = card(k3(talked, "show", "s", "--json"))
    again = k3(talked, "export", "s", str(file))
    assert (again.exit_code, "--force replaces it" in again.stderr) == (2, True)
    assert k3(talked, "export", "s", str(file), "--force").exit_code == 0
    assert "back" in k3(talked, "import", str(file)).stdout
    after = card(k3(talked, "show", "back", "--json"))
    assert (after["tokens"], after["messages"]) == (before["tokens"], before["messages"])
    file.write_bytes(file.read_bytes()[:-9])
    broken = k3(talked, "import", str(file), "third")
    assert (broken.exit_code, "400" in broken.stderr) == (2, True)
    assert sorted(names(talked)) == ["back", "s"]
    assert [p.name for p in tmp_path.iterdir()] == ["back.safetensors"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "none"), "404: there is no session"),
        (("show", "a/../b?c"), "404"),
        (("fork", "s", "s"), "409"),
        (("fork", "s", "--mark", "none"), "404"),
        (("mark", "s", "x" * 200), "400"),
        (("delete", "none"), "404"),
        (("export", "none"), "404"),
        (("import", "/nowhere.safetensors"), "/nowhere.safetensors: No such file"),
    ],
)
def test_refusals_are_one_line_and_exit_code_2(talked: str, words: tuple[str, ...], said: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = k3(talked, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_no_server_and_no_key(url: str) -> None:
    assert "no answer from http://127.0.0.1:9/v1" in k3("http://127.0.0.1:9/v1", "list").stderr
    assert "no answer from http://127.0.0.1:9/v1" in k3("http://127.0.0.1:9/v1", "export", "s").stderr
    assert "401" in k3(url, "list", key="wrong").stderr
