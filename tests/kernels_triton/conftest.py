"""Triton's interpreter where there is no GPU. It must be chosen before triton is first imported; nothing else in the tests imports it."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> str:
    from triton import knobs

    if torch.cuda.is_available():
        return "cuda"
    assert knobs.runtime.interpret, f"triton was imported before this file: {[m for m in sys.modules if m.startswith('triton')][:3]}"
    return "cpu"


@pytest.fixture
def generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(torch.seed() if device == "cuda" else 1)
