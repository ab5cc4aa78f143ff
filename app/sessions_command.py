"""`k3 sessions`: the verbs of `/v1/sessions` from a terminal, against a running server."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer

from app.options import URL, Json, Key, Url, authorization
from app.talk import TIMEOUT, server_words
from app.terminal import clear_errors, print_table, refuse
from engine.errors import EngineFailure, InvalidRequest

commands = typer.Typer(
    name="sessions",
    help="""Conversations that a running server keeps: list, show, fork, mark, pin, delete them, and move them as files.

    A session begins with its first turn, `k3 chat --session trip "Plan a trip"`, and belongs to the API key that began it.

    Examples: `k3 sessions list` · `k3 sessions fork trip trip-2` · `k3 sessions export trip` ·
    `k3 sessions import trip.safetensors --url http://elsewhere:8000/v1`""",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Session = Annotated[str, typer.Argument(help="the session's name", metavar="ID")]


@commands.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="the newest so many")] = 100,
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """The sessions of your key, newest first."""
    cards = _ask("GET", url, api_key, "", params={"limit": limit})["data"]
    if as_json:
        for card in cards:
            print(json.dumps(card))
        return
    columns = ("id", "turns", "stored up to", "marks", "pinned", "parent", "cost $", "updated")
    print_table(f"sessions of {url}", columns, [_row(card) for card in cards], as_json=False)


@commands.command("show")
def show_session(session: Session, url: Url = URL, api_key: Key = None, as_json: Json = False) -> None:
    """One session: its figures, its marks, its stored states and its messages."""
    card = _ask("GET", url, api_key, session)
    if as_json:
        print(json.dumps(card))
        return
    _print_card(card)
    for message in card["messages"]:
        if thinking := message.get("reasoning_content"):
            print(f"[{message['role']}, thinking] {thinking}")
        print(f"[{message['role']}] {_text(message.get('content'))}")
        for call in message.get("tool_calls") or ():
            print(f"[{message['role']}, calls] {call['function']['name']} {call['function']['arguments']}")


@commands.command("fork")
def fork_session(
    session: Session,
    name: Annotated[str | None, typer.Argument(help="the fork's name; none = the server makes one")] = None,
    mark: Annotated[str | None, typer.Option(help="fork from this mark instead of from the end")] = None,
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """A second session that goes on from the same place. No state is copied."""
    asked = {key: value for key, value in (("session_id", name), ("mark", mark)) if value is not None}
    _tell(_ask("POST", url, api_key, session, "fork", json=asked), as_json)


@commands.command("mark")
def mark_session(
    session: Session,
    name: Annotated[str, typer.Argument(help="name of the mark")],
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Name the end of the last turn, to fork from there later."""
    _tell(_ask("POST", url, api_key, session, "mark", json={"name": name}), as_json)


@commands.command("pin")
def pin_session(
    session: Session,
    pinned: Annotated[bool, typer.Option("--on/--off", help="pinned, or as all others again")] = True,
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Keep a session from expiring."""
    _tell(_ask("POST", url, api_key, session, "pin", json={"pinned": pinned}), as_json)


@commands.command("delete")
def delete_sessions(
    sessions: Annotated[list[str], typer.Argument(help="the sessions' names", metavar="ID...")],
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Forget sessions. What their forks share stays."""
    for session in sessions:
        answer = _ask("DELETE", url, api_key, session)
        print(json.dumps(answer) if as_json else f"deleted {answer['id']}")


@commands.command("export")
def export_session(
    session: Session,
    file: Annotated[Path | None, typer.Argument(help="none = ID.safetensors here")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace a file that is there")] = False,
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Write a session, with its state when one is stored, to one signed file. The server needs export_key."""
    target = file or Path(f"{session}.safetensors")
    if target.exists() and not force:
        refuse(f"{target} is there already; --force replaces it")
    with clear_errors():
        written = _download(url, api_key, session, target)
    print(json.dumps({"id": session, "file": str(target), "bytes": written}) if as_json else f"{target}: {written:,} bytes")


@commands.command("import")
def import_session(
    file: Annotated[Path, typer.Argument(help="a file that `k3 sessions export` wrote, for the same model and key")],
    session: Annotated[str | None, typer.Argument(help="the new session's name; none = the file's name", metavar="[ID]")] = None,
    url: Url = URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Take a session from a file. It is checked whole, or refused with the part that is wrong."""
    with clear_errors(), file.open("rb") as raw:
        answer = _ask("POST", url, api_key, session or file.stem, "import", content=raw)
    _tell(answer, as_json)


def _ask(method: str, url: str, api_key: str | None, session: str, verb: str = "", **more: Any) -> dict[str, Any]:
    """One call of the API; what it refuses is told in its own words."""
    with clear_errors(), _client(url, api_key) as client:
        response = client.request(method, _path(session, verb), **more)
        if response.status_code != 200:
            raise InvalidRequest(f"the server answered {response.status_code}: {server_words(response.content)}")
        answer: dict[str, Any] = response.json()
    return answer


def _download(url: str, api_key: str | None, session: str, target: Path) -> int:
    """Beside the target and renamed, so that a partial file never has its name."""
    with _client(url, api_key) as client, client.stream("GET", _path(session, "export")) as response:
        if response.status_code != 200:
            raise InvalidRequest(f"the server answered {response.status_code}: {server_words(response.read())}")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".exporting-", delete=False) as scratch:
            try:
                for part in response.iter_bytes():
                    scratch.write(part)
                scratch.flush()
                Path(scratch.name).replace(target)
            except BaseException:
                Path(scratch.name).unlink(missing_ok=True)
                raise
    return target.stat().st_size


@contextmanager
def _client(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    try:
        with httpx.Client(base_url=url, headers=authorization(api_key), timeout=TIMEOUT) as client:
            yield client
    except httpx.HTTPError as error:
        raise EngineFailure(f"no answer from {url}: {str(error) or type(error).__name__}") from None
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"--url {url}: {error}") from None


def _path(session: str, verb: str) -> str:
    return "/".join(part for part in ("sessions", quote(session, safe=""), verb) if part)


def _tell(card: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(card))
    else:
        _print_card(card)


def _print_card(card: dict[str, Any]) -> None:
    states = ", ".join(f"{bundle['position']:,}" for bundle in card["bundles"]) or "none yet"
    rows = [
        ("turns", card["turns"]),
        ("tokens", f"{card.get('tokens', 0):,}"),
        ("states stored at", states),
        ("marks", ", ".join(card["marks"]) or "none"),
        ("pinned", "yes" if card["pinned"] else "no"),
        ("parent", card["parent"] or "none"),
        ("cost", f"${card['cost']:.6f}"),
        ("created", _when(card["created"])),
        ("updated", _when(card["updated"])),
    ]
    print_table(card["id"], ("figure", "value"), [(name, str(value)) for name, value in rows], as_json=False)


def _row(card: dict[str, Any]) -> tuple[Any, ...]:
    return (
        card["id"],
        card["turns"],
        card["position"],
        ", ".join(card["marks"]),
        "yes" if card["pinned"] else "",
        card["parent"] or "",
        f"{card['cost']:.6f}",
        _when(card["updated"]),
    )


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _text(content: Any) -> str:
    """A message's text; parts that are none by their type."""
    if isinstance(content, list):
        return " ".join(part.get("text") or f"<{part.get('type')}>" for part in content)
    return str(content or "")
