"""The random checkpoint: the released layout, equal bytes for equal arguments, sane activations."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import safe_open

from cluster.weight_source import open_source
from model.checkpoint import write_random_checkpoint
from model.checkpoint_check import check_checkpoint
from model.config import ModelConfig
from model.safetensors_header import INDEX

SMALL = ModelConfig.tiny(num_layers=2, kda_layers=(0,), num_experts=4, num_experts_per_token=2, vocab_size=1024)


def digests(path: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in path.iterdir()}


def test_layout(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, SMALL, seed=1, layers_per_file=1)
    config = ModelConfig.from_dir(tmp_path)
    assert config == SMALL
    stored = check_checkpoint(open_source(str(tmp_path)), config)
    assert sorted({s.file for s in stored.values()}) == [f"model-0000{i}-of-000003.safetensors" for i in (1, 2, 3)]
    assert stored["language_model.model.layers.0.self_attn.A_log"].shape == (128,)
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == sum(s.stop - s.start for s in stored.values())


def test_deterministic(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        write_random_checkpoint(tmp_path / name, SMALL, seed=seed)
    assert digests(tmp_path / "one") == digests(tmp_path / "same")
    assert digests(tmp_path / "one")["config.json"] == digests(tmp_path / "other")["config.json"]
    assert (
        digests(tmp_path / "one")["model-00001-of-000002.safetensors"] != digests(tmp_path / "other")["model-00001-of-000002.safetensors"]
    )


def test_the_same_everywhere(tmp_path: Path) -> None:
    """A few values, so that a change of a library's random stream cannot pass for the same checkpoint."""
    write_random_checkpoint(tmp_path, SMALL, seed=1)
    with safe_open(tmp_path / "model-00001-of-000002.safetensors", "pt") as f:
        packed = f.get_tensor("language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed")
        bias = f.get_tensor("language_model.model.layers.0.self_attn.dt_bias")
    assert packed[0, :4].tolist() == [197, 211, 3, 255]
    assert bias[:2].tolist() == [-4.467412948608398, -3.918570041656494]
