"""Ranges: every byte is owned by exactly the right shards, on toys by property and on the released checkpoint's own index."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.checkpoint import Checkpoint, read_checkpoint
from cluster.weight_plan import NodePlan, plan_node, shard_needs
from engine.errors import ConfigError
from model.weights import ELEMENT_BYTES, Shard, all_specs, local_slices
from tests.cluster.real_index import write_headers
from tests.model.golden import DATA
from tests.model.test_config import K3

COLUMN_SLICED = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")  # but routed_expert_down_proj is replicated
TINY = {name: read_checkpoint(str(DATA / name / "model")) for name in ("tiny-a", "tiny-b")}


def shard(rank: int, tp: int, shards: int) -> Shard:
    return Shard(tp_rank=rank % tp, tp_size=tp, ep_rank=rank, ep_size=shards)


def check_plan(checkpoint: Checkpoint, plan: NodePlan, ranks: range, tp: int, shards: int) -> None:
    """Each rank's fills are exactly its needs; blocks are disjoint; little is read for nothing."""
    for before, after in zip(plan.ranges, plan.ranges[1:], strict=False):
        assert (before.file, before.stop) <= (after.file, after.start)
    assert plan.union <= plan.nbytes <= 1.02 * plan.union
    for rank in ranks:
        rows: Counter[str] = Counter()
        for block in plan.blocks[rank]:
            assert rank in plan.ranges[block.number].ranks
            for fill in block.fills:
                row = ELEMENT_BYTES[fill.piece.dtype] * (1 if fill.piece.padded else _width(fill.piece.shape))
                assert fill.offset >= 0
                assert fill.offset + fill.rows * row <= block.nbytes
                rows[fill.piece.name] += fill.rows
        for piece in local_slices(checkpoint.config, shard(rank, tp, shards)):
            assert rows.pop(piece.name) == (piece.stop - piece.start if piece.dim == 0 or piece.padded else piece.shape[0])
        assert not rows


def _width(shape: tuple[int, ...]) -> int:
    width = 1
    for n in shape[1:]:
        width *= n
    return width


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(sorted(TINY)),
    grid=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4), (1, 4)]),
    nodes=st.sampled_from([1, 2]),
    block_bytes=st.integers(300, 1 << 20),
)
def test_blocks_of_any_size(name: str, grid: tuple[int, int], nodes: int, block_bytes: int) -> None:
    tp, shards = grid
    size = -(-shards // nodes)
    for first in range(0, shards, size):
        ranks = range(first, min(first + size, shards))
        plan = plan_node(TINY[name], ranks, tp=tp, shards=shards, block_bytes=block_bytes)
        check_plan(TINY[name], plan, ranks, tp, shards)
        widest = max(_width(s.shape) * ELEMENT_BYTES[s.dtype] for s in all_specs(TINY[name].config))
        assert plan.largest <= max(block_bytes, widest)


def test_an_impossible_grid() -> None:
    with pytest.raises(ConfigError, match="must divide both head counts"):
        plan_node(TINY["tiny-a"], [0], tp=64, shards=64, block_bytes=1 << 20)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("released")
    write_headers(folder, K3)
    return read_checkpoint(str(folder))


@pytest.mark.slow
def test_every_byte_of_the_released_checkpoint_has_its_owners(released: Checkpoint) -> None:
    """64 shards, tp 8: an expert on one, a row-sliced tensor once in each of 8 groups, what is replicated or cut by columns on all."""
    assert len(released.files) == 94  # of 96: two hold the vision tower and its projector
    count = len(released.places[0]) // 2
    owners, covered = array("H", bytes(2 * count)), array("Q", bytes(8 * count))
    ends: list[tuple[int, int] | None] = [None] * count  # in the first group, as far as rows follow each other
    for rank in range(64):
        for need in shard_needs(released, shard(rank, 8, 64)):
            number = need.piece.number
            owners[number] += 1
            covered[number] += need.stop - need.start
            if rank < 8:
                seen = ends[number]
                assert seen is None or need.start in (seen[0], seen[1]), need.piece.name
                ends[number] = (need.start if seen is None else seen[0], need.stop)
    total = 0
    for number, spec in enumerate(all_specs(released.config)):
        # What the shards take, not what the file pads: the head vectors of A_log end before their padding.
        size = ELEMENT_BYTES[spec.dtype] * _width(spec.shape) * spec.shape[0]
        whole = not spec.name.endswith("routed_expert_down_proj.weight") and spec.name.endswith(COLUMN_SLICED)
        times = 1 if ".experts." in spec.name else 64 if whole or spec.dim is None else 8
        assert (owners[number], covered[number]) == (1 if times == 1 else 64, times * size), spec.name
        total += size
    padding = 69 * (128 - 96) * 4
    assert total + padding == 1_559_965_606_912


@pytest.mark.slow
def test_a_node_of_the_released_checkpoint(released: Checkpoint) -> None:
    plan = plan_node(released, range(8), tp=8, shards=64, block_bytes=32 << 20)
    check_plan(released, plan, range(8), 8, 64)
    assert plan.largest <= 32 << 20
