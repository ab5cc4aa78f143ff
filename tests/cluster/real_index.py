"""The released checkpoint as headers only: its 497,220 names, shapes, dtypes and 96 files, each sparse; nothing but headers is written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from model.config import ModelConfig
from model.safetensors_header import INDEX
from model.weights import ELEMENT_BYTES, TensorSpec, all_specs

VISION_TENSORS = 168  # of the tower and the projector, in two files of their own
Entry = tuple[str, str, tuple[int, ...]]


def write_headers(folder: Path, config: ModelConfig) -> None:
    """Layer l in file l + 1, embedding and head in the next, projector and tower in the last two; tensors as safetensors orders them."""
    by_file: dict[int, list[Entry]] = {}
    for spec in all_specs(config):
        by_file.setdefault(_file_of(spec, config), []).append((spec.name, spec.dtype, _shape(spec)))
    last = config.num_layers + 2
    by_file[last] = [("mm_projector.proj.weight", "BF16", (1024, 1024))]
    by_file[last + 1] = [(f"vision_tower.encoder.tensor_{i}", "BF16", (1024, 1024)) for i in range(VISION_TENSORS - 1)]
    weight_map: dict[str, str] = {}
    for number, entries in sorted(by_file.items()):
        name = f"model-{number:05d}-of-{last + 1:06d}.safetensors"
        _write(folder / name, entries)
        weight_map |= {entry[0]: name for entry in entries}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def _file_of(spec: TensorSpec, config: ModelConfig) -> int:
    parts = spec.name.split(".")
    return int(parts[parts.index("layers") + 1]) + 1 if "layers" in parts else config.num_layers + 1


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return (spec.stored_elements,) if spec.padded else spec.shape


def _write(file: Path, entries: list[Entry]) -> None:
    header, end = {}, 0
    for name, dtype, shape in _ordered(entries):
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
    os.truncate(file, 8 + len(raw) + end)


def _ordered(entries: list[Entry]) -> Iterator[Entry]:
    """Wide elements first, then by name: every tensor is aligned."""
    return iter(sorted(entries, key=lambda e: (-ELEMENT_BYTES[e[1]], e[0])))
