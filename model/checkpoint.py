"""Write a random K3 checkpoint in the released layout: for the embedded default and for tests of other architectures."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.config import ModelConfig
from model.safetensors_header import INDEX
from model.weights import A_LOG_PADDING, TensorSpec, expert_specs, layer_specs, model_specs

TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
E2M1_RMS = 2.93  # of the code table, all codes equally likely
LOGIT_STD = 2.5


def write_random_checkpoint(path: str | Path, config: ModelConfig, seed: int, *, layers_per_file: int = 4) -> None:
    """`config.json`, shards and index in `path` (created when absent). Equal arguments give equal bytes on every machine.

    Every mechanism is alive: activations are of order one, gates and router are spread, logits have a standard deviation of about 2.5.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    groups = [range(first, min(first + layers_per_file, config.num_layers)) for first in range(0, config.num_layers, layers_per_file)]
    files = [_layers(config, group) for group in groups] + [model_specs(config)]
    weight_map: dict[str, str] = {}
    size = 0
    for number, specs in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        tensors = {spec.name: _draw(spec, seed) for spec in specs}
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(t.nbytes for t in tensors.values())
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2))


def _layers(config: ModelConfig, layers: Sequence[int]) -> list[TensorSpec]:
    specs = []
    for layer in layers:
        specs += layer_specs(config, layer)
        if config.is_moe(layer):
            specs += [s for expert in range(config.num_experts) for s in expert_specs(config, layer, expert)]
    return specs


def _draw(spec: TensorSpec, seed: int) -> Tensor:
    """The tensor of one name: drawn from (seed, name) alone, by raw 64-bit words so that no library's distribution code matters."""
    words = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(spec.name.encode())])).random_raw(math.prod(spec.shape))
    if spec.dtype == "U8":
        return torch.from_numpy(_codes(spec, words).reshape(spec.shape))
    uniform = (words >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)  # [-1, 1), 24 bits
    mean, deviation = _distribution(spec)
    values = np.float32(mean) + np.float32(deviation * 3**0.5) * uniform
    if spec.padded:
        values = np.pad(values, (0, -len(values) % A_LOG_PADDING))
        return torch.from_numpy(values)
    return torch.from_numpy(values.reshape(spec.shape)).to(TORCH_DTYPES[spec.dtype])


def _codes(spec: TensorSpec, words: np.ndarray) -> np.ndarray:
    if spec.name.endswith("weight_packed"):
        return (words >> np.uint64(56)).astype(np.uint8)
    columns = spec.shape[-1] * 32
    usual = 127 + round(math.log2(1.4 / (E2M1_RMS * columns**0.5)))
    return (usual - (words >> np.uint64(63)).astype(np.int64)).astype(np.uint8)


def _distribution(spec: TensorSpec) -> tuple[float, float]:
    """(mean, standard deviation) by the tensor's role."""
    name = spec.name
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    if name.endswith("lm_head.weight"):
        return 0.0, LOGIT_STD * spec.shape[1] ** -0.5
    if name.endswith("_res_proj.weight"):
        return 0.0, spec.shape[1] ** -0.5
    if name.endswith("conv1d.weight"):
        return 0.3, 0.4
    if name.endswith("A_log"):
        return 0.0, 0.5
    if name.endswith("dt_bias"):
        return -3.0, 1.5  # slow decays: a state that remembers
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.05
    if name.endswith(("norm.weight", "layernorm.weight")):
        return 1.0, 0.1
    return 0.0, spec.shape[1] ** -0.5
