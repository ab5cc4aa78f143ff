"""What every benchmark prints and keeps: one table, and the same rows as benchmarks/results/<name>.json with machine and versions."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement. `floor` is what cannot be beaten, `peers` what others take, all in `unit`."""

    work: str
    ours: float
    unit: str
    floor: float | None = None
    target: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)


def machine() -> dict[str, object]:
    """Where it ran: processor, cores, and the accelerator if torch is loaded and sees one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    found: dict[str, object] = {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}
    found["load"] = round(os.getloadavg()[0], 1)  # busy neighbours make everything slower
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["accelerators"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def publish(name: str, rows: Sequence[Row], *, packages: Sequence[str] = (), notes: str = "", results: Path = RESULTS) -> Path:
    """Prints the table and writes the file; returns its path."""
    peers = sorted({peer for row in rows for peer in row.peers})
    table = Table(title=name, caption=notes or None, title_justify="left", caption_justify="left")
    table.add_column("work")
    for column in ("floor", *peers, "ours", "target"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for row in rows:
        values = [row.floor, *(row.peers.get(peer) for peer in peers), row.ours, row.target]
        table.add_row(row.work, *("-" if v is None else f"{v:.4g}" for v in values), row.unit)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a log has no width of its own
    console.print(table)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    body = {"name": name, "machine": machine(), "versions": versions(packages), "notes": notes, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(body, indent=2) + "\n")
    return path
