"""A shard's `ModelRunner` from a checkpoint: reads its part, allocates its pools. Imported by the shard only."""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.checkpoint import read_checkpoint
from cluster.weight_reader import LoadSettings, WeightReader, sole_reader
from model.config import ModelConfig
from model.loader import check_dtype, load
from model.parallel import Mesh
from model.rows import Matchers
from model.runner import ModelRunner
from model.state import StatePools


def build_runner(
    model: str | Path,
    mesh: Mesh,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    page_size: int,
    num_pages: int,
    num_slots: int,
    matchers: Matchers | None = None,
    reader: WeightReader | None = None,
    config: ModelConfig | None = None,
) -> ModelRunner:
    """Loads this process' part of the checkpoint and allocates its pools. `matchers`: on ranks that sample constrained rows.

    `reader` and `config`: of a checkpoint that was checked already; otherwise it is checked here, and read for this process alone.
    Raises `ConfigError` for a model or grid that cannot be served and `CheckpointError` for a faulty checkpoint.
    """
    check_dtype(dtype)
    if reader is None or config is None:
        checkpoint = read_checkpoint(str(model))
        config, reader = checkpoint.config, sole_reader(checkpoint, LoadSettings(), rank=mesh.rank, tp=mesh.tp, shards=mesh.world)
    loaded = load(config, mesh, reader, device=device, dtype=dtype)
    pools = StatePools.allocate(
        config, tp_size=mesh.tp, page_size=page_size, num_pages=num_pages, num_slots=num_slots, device=device, dtype=dtype
    )
    return ModelRunner(loaded, mesh, pools, matchers)
