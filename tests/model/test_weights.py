"""Slices: every shard's parts together are each tensor exactly once."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from model.checkpoint_check import canonical_name
from model.config import ModelConfig
from model.released import K3
from model.weights import Shard, all_specs, local_slices, split
from tests.model.golden import DATA


@given(st.integers(0, 1000), st.integers(1, 70))
def test_split_is_balanced_and_complete(n: int, parts: int) -> None:
    ranges = [split(n, parts, i) for i in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("name", "tp", "ep"), [("tiny-a", 4, 4), ("tiny-a", 2, 6), ("tiny-b", 3, 9), ("tiny-c", 1, 7)])
def test_shards_cover_every_tensor_once(name: str, tp: int, ep: int) -> None:
    config = ModelConfig.from_dir(DATA / name / "model")
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank in range(ep):
        for piece in local_slices(config, Shard(tp_rank=rank % tp, tp_size=tp, ep_rank=rank, ep_size=ep)):
            if piece.expert is not None or rank < tp:
                ranges[piece.name].append((piece.start, piece.stop))
    for spec in all_specs(config):
        found = ranges.pop(spec.name)
        if spec.dim is None:
            assert set(found) == {(0, spec.shape[0])}
            assert len(found) == (1 if spec.component == "experts" else tp)
        else:
            assert sorted(i for start, stop in found for i in range(start, stop)) == list(range(spec.shape[spec.dim]))
    assert not ranges


def test_stacked_tensors_lie_one_after_the_other() -> None:
    """q | k | v | g | f_a | b in one matrix, each whole heads of this rank."""
    config = ModelConfig.from_dir(DATA / "tiny-b" / "model")
    shard = Shard(tp_rank=1, tp_size=3, ep_rank=4, ep_size=6)
    pieces = [p for p in local_slices(config, shard) if p.parameter == "layers.0.self_attn.in_proj.weight"]
    assert [(p.name.split(".")[-2], p.offset, p.start, p.stop) for p in pieces] == [
        ("q_proj", 0, 32, 64),
        ("k_proj", 32, 32, 64),
        ("v_proj", 64, 32, 64),
        ("g_proj", 96, 32, 64),
        ("f_a_proj", 128, 0, 16),
        ("b_proj", 144, 2, 4),
    ]
    experts = {p.expert: p.name for p in local_slices(config, shard) if p.parameter == "layers.1.block_sparse_moe.w2_packed"}
    assert [name.split(".")[6] for name in experts.values()] == ["8", "9"]
    assert list(experts) == [0, 1]


def test_bytes_of_a_shard_of_the_released_model() -> None:
    """TP8 x DP8 with EP64: an eighth of the sharded dense weights, a sixty-fourth of the experts."""
    total: Counter[bool] = Counter()
    for piece in local_slices(K3, Shard(tp_rank=3, tp_size=8, ep_rank=11, ep_size=64)):
        total[piece.expert is not None] += piece.nbytes
    assert total[True] == 1_446_456_066_048 // 64
    assert 18e9 < total[False] < 21e9


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [
        (5, 5, "5 must divide both head counts of the model: 8 KDA heads and 8 MLA heads"),
        (2, 3, "multiple of the tensor-parallel width"),
        (0, 1, "multiple of the tensor-parallel width"),
        (1, 17, "17 shards for 16 experts"),
    ],
)
def test_impossible_grids(tp: int, ep: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(local_slices(ModelConfig.tiny(), Shard(tp_size=tp, ep_size=ep)))


def test_released_slices_fit_their_parameters() -> None:
    """Sizes that do not divide evenly still add up: 7168 columns over 3 ranks."""
    config = ModelConfig.tiny(kda_heads=6, mla_heads=6, intermediate_size=257)
    widths = [
        math.prod(p.local_shape)
        for rank in range(3)
        for p in local_slices(config, Shard(tp_rank=rank, tp_size=3, ep_rank=rank, ep_size=3))
        if p.name.endswith("layers.0.mlp.down_proj.weight")
    ]
    assert widths == [86 * 128, 86 * 128, 85 * 128]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.layers.3.mlp_res_norm.weight", "language_model.model.layers.3.mlp_res_norm.weight"),
        ("language_model.model.norm.weight", "language_model.model.norm.weight"),
        ("language_model.lm_head.weight", "language_model.lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_without_the_inner_model(name: str, expected: str) -> None:
    assert canonical_name(name) == expected
