"""`k3 doctor`: everything that can be checked before traffic, on this machine or on all nodes of a Ray cluster, within a stated time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from app import serve_modes
from app.doctor import Examination, Step, examine
from app.options import ConfigFile, Json, Key, Settings, authorization, read_config
from app.terminal import clear_errors, stderr
from cluster.doctor import Finding, Status

commands = typer.Typer()

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


@commands.command("doctor")
def check_up(
    settings: Settings = None,
    file: ConfigFile = None,
    host: Annotated[str, typer.Option(help="address that will be served on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port that will be served on", min=1, max=65535)] = 8000,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster, as host:port or `auto`; `local` = this machine alone; none = the one that `k3 serve` would join"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="base URL of a server that runs already (…/v1): the golden prompts are asked there")
    ] = None,
    golden: Annotated[
        Path | None, typer.Option(help='JSON: {name: {"ids": [prompt], "tokens": [greedy reply]}}; none = the embedded model\'s own')
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="seconds for each of the five steps; what has not answered by then failed", min=10)
    ] = 120.0,
    skip: Annotated[list[Step] | None, typer.Option(help="leave a step out: links | golden; repeat for both")] = None,
    as_json: Json = False,
    api_key: Key = None,
) -> None:
    """Check everything before traffic, with the words that `k3 serve` will get: files, nodes, links, stores, clocks, ports, tokens.

    Says what is wrong, why it matters and what mends it. Exit code 1 when something failed.
    It ends within five times --timeout, whatever hangs; a node that is silent for 30 s is left behind.

    Examples: `k3 doctor` · `k3 doctor model=/data/kimi-k3 tp=8 ep=64 durable_url=s3://sessions/k3` · `k3 doctor --url http://127.0.0.1:8000/v1`
    """
    wanted = Examination(
        config=read_config(settings or [], file),
        host=host,
        port=port,
        address=None if address == "local" else address or serve_modes.cluster_address(),
        url=url.rstrip("/") if url else None,
        headers=authorization(api_key),
        golden=golden,
        limit_s=timeout,
        skip=frozenset(skip or ()),
    )
    place = "this machine" if wanted.address is None else f"the Ray cluster at {wanted.address} (--address local: this machine alone)"
    stderr.print(f"looking at {place}", highlight=False, soft_wrap=True)
    serve_modes.switch_on("default", own_ray=wanted.address is None)
    findings: list[Finding] = []
    with clear_errors(), stderr.status("examining"):
        for finding in examine(wanted):
            findings.append(finding)
            if as_json:
                print(json.dumps(_plain(finding)), flush=True)
    if not as_json:
        _show(findings)
    if any(f.status is Status.FAIL for f in findings):
        raise typer.Exit(1)


def _plain(f: Finding) -> dict[str, Any]:
    return {
        "check": f.check,
        "status": f.status.value,
        "where": f.where,
        "what": f.what,
        "why": f.why,
        "fix": f.fix,
        "figures": dict(f.figures),
    }


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=box.SIMPLE)
    for column in ("", "check", "where", "finding"):
        table.add_column(column, overflow="fold")
    for f in findings:
        table.add_row(f"[{STYLES[f.status]}]{f.status}[/]", f.check, f.where, f.what)
    console = Console()
    console.print(table)
    for f in findings:
        if f.status is not Status.OK:
            console.print(f"[{STYLES[f.status]}]{f.status}[/] {f.check}{' on ' + f.where if f.where else ''}:", end=" ", highlight=False)
            console.print(f"{f.what}\n     why: {f.why}\n     fix: {f.fix}", markup=False, highlight=False, soft_wrap=True)
    counts = {status: sum(f.status is status for f in findings) for status in Status}
    console.print(f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed", highlight=False)
