"""State out of one grid of shards and into another: same arrays, and the same tokens as an unbroken run."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from deployments.load import build_runner
from engine.plan import Output
from model.bundle_io import export_latents, export_recurrent, import_latents, import_recurrent
from model.config import ModelConfig
from model.parallel import Mesh
from model.runner import ModelRunner
from model.state import StatePools
from tests.model.golden import DATA, STATE_TOLERANCE, golden
from tests.model.planning import Planner, tokens_of
from tests.model.processes import run_processes

WORLD = 4
WIDTHS = (1, 2, 4)  # tensor-parallel
PROMPT = golden("tiny-a").prompt("p200")
AT = len(PROMPT) - 1  # where a prompt's bundle is taken
CUTS = (0, 64, 128, AT)  # two full segments and the tail
GENERATED = 4


@dataclass(frozen=True)
class Exported:
    """What the four processes of one grid exported of the same prompt."""

    heads: list[tuple[int, dict[str, np.ndarray]]]  # (first head, part)
    segments: list[tuple[int, dict[str, np.ndarray]]]  # (first token, part)


def first_head(mesh: Mesh, runner: ModelRunner) -> int:
    return mesh.tp_rank * runner.pools.kda.shape[2]


def runner_on(mesh: Mesh, page_size: int) -> ModelRunner:
    runner = build_runner(
        DATA / "tiny-a" / "model", mesh, device="cpu", dtype=torch.float32, page_size=page_size, num_pages=120, num_slots=8
    )
    for pool in (runner.pools.latents, runner.pools.kda, runner.pools.conv):
        pool.fill_(float("nan"))
    return runner


def export(mesh: Mesh) -> tuple[tuple[int, dict[str, np.ndarray]], list[tuple[int, dict[str, np.ndarray]]]]:
    """Each process: the state of its heads at AT, taken while the row goes past it, and every segment of the latents."""
    runner, planner = runner_on(mesh, 16), Planner(groups=mesh.groups, page_size=16)
    rows = [planner.add(PROMPT, group=g) for g in range(mesh.groups)]
    kept = planner.slot()
    for count in (150, 50, 1, 1):
        for row in rows:
            last = row.computed + count >= len(PROMPT)
            planner.consume(row, count, Output.SAMPLE if last else Output.NONE, ((AT, kept),) if count == 50 else ())
        planner.flush()
    for plan in planner.plans:
        runner.run(plan)
    pages = rows[mesh.group].pages
    segments = [(start, export_latents(runner.pools, pages[start // 16 : -(-stop // 16)], start, stop)) for start, stop in pairwise(CUTS)]
    return (first_head(mesh, runner), export_recurrent(runner.pools, kept)), segments


def resume(directory: Path, mesh: Mesh) -> list[list[int] | None]:
    """Imports what each grid exported, into pages of another size, and goes on from there."""
    drawn = []
    for exported in pickle.loads((directory / "exported").read_bytes()):
        runner, planner = runner_on(mesh, 24), Planner(groups=mesh.groups, page_size=24, next_slot=1)
        pages = [planner.page() for _ in range(-(-AT // 24))]
        taken = sum(import_recurrent(runner.pools, 0, first_head(mesh, runner), first, part) for first, part in exported.heads)
        assert taken == runner.pools.kda.shape[2]
        for (start, part), stop in zip(exported.segments, CUTS[1:], strict=True):
            import_latents(runner.pools, pages[start // 24 : -(-stop // 24)], start, part)
        rows = [planner.add(PROMPT, group=g, computed=AT, slot=0, pages=pages) for g in range(mesh.groups)]
        planner.generate(rows, GENERATED)
        results = [runner.run(plan) for plan in planner.plans]
        drawn.append([tokens_of(results, row) for row in rows] if mesh.rank == 0 else None)
    return drawn


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[Exported]:
    directory = tmp_path_factory.mktemp("export")
    cases = run_processes(WORLD, [(tp, export) for tp in WIDTHS], directory)
    return [
        Exported([heads for heads, _ in ranks[:tp]], [ranks[i % tp][1][i] for i in range(len(CUTS) - 1)])
        for tp, ranks in zip(WIDTHS, cases, strict=True)
    ]


@pytest.mark.slow
def test_the_wire_does_not_know_the_grid(exports: list[Exported]) -> None:
    """Logical shapes, and the same values however many shards wrote them."""
    config = ModelConfig.from_dir(DATA / "tiny-a" / "model")
    whole = [
        {
            "kda": np.concatenate([part["kda"] for _, part in e.heads], 1),
            "conv": np.concatenate([part["conv"] for _, part in e.heads], 2),
            "latents": np.concatenate([part["latents"] for _, part in e.segments], 1),
        }
        for e in exports
    ]
    d = config.kda_head_dim
    assert whole[0]["kda"].shape == (len(config.kda_layers), config.kda_heads, d, d)
    assert whole[0]["conv"].shape == (len(config.kda_layers), 3, config.kda_heads, d, config.conv_size - 1)
    assert whole[0]["latents"].shape == (len(config.mla_layers), AT, config.latent_dim)
    for other in whole[1:]:
        for name, array in other.items():
            np.testing.assert_allclose(array, whole[0][name], atol=STATE_TOLERANCE, rtol=1e-3, err_msg=name)


@pytest.mark.slow
def test_every_grid_goes_on_from_every_grid(exports: list[Exported], tmp_path: Path) -> None:
    (tmp_path / "exported").write_bytes(pickle.dumps(exports))
    cases = run_processes(WORLD, [(tp, partial(resume, tmp_path)) for tp in WIDTHS], tmp_path)
    expected = golden("tiny-a").greedy("p200")[:GENERATED]
    for reader, ranks in zip(WIDTHS, cases, strict=True):
        for writer, groups in zip(WIDTHS, ranks[0], strict=True):
            assert groups == [expected] * (WORLD // reader), f"written by tp={writer}, read by tp={reader}"


def pools(dtype: torch.dtype, *, page_size: int = 4) -> StatePools:
    """Random content: one KDA layer, so that a slot of the pool is contiguous."""
    config = ModelConfig.from_dir(DATA / "tiny-b" / "model")
    made = StatePools.allocate(config, tp_size=1, page_size=page_size, num_pages=6, num_slots=3, device="cpu", dtype=dtype)
    one = StatePools(made.latents, made.kda[:1].clone(), made.conv[:1].clone())
    for pool in (one.latents, one.kda, one.conv):
        pool.normal_()
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact_and_touches_nothing_else(dtype: torch.dtype) -> None:
    source, target = pools(dtype), pools(dtype, page_size=5)
    before = [pool.clone() for pool in (target.latents, target.kda, target.conv)]
    recurrent = export_recurrent(source, 1)
    import_recurrent(target, 2, 0, 0, recurrent)
    assert torch.equal(target.kda[:, 2], source.kda[:, 1])
    assert torch.equal(target.conv[:, 2], source.conv[:, 1])
    assert torch.equal(target.kda[:, :2], before[1][:, :2])
    tokens = export_latents(source, (3, 0, 5), 6, 15)  # tokens 6 … 14: half of the first page, three quarters of the last
    import_latents(target, (4, 1), 6, tokens)  # pages of tokens 5 … 14
    rows = source.latents[:, [3, 0, 5]].flatten(1, 2)[:, 2:11]
    assert torch.equal(target.latents[:, [4, 1]].flatten(1, 2)[:, 1:10], rows)
    assert torch.equal(target.latents[:, 4, 0], before[0][:, 4, 0])
    assert torch.equal(target.latents[:, [0, 2, 3, 5]], before[0][:, [0, 2, 3, 5]])


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 8, 11])
def test_tokens_land_where_they_belong_whatever_pages_they_cut(start: int, count: int) -> None:
    source, target = pools(torch.float32), pools(torch.float32)
    covering = max(1, -(-(start + count) // 4))
    before = target.latents.clone()
    import_latents(target, (5, 2, 0, 3)[:covering], start, export_latents(source, (1, 4, 2, 0)[:covering], start, start + count))
    expected = before[:, [5, 2, 0, 3]].flatten(1, 2)
    expected[:, start : start + count] = source.latents[:, [1, 4, 2, 0]].flatten(1, 2)[:, start : start + count]
    assert torch.equal(target.latents[:, [5, 2, 0, 3]].flatten(1, 2), expected)
    assert torch.equal(target.latents[:, [1, 4]], before[:, [1, 4]])


def test_what_is_exported_is_a_copy() -> None:
    source = pools(torch.float32)
    recurrent, latents = export_recurrent(source, 1), export_latents(source, (2,), 8, 12)
    before = {name: array.copy() for name, array in (recurrent | latents).items()}
    for pool in (source.latents, source.kda, source.conv):
        pool.zero_()
    assert all(np.array_equal(array, before[name]) for name, array in (recurrent | latents).items())


def test_an_imported_array_may_be_read_only_and_is_left_alone() -> None:
    source, target = pools(torch.float32), pools(torch.float32)
    recurrent = export_recurrent(source, 0)
    for array in recurrent.values():
        array.flags.writeable = False
    import_recurrent(target, 0, 0, 0, recurrent)
    target.kda.zero_()
    assert np.any(recurrent["kda"])


def test_nothing_is_converted_or_cut() -> None:
    source, target = pools(torch.bfloat16), pools(torch.float32)
    with pytest.raises(ValueError, match=r"stored as torch\.bfloat16, this pool holds torch\.float32"):
        import_latents(target, (0,), 0, export_latents(source, (0,), 0, 4))
    with pytest.raises(ValueError, match="do not fit 1 pages of 4"):
        import_latents(target, (0,), 2, export_latents(target, (1,), 0, 4))
    with pytest.raises(ValueError, match="do not cover"):
        export_latents(source, (0,), 2, 8)
