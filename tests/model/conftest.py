"""Golden sets and one-process runners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deployments.load import build_runner
from model.kimi_k3 import KimiK3
from model.parallel import Mesh
from model.runner import ModelRunner
from model.state import StatePools
from tests.model.golden import SETS, Golden, golden


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=SETS)
def gold(request: pytest.FixtureRequest) -> Golden:
    return golden(request.param)


@pytest.fixture(scope="session")
def model(gold: Golden) -> KimiK3:
    return build_runner(gold.model, Mesh.single(), device="cpu", dtype=torch.float32, page_size=16, num_pages=1, num_slots=1).model


@pytest.fixture
def runner(model: KimiK3) -> ModelRunner:
    """Fresh pools, poisoned: whatever is read before it was written spoils the result."""
    pools = StatePools.allocate(model.config, tp_size=1, page_size=16, num_pages=150, num_slots=24, device="cpu", dtype=torch.float32)
    for pool in (pools.latents, pools.kda, pools.conv):
        pool.fill_(float("nan"))
    return ModelRunner(model, Mesh.single(), pools)
