"""Clients with dependencies of their own live in environments of their own: `make clients` puts them under .clients/."""

from __future__ import annotations

from pathlib import Path

import pytest

CLIENTS = Path(__file__).resolve().parent.parent.parent / ".clients"


def program(client: str, name: str) -> Path:
    """An executable of that client's environment; without it the test is skipped and says so."""
    path = CLIENTS / client / "bin" / name
    if not path.exists():
        pytest.skip(f"{client} is not installed in {CLIENTS} (`make clients`)")
    return path
