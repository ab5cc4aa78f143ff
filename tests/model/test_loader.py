"""Faulty checkpoints are refused before anything is allocated, naming file and tensor; good ones leave nothing unset."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.weight_source import open_source
from deployments.load import build_runner
from engine.errors import CheckpointError, ConfigError
from model.checkpoint_check import check_checkpoint
from model.config import ModelConfig
from model.parallel import Mesh
from model.safetensors_header import INDEX
from tests.model.golden import DATA

FIRST = "model-00001-of-000002.safetensors"
LAST = "model-00002-of-000002.safetensors"
Q = "language_model.model.layers.0.self_attn.q_proj.weight"
NORM = "language_model.model.norm.weight"
Tensors = dict[str, Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of tiny-b to spoil."""
    return Path(shutil.copytree(DATA / "tiny-b" / "model", tmp_path / "model"))


def load_here(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return build_runner(path, Mesh.single(), device="cpu", dtype=dtype, page_size=16, num_pages=1, num_slots=1).model


def rewrite(file: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / INDEX).read_bytes())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_here(path)
    for word in words:
        assert word in str(error.value)


def test_everything_is_set_and_typed(checkpoint: Path) -> None:
    model = load_here(checkpoint, torch.bfloat16)
    fp32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    for name, parameter in model.named_parameters():
        expected = torch.float32 if name.endswith(fp32) else torch.uint8 if name.endswith(("_packed", "_scale")) else torch.bfloat16
        assert parameter.dtype == expected, name
        assert not parameter.is_meta
    stored = load_file(checkpoint / FIRST)
    packed = model.get_parameter("layers.1.block_sparse_moe.w13_packed")[3]
    expert = "language_model.model.layers.1.block_sparse_moe.experts.3."
    assert torch.equal(packed, torch.cat((stored[expert + "w1.weight_packed"], stored[expert + "w3.weight_packed"])))


def test_missing_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint / LAST, lambda t: t.pop(NORM))
    edit_index(checkpoint, lambda m: m.pop(NORM))
    refuse(checkpoint, NORM, "is missing", str(checkpoint))


def test_leftover_tensor(checkpoint: Path) -> None:
    name = "language_model.model.layers.5.input_layernorm.weight"
    rewrite(checkpoint / LAST, lambda t: t.update({name: torch.zeros(96, dtype=torch.bfloat16)}))
    edit_index(checkpoint, lambda m: m.update({name: LAST}))
    refuse(checkpoint, LAST, name, "not part of this architecture")


def test_wrong_hidden_size(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_bytes())
    config["text_config"]["hidden_size"] = 128
    (checkpoint / "config.json").write_text(json.dumps(config))
    refuse(checkpoint, LAST, "embed_tokens.weight", "has shape [384, 96], expected [384, 128]")


def test_misshapen_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint / FIRST, lambda t: t.update({Q: t[Q][:48].contiguous()}))
    refuse(checkpoint, FIRST, Q, "has shape [48, 96], expected [96, 96]")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        (Q, torch.float32, "has dtype F32, expected BF16"),
        ("language_model.model.layers.0.self_attn.dt_bias", torch.bfloat16, "has dtype BF16, expected F32"),
        ("language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed", torch.int8, "has dtype I8, expected U8"),
    ],
)
def test_wrong_dtype(checkpoint: Path, name: str, dtype: torch.dtype, message: str) -> None:
    rewrite(checkpoint / FIRST, lambda t: t.update({name: t[name].to(dtype)}))
    refuse(checkpoint, FIRST, name, message)


def test_truncated_file(checkpoint: Path) -> None:
    content = (checkpoint / FIRST).read_bytes()
    (checkpoint / FIRST).write_bytes(content[: len(content) // 2])
    refuse(checkpoint, FIRST, "truncated", "tensor language_model.model.layers.")


@pytest.mark.parametrize(("size", "message"), [(4, "truncated or not safetensors"), (100, "truncated or not safetensors")])
def test_truncated_header(checkpoint: Path, size: int, message: str) -> None:
    (checkpoint / FIRST).write_bytes((checkpoint / FIRST).read_bytes()[:size])
    refuse(checkpoint, FIRST, message)


def test_file_of_something_else(checkpoint: Path) -> None:
    (checkpoint / FIRST).write_bytes((20).to_bytes(8, "little") + b"version https://git-lfs")
    refuse(checkpoint, FIRST, "not that of a safetensors file")


def test_bytes_after_the_last_tensor(checkpoint: Path) -> None:
    with (checkpoint / LAST).open("ab") as f:
        f.write(b"\0" * 8)
    refuse(checkpoint, LAST, "8 bytes after the last tensor")


def test_absent_shard(checkpoint: Path) -> None:
    (checkpoint / FIRST).unlink()
    refuse(checkpoint, FIRST, "the file is missing", "places tensor language_model.model.layers.0")


def test_index_naming_an_absent_tensor(checkpoint: Path) -> None:
    edit_index(checkpoint, lambda m: m.update({"language_model.model.ghost.weight": LAST}))
    refuse(checkpoint, LAST, "tensor language_model.model.ghost.weight is absent")


def test_index_placing_a_tensor_elsewhere(checkpoint: Path) -> None:
    edit_index(checkpoint, lambda m: m.update({Q: LAST}))
    refuse(checkpoint, FIRST, Q, f"places it in {LAST}")


def test_tensor_that_the_index_does_not_name(checkpoint: Path) -> None:
    edit_index(checkpoint, lambda m: m.pop(Q))
    refuse(checkpoint, FIRST, Q, "does not name it")


def test_tensor_in_two_files(checkpoint: Path) -> None:
    rewrite(checkpoint / LAST, lambda t: t.update({Q: torch.zeros(96, 96, dtype=torch.bfloat16)}))
    refuse(checkpoint, LAST, Q, f"places it in {FIRST}")


def test_tensor_under_both_its_names(checkpoint: Path) -> None:
    short = Q.replace("language_model.model.", "language_model.")
    rewrite(checkpoint / LAST, lambda t: t.update({short: torch.zeros(96, 96, dtype=torch.bfloat16)}))
    edit_index(checkpoint, lambda m: m.update({short: LAST}))
    refuse(checkpoint, LAST, short, FIRST, "must be there once")


def test_name_twice_in_the_index(checkpoint: Path) -> None:
    text = (checkpoint / INDEX).read_text()
    entry = f'"{Q}": "{FIRST}"'
    assert entry in text
    (checkpoint / INDEX).write_text(text.replace(entry, f"{entry}, {entry}"))
    refuse(checkpoint, INDEX, Q, "twice")


@pytest.mark.parametrize("text", ["{", '{"metadata": {}}', '{"weight_map": {"a": "../b"}}'])
def test_broken_index(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX).write_text(text)
    refuse(checkpoint, INDEX)


def test_directory_without_weights(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink()
    refuse(checkpoint, INDEX, "model.safetensors", str(checkpoint))


def test_single_file_without_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink()
    save_file({**load_file(checkpoint / FIRST), **load_file(checkpoint / LAST)}, checkpoint / "model.safetensors")
    assert_same(load_here(checkpoint), load_here(DATA / "tiny-b" / "model"))


def test_names_without_the_inner_model(checkpoint: Path) -> None:
    def shorten(name: str) -> str:
        return name.replace("language_model.model.", "language_model.")

    for file in (FIRST, LAST):
        save_file({shorten(n): t for n, t in load_file(checkpoint / file).items()}, checkpoint / file)
    index = json.loads((checkpoint / INDEX).read_bytes())
    index["weight_map"] = {shorten(n): f for n, f in index["weight_map"].items()}
    (checkpoint / INDEX).write_text(json.dumps(index))
    assert_same(load_here(checkpoint), load_here(DATA / "tiny-b" / "model"))


@pytest.mark.parametrize("shape", [(1, 1, 6, 1), (128,)])
def test_stored_forms_of_a_log(checkpoint: Path, shape: tuple[int, ...]) -> None:
    def restore(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("A_log")]:
            padded = torch.nn.functional.pad(tensors[name], (0, max(shape) - 6))
            tensors[name] = padded.view(shape)

    rewrite(checkpoint / FIRST, restore)
    assert_same(load_here(checkpoint), load_here(DATA / "tiny-b" / "model"))


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_misshapen_a_log(checkpoint: Path, shape: tuple[int, ...]) -> None:
    name = "language_model.model.layers.1.self_attn.A_log"
    rewrite(checkpoint / FIRST, lambda t: t.update({name: torch.zeros(shape)}))
    refuse(checkpoint, FIRST, name, "expected [6]")


def test_dtype_that_would_narrow(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="float16: expected one of"):
        load_here(checkpoint, torch.float16)


def test_vision_tensors_are_skipped() -> None:
    """tiny-b carries some; they are in no way part of the text model."""
    path = DATA / "tiny-b" / "model"
    assert "vision_tower.encoder.blocks.0.wqkv.weight" in load_file(path / LAST)
    assert not [
        n for n in check_checkpoint(open_source(str(path)), ModelConfig.from_dir(path)) if n.startswith(("vision_tower", "mm_projector"))
    ]


def assert_same(first: torch.nn.Module, second: torch.nn.Module) -> None:
    expected = dict(second.named_parameters())
    for name, value in first.named_parameters():
        assert torch.equal(value, expected.pop(name)), name
    assert not expected
