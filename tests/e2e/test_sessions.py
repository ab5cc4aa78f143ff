"""Sessions on real Ray: turns, forks, files and the handle, with the store and the holders behind them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from typer.testing import CliRunner

from app.cli import cli
from tests.e2e.serving import Server, served

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LONG = {"role": "user", "content": "Tell me more. " * 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("a key for tests, long enough")
    with served(tp=2, page_size=16, max_model_len=2048, cache_bytes="32MiB", export_key=f"file:{key}") as running:
        yield running


def turn(server: Server, session: str, **more: Any) -> dict[str, Any]:
    body = {"model": "kimi-k3", "messages": [LONG], "session_id": session, "session_mode": "append", "temperature": 0, "max_tokens": 8}
    response = server.post("/v1/chat/completions", body | {"return_token_ids": True} | more)
    assert response.status_code == 200, response.text
    return response.json()


def stored(server: Server, session: str, position: int) -> dict[str, Any]:
    """The session, once a state at or after the position is stored."""
    deadline = time.monotonic() + 30
    while True:
        shown = server.get(f"/v1/sessions/{session}").json()
        if shown["position"] >= position:
            return shown
        assert time.monotonic() < deadline, shown
        time.sleep(0.2)


def test_appended_turns_are_the_full_history(server: Server) -> None:
    first = turn(server, "a")
    second = turn(server, "a")
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
    assert second["usage"]["resume_source"] == "device"
    message = first["choices"][0]["message"]
    full = turn(server, "b", messages=[LONG, message, LONG], session_mode="full")
    shown = server.get("/v1/sessions/a").json()
    assert shown["turns"] == 2
    assert shown["messages"][1]["reasoning_content"] == message["reasoning_content"]
    assert [m["content"] for m in shown["messages"]] == [m["content"] for m in server.get("/v1/sessions/b").json()["messages"]]
    assert full["prompt_token_ids"] == second["prompt_token_ids"]
    assert full["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


def test_a_session_leaves_and_comes_back_as_a_file(server: Server) -> None:
    first = turn(server, "c", messages=[{"role": "user", "content": "Something that nobody has said before. " * 8}])
    shown = stored(server, "c", 64)
    file = server.get("/v1/sessions/c/export")
    assert file.status_code == 200, file.text
    expected = turn(server, "c")["choices"][0]["token_ids"]
    assert httpx.delete(f"{server.url}/v1/sessions/c").status_code == 200
    back = httpx.post(f"{server.url}/v1/sessions/d/import", content=file.content, timeout=60)
    assert back.status_code == 200, back.text
    assert back.json()["position"] > 0
    assert back.json()["tokens"] == shown["tokens"] >= first["usage"]["prompt_tokens"]
    assert turn(server, "d")["choices"][0]["token_ids"] == expected
    broken = httpx.post(f"{server.url}/v1/sessions/e/import", content=file.content[:-100], timeout=60)
    assert broken.status_code == 400
    assert "cut off" in broken.text


async def test_the_handle_has_the_same_verbs(server: Server) -> None:
    handle = serve.get_app_handle("k3")
    body = {"messages": [LONG], "temperature": 0, "max_tokens": 6}
    await handle.chat.remote(body, session_id="h")
    await handle.mark.remote("h", "first")
    await handle.chat.remote(body, session_id="h", session_mode="append")
    forked = await handle.fork.remote("h", "i", "first")
    assert (forked["id"], forked["parent"]) == ("i", "h")
    assert len((await handle.session.remote("i"))["messages"]) == 2
    file = await handle.export_session.remote("h")
    assert (await handle.import_session.remote("j", file))["tokens"] == (await handle.session.remote("h"))["tokens"]
    assert {"h", "i", "j"} <= {s["id"] for s in (await handle.sessions.remote())["data"]}
    await handle.delete_session.remote("j")
    with pytest.raises(Exception, match="there is no session"):
        await handle.session.remote("j")


def test_errors_cross_the_actors(server: Server) -> None:
    assert server.get("/v1/sessions/none").status_code == 404
    assert server.post("/v1/sessions", {"session_id": "taken"}).status_code == 200
    assert server.post("/v1/sessions", {"session_id": "taken"}).status_code == 409


def test_the_command_line_has_the_same_verbs(server: Server, tmp_path: Path) -> None:
    def k3(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(cli, ["sessions", *words, "--url", f"{server.url}/v1", "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout.splitlines()[0])

    turn(server, "k", messages=[{"role": "user", "content": "What the command line moves. " * 8}])
    tokens = stored(server, "k", 64)["tokens"]
    assert k3("fork", "k", "l")["parent"] == "k"
    file = str(tmp_path / "k.safetensors")
    assert k3("export", "k", file)["bytes"] > 0
    assert k3("delete", "k")["deleted"]
    back = k3("import", file, "m")
    assert back["position"] > 0
    assert back["tokens"] == tokens
    assert turn(server, "m")["choices"][0]["token_ids"] == turn(server, "l")["choices"][0]["token_ids"]
