"""The embedded model, and what the edge does not import for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from app.default_model import ensure_default_model


def test_made_once_and_always_the_same(tmp_path: Path) -> None:
    first = ensure_default_model(tmp_path / "a")
    assert ensure_default_model(tmp_path / "a") == first
    again = ensure_default_model(tmp_path / "b")
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {f.name: f.read_bytes() for f in again.iterdir()}
    assert [f.name for f in (tmp_path / "a").iterdir()] == [first.name], "nothing half made is left"


def test_neither_the_ingress_nor_the_engine_replica_loads_torch() -> None:
    code = "import sys, app.ingress, app.resolve, deployments.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
