"""Several processes on one machine: started once for many cases, each case on its own mesh."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from model.parallel import Mesh, connect

Work = Callable[[Mesh], Any]


def run_processes(world: int, work: Sequence[tuple[int, Work]], directory: Path, backend: str = "gloo") -> list[list[Any]]:
    """Run each (tp, work) on a mesh of `world` processes -> what each returned, by case and rank. An exception in one fails the call.

    With "nccl" each process has selected the CUDA device of its rank.
    """
    get_context("forkserver").set_forkserver_preload(["model.runner", "tests.model.golden"])  # torch is imported once, not once a process
    multiprocessing.start_processes(_process, args=(world, list(work), str(directory), backend), nprocs=world, start_method="forkserver")
    by_rank = [pickle.loads((directory / f"rank-{rank}").read_bytes()) for rank in range(world)]
    return [list(case) for case in zip(*by_rank, strict=True)]


def _process(rank: int, world: int, work: list[tuple[int, Work]], directory: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    returned = []
    for number, (tp, case) in enumerate(work):
        mesh = connect(f"file://{directory}/case-{number}", rank=rank, world=world, tp=tp, backend=backend, timeout=120)
        returned.append(case(mesh))
        mesh.close()
    (Path(directory) / f"rank-{rank}").write_bytes(pickle.dumps(returned))
