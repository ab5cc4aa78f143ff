"""A checkpoint's tensors into the model: check headers, build on meta, read each slice once, assign. Experts stay packed."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.errors import CheckpointError, ConfigError
from model.config import ModelConfig
from model.kimi_k3 import KimiK3
from model.parallel import Mesh
from model.safetensors_header import Stored
from model.weights import TensorSlice, check_checkpoint, local_slices

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)  # both hold every bf16 value of the files: nothing is narrowed


def load(path: str | Path, config: ModelConfig, mesh: Mesh, *, device: torch.device | str, dtype: torch.dtype) -> KimiK3:
    """This process' part of the checkpoint in `path`. fp32 tensors of the files stay fp32, experts stay packed, the rest is `dtype`.

    Raises `ConfigError` for an impossible grid or dtype and `CheckpointError` for a faulty checkpoint, before anything is allocated.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(f"compute dtype {dtype}: expected one of {', '.join(map(str, COMPUTE_DTYPES))}")
    slices = list(local_slices(config, mesh.shard))
    stored = check_checkpoint(path, config)
    model = KimiK3(config, mesh, dtype)
    parameters = dict(model.named_parameters())
    values = {name: torch.empty(p.shape, dtype=p.dtype, device=device) for name, p in parameters.items()}
    filled: dict[str, int] = defaultdict(int)
    by_file: dict[Path, list[tuple[TensorSlice, Stored]]] = defaultdict(list)
    for piece in slices:
        by_file[stored[piece.name].file].append((piece, stored[piece.name]))
    for file, pieces in by_file.items():
        with safe_open(file, framework="pt") as f:
            for piece, at in pieces:
                target = values[piece.parameter]
                if piece.expert is not None:
                    target = target[piece.expert]
                source = _read(f, piece, at)
                rows = target[piece.offset : piece.offset + source.shape[0]]
                if rows.shape != source.shape or torch.promote_types(rows.dtype, source.dtype) != rows.dtype:
                    raise CheckpointError(
                        f"{file}: tensor {at.name}: {source.dtype} {list(source.shape)} does not fit {rows.dtype} {list(rows.shape)}"
                    )
                rows.copy_(source)
                filled[piece.parameter] += source.numel()
    for name, value in values.items():
        if filled[name] != value.numel():
            raise CheckpointError(f"{path}: parameter {name}: {filled[name]} of {value.numel()} values were given")
        _assign(model, name, value)
    return model.eval()


def _read(f: safe_open, piece: TensorSlice, at: Stored) -> Tensor:
    if piece.padded:
        return f.get_tensor(at.name).flatten()[piece.start : piece.stop]
    if piece.dim is None:
        return f.get_tensor(at.name)
    cut = [slice(None)] * len(piece.shape)
    cut[piece.dim] = slice(piece.start, piece.stop)
    return f.get_slice(at.name)[tuple(cut)]


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
