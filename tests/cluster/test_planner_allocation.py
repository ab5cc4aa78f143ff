"""What is planned is what is allocated: weights of the golden checkpoints by shard, pages and slots of the runner that serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.config import ServiceConfig
from app.resolve import resolve
from cluster.accelerators import Accelerator
from cluster.planner import Workload, local_bytes, plan
from deployments.load import build_runner
from model.config import ModelConfig
from model.parallel import Mesh

DATA = Path(__file__).parent.parent / "data"
GOLDEN = DATA / "k3"
DTYPES = {2: torch.bfloat16, 4: torch.float32}
LAPTOP = Accelerator(memory=8e9, bandwidth=1e11, bf16_flops=1e12, link=1e10, source="a machine that is large enough")


@pytest.mark.parametrize("compute_bytes", [2, 4])
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [("tiny-a", 1, 1), ("tiny-a", 2, 2), ("tiny-a", 4, 4), ("tiny-b", 1, 4), ("tiny-b", 2, 4), ("tiny-c", 1, 2), ("kl-a", 1, 2)],
)
def test_planned_weights_are_what_the_fullest_shard_allocates(name: str, tp: int, ep: int, compute_bytes: int) -> None:
    """bf16 compute allocates what the files hold; float32 compute widens what they hold in bf16, and nothing else."""
    folder = (DATA / "kimi-linear" if name == "kl-a" else GOLDEN) / name / "model"
    allocated = []
    for rank in range(ep):
        mesh = Mesh(rank=rank, world=ep, tp=tp)
        runner = build_runner(folder, mesh, device="cpu", dtype=DTYPES[compute_bytes], page_size=16, num_pages=1, num_slots=1)
        allocated.append(sum(p.nbytes for p in runner.model.parameters()))
    assert max(allocated) == allocated[0]
    assert sum(local_bytes(ModelConfig.from_dir(folder), tp, ep, compute_bytes).values()) == allocated[0]


@pytest.mark.parametrize(("name", "tp", "ep"), [("tiny-a", 1, 1), ("tiny-a", 4, 4), ("tiny-b", 2, 4), ("tiny-c", 1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_pages_and_slots_are_the_runners(name: str, tp: int, ep: int, dtype: str) -> None:
    folder, context, budget, element = GOLDEN / name / "model", 512, 4 * 2**20, 4 if dtype == "float32" else 2
    words = {"model": str(folder), "tp": tp, "ep": ep, "dtype": dtype, "device": "cpu", "cache_bytes": budget, "max_model_len": context}
    served = resolve(ServiceConfig.model_validate({**words, "page_size": 16, "max_running": 8}), gpus=0).engine.shards
    mesh = Mesh(rank=0, world=ep, tp=tp)
    runner = build_runner(
        folder,
        mesh,
        device="cpu",
        dtype=getattr(torch, dtype),
        page_size=served.page_size,
        num_pages=served.num_pages,
        num_slots=served.num_slots,
    )
    workload = Workload(
        context=context, prompt=128, page_size=16, max_running=8, cache_bytes=budget, latent_bytes=element, compute_bytes=element
    )
    planned = plan(ModelConfig.from_dir(folder), "laptop", LAPTOP, ep, tp=tp, workload=workload)
    assert planned.pools is not None, planned.reason
    assert (planned.pools.num_pages, planned.pools.num_slots) == (served.num_pages, served.num_slots)
    pools = runner.pools
    assert pools.latents.nbytes + pools.kda.nbytes + pools.conv.nbytes <= budget
    assert pools.latents.nbytes == planned.pools.num_pages * 16 * ModelConfig.from_dir(folder).mla_token_bytes(element)
