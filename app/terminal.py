"""How the command line looks: tables, replies as they stream, errors in one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.talk import Talk
from chat.types import ChatError
from engine.errors import K3Error

stderr = Console(stderr=True, highlight=False)
STYLES = {"reasoning": "dim", "content": "", "tool": "cyan"}


def refuse(message: str) -> NoReturn:
    """Ends the command with exit code 2 and one line."""
    stderr.print(f"[red]k3: {escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(2)


@contextmanager
def clear_errors() -> Iterator[None]:
    """What can go wrong for a reason that the user can mend is told without a stack trace."""
    try:
        yield
    except ChatError as error:
        refuse(f"{error.param}: {error}" if error.param else str(error))
    except K3Error as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        if "timed out during startup" not in str(error):  # Ray has no type of its own for it
            raise
        refuse(f"Ray did not start: {str(error).splitlines()[0]}")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, as_json: bool) -> None:
    """A table to read, or a JSON object a row on its own line."""
    if as_json:
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True))))
        return
    table = Table(title=title or None, title_justify="left")
    for place, column in enumerate(columns):
        numeric = all(isinstance(row[place], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    Console().print(table)


async def print_reply(talk: Talk, text: str) -> None:
    """Streams one turn: thinking dimmed, answer plain, then a line of figures on standard error."""
    out = Console(highlight=False)
    channel: str | None = None
    async for said in talk.ask(text):
        if said.kind != channel:
            if channel is not None:
                out.print()
            channel = said.kind
        out.print(said.text, style=STYLES[said.kind], end="", markup=False, soft_wrap=True)
    out.print()
    stderr.print(f"[dim]{escape(figures(talk.usage, talk.finish))}[/dim]")


async def hold_conversation(talk: Talk, read_line: Callable[[], str | None]) -> None:
    """Until `read_line` gives None. A turn that fails is told and can be tried again."""
    while (text := await asyncio.to_thread(read_line)) is not None:
        if not text:
            continue
        try:
            await print_reply(talk, text)
        except K3Error as error:
            stderr.print(f"[red]k3: {escape(str(error))}[/red]", soft_wrap=True)


def figures(usage: Mapping[str, Any], finish: str | None) -> str:
    """`12 prompt (11 cached) + 30 completion tokens · $0.000486 · length`"""
    if not usage:
        return finish or "no usage was reported"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    parts = [f"{usage['prompt_tokens']} prompt ({cached} cached) + {usage['completion_tokens']} completion tokens"]
    if "cost" in usage:
        parts.append(f"${usage['cost']:.6f}")
    return " · ".join([*parts, *([finish] if finish else [])])
