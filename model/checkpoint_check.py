"""A checkpoint's headers against the table of tensors, before anything is allocated. Torch-free."""

from __future__ import annotations

import math

from engine.errors import CheckpointError
from model.config import ModelConfig
from model.safetensors_header import Folder, Stored, read_directory
from model.weights import HEAD, PREFIX, TensorSpec, named_specs

VISION = ("vision_tower.", "mm_projector.")  # served by another module, skipped here


def canonical_name(name: str) -> str:
    """The released name of a text tensor; some writers drop the inner `model.`."""
    if not name.startswith((PREFIX, HEAD)) and name.startswith("language_model."):
        return PREFIX + name.removeprefix("language_model.")
    return name


def check_checkpoint(folder: Folder, config: ModelConfig) -> dict[str, Stored]:
    """Compare a checkpoint's headers with the table before anything is allocated: released name -> where the tensor lies.

    Reads the index and the safetensors headers only. Raises `CheckpointError` naming file and tensor when a file is absent or
    truncated, or a tensor is missing, unknown, twice there, of another shape or of another dtype.
    """
    found: dict[str, Stored] = {}
    for stored in read_directory(folder):
        if stored.name.startswith(VISION):
            continue
        name = canonical_name(stored.name)
        if name in found:
            file, other = folder.where(stored.file), folder.where(found[name].file)
            raise CheckpointError(f"{file}: tensor {stored.name} is also in {other}; each tensor must be there once")
        found[name] = stored
    missing: list[str] = []
    known = 0
    for name, spec in named_specs(config):
        at = found.get(name)
        if at is None:
            missing.append(name)
        else:
            known += 1
            if at.dtype != spec.dtype or at.shape != spec.shape:
                _check_tensor(folder.where(at.file), spec, at)
    if known < len(found):
        unknown = found[next(iter(found.keys() - {name for name, _ in named_specs(config)}))]
        raise CheckpointError(
            f"{folder.where(unknown.file)}: tensor {unknown.name} {list(unknown.shape)} is not part of this architecture "
            f"({len(found) - known} such tensors); config.json and the files disagree"
        )
    if missing:
        raise CheckpointError(
            f"{folder.where('')}: tensor {missing[0]} is missing ({len(missing)} tensors missing); config.json and the files disagree"
        )
    return found


def _check_tensor(file: str, spec: TensorSpec, stored: Stored) -> None:
    if stored.dtype != spec.dtype:
        raise CheckpointError(f"{file}: tensor {stored.name} has dtype {stored.dtype}, expected {spec.dtype}")
    n = spec.shape[0]
    if spec.padded and math.prod(stored.shape) == max(stored.shape, default=0) >= n:
        return
    expected = f"[{n}] (or padded, or [1, 1, {n}, 1])" if spec.padded else str(list(spec.shape))
    raise CheckpointError(f"{file}: tensor {stored.name} has shape {list(stored.shape)}, expected {expected}")
