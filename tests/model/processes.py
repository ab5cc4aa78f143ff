"""Several processes over gloo on one machine: started once for many cases, each case on its own mesh."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from model.parallel import Mesh, connect

Work = Callable[[Mesh], Any]


def run_processes(world: int, work: Sequence[tuple[int, Work]], directory: Path) -> list[list[Any]]:
    """Run each (tp, work) on a mesh of `world` processes -> what each returned, by case and rank. An exception in one fails the call."""
    multiprocessing.spawn(_process, args=(world, list(work), str(directory)), nprocs=world)
    by_rank = [pickle.loads((directory / f"rank-{rank}").read_bytes()) for rank in range(world)]
    return [list(case) for case in zip(*by_rank, strict=True)]


def _process(rank: int, world: int, work: list[tuple[int, Work]], directory: str) -> None:
    torch.set_num_threads(1)
    returned = []
    for number, (tp, case) in enumerate(work):
        mesh = connect(f"file://{directory}/case-{number}", rank=rank, world=world, tp=tp, backend="gloo", timeout=120)
        returned.append(case(mesh))
        mesh.close()
    (Path(directory) / f"rank-{rank}").write_bytes(pickle.dumps(returned))
