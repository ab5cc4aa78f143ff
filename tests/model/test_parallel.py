"""The mesh's collectives against what one process would compute, and K3 on every grid of shards against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deployments.load import build_runner
from engine.errors import ConfigError
from engine.plan import GroupPlan, Output, StepPlan, StepResult
from model.checkpoint import write_random_checkpoint
from model.config import ModelConfig
from model.parallel import DIRECT_SUM, Mesh, connect
from model.weights import split
from tests.model.float64_k3 import Float64K3
from tests.model.golden import DATA, LOGITS_TOLERANCE, PROMPTS, SETS, STATE_TOLERANCE, golden
from tests.model.planning import Planned, Planner, logits_of, tokens_of
from tests.model.processes import run_processes
from tests.model.test_architectures import ARCHITECTURES, ids_for, scored

WORLDS = (2, 3, 4, 6)
GENERATED = 4
UNEVEN = ARCHITECTURES["MoE everywhere, odd widths"]


@dataclass(frozen=True)
class Outcome:
    """What one process saw of a case."""

    results: list[StepResult]
    kda: Tensor  # [KDA layers, local heads, K, V] of the row in `scored`
    conv: Tensor
    latents: Tensor  # [MLA layers, tokens, latent]


def grids(world: int) -> list[tuple[str, int]]:
    """(set, tp) for every tensor-parallel width that divides the world and both head counts."""
    found = []
    for name in SETS:
        config = ModelConfig.from_dir(DATA / name / "model")
        found += [(name, tp) for tp in range(1, world + 1) if not (world % tp or config.kda_heads % tp or config.mla_heads % tp)]
    return found


def plans(name: str, groups: int) -> tuple[Planner, dict[str, Planned], Planned, Planned]:
    """Prompts dealt to the groups; the last group starts late, groups fall idle as their rows end."""
    gold = golden(name)
    planner = Planner(groups=groups)
    rows = {p: planner.add(gold.prompt(p), group=i % groups) for i, p in enumerate(PROMPTS[:6])}
    scored = planner.add(gold.prompt("p200"), group=0)
    kept = planner.slot()
    for turn in range(4):
        planner.consume(scored, 50, Output.LOGITS, checkpoints=((130, kept),) if turn == 2 else ())
        for row in rows.values():
            if turn and row.computed < row.known - 1 and (row.group < groups - 1 or groups == 1):
                planner.consume(row, min(40, row.known - 1 - row.computed))
        planner.flush()
    planner.flush()  # nobody has anything to do
    slot, tail = planner.slot(), planner.page()
    planner.copy("slot", kept, slot)
    planner.copy("page", scored.pages[8], tail)
    resumed = planner.add(gold.prompt("p200"), computed=130, slot=slot, pages=[*scored.pages[:8], tail])
    for turn in range(GENERATED):
        for i, row in enumerate([*rows.values(), resumed]):
            if turn >= i % 3 or turn == 0:
                planner.consume(row, row.known - row.computed, Output.SAMPLE)
        planner.flush()
    return planner, rows, scored, resumed


def case(mesh: Mesh, name: str) -> Outcome:
    runner = build_runner(DATA / name / "model", mesh, device="cpu", dtype=torch.float32, page_size=16, num_pages=90, num_slots=24)
    for pool in (runner.pools.latents, runner.pools.kda, runner.pools.conv):
        pool.fill_(float("nan"))
    planner, _, scored, _ = plans(name, mesh.groups)
    results = [runner.run(plan) for plan in planner.plans]
    latents = runner.pools.latents[:, scored.pages].flatten(1, 2)[:, :200]
    return Outcome(results, runner.pools.kda[:, scored.slot], runner.pools.conv[:, scored.slot], latents)


def collectives(mesh: Mesh) -> None:
    """Every collective against the same arithmetic done locally: inputs are a function of the rank."""

    def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def added(parts: list[Tensor]) -> Tensor:
        total = parts[0].float().clone()
        for part in parts[1:]:
            total += part.float()
        return total

    members = range(mesh.group * mesh.tp, (mesh.group + 1) * mesh.tp)
    for shape in ((0, 8), (1, 7), (5, 3), (2, DIRECT_SUM), (DIRECT_SUM + 1, 1)):
        parts = [drawn(*shape, seed=r, dtype=torch.bfloat16) for r in range(mesh.world)]
        assert torch.equal(mesh.sum_tp(parts[mesh.rank]), added([parts[r] for r in members])), shape
    sizes = [stop - start for start, stop in (split(11, mesh.tp, i) for i in range(mesh.tp))]
    pieces = [drawn(3, sizes[r % mesh.tp], seed=r) for r in range(mesh.world)]
    assert torch.equal(mesh.gather_tp(pieces[mesh.rank], sizes), torch.cat([pieces[r] for r in members], -1))
    assert torch.equal(mesh.broadcast_tp(torch.tensor([mesh.rank, 7])), torch.tensor([members[0], 7]))

    for counts in ([3] * mesh.groups, [5, *[0] * (mesh.groups - 1)], [0] * mesh.groups, [7 * (g % 2) + g for g in range(mesh.groups)]):
        wide = [drawn(n, 6, seed=50 + g, dtype=torch.bfloat16) for g, n in enumerate(counts)]
        ids = [torch.arange(n * 2, dtype=torch.int32).view(n, 2) + 100 * g for g, n in enumerate(counts)]
        gathered = mesh.gather_groups((wide[mesh.group], ids[mesh.group]), counts)
        assert torch.equal(gathered[0], torch.cat(wide)), counts
        assert torch.equal(gathered[1], torch.cat(ids)), counts
        partials = [drawn(sum(counts), 4, seed=r) for r in range(mesh.world)]
        first = sum(counts[: mesh.group])
        expected = added(partials)[first : first + counts[mesh.group]]
        assert torch.equal(mesh.sum_experts(partials[mesh.rank], counts), expected), counts
    everyone = mesh.gather_objects({"rank": mesh.rank})
    assert everyone == ([{"rank": r} for r in range(mesh.world)] if mesh.rank == 0 else None)


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> int:
    return request.param


@dataclass(frozen=True)
class Outcomes:
    """All cases of one world size: by set and tp, what every rank saw; and the logits of an architecture that divides nowhere."""

    golden: dict[tuple[str, int], list[Outcome]]
    uneven: list[Tensor]
    expected: Tensor | None


@pytest.fixture(scope="module")
def outcomes(world: int, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """One start of the processes for everything; the collectives are checked on the way."""
    directory = tmp_path_factory.mktemp(f"world-{world}")
    cases = [(name, tp) for name, tp in grids(world) if world in (2, 4) or name == "tiny-b"]
    work = [(tp, collectives) for tp in range(1, world + 1) if world % tp == 0]
    work += [(tp, partial(case, name=name)) for name, tp in cases]
    expected = None
    if world == 4:
        model, ids = directory / "model", ids_for(UNEVEN)
        write_random_checkpoint(model, UNEVEN, seed=3)
        expected = torch.from_numpy(Float64K3(model).logits(ids))
        work += [(tp, partial(scored, path=model, ids=ids)) for tp in (4, 2)]
    returned = run_processes(world, work, directory)[world_divisors(world) :]
    uneven = [ranks[0] for ranks in returned[len(cases) :]]
    return Outcomes(dict(zip(cases, returned, strict=False)), uneven, expected)


def world_divisors(world: int) -> int:
    return sum(world % tp == 0 for tp in range(1, world + 1))


def test_uneven_shards(world: int, outcomes: Outcomes) -> None:
    """Widths, vocabulary and experts that no number of shards divides: 1001 rows, 77 columns, 37 experts over 4 processes."""
    assert len(outcomes.uneven) == (2 if world == 4 else 0)
    for logits in outcomes.uneven:
        torch.testing.assert_close(logits.double(), outcomes.expected, atol=LOGITS_TOLERANCE, rtol=0)


def test_every_grid_gives_the_reference(world: int, outcomes: Outcomes) -> None:
    assert {tp for _, tp in outcomes.golden} == {tp for tp in range(1, world + 1) if world % tp == 0}
    for (name, tp), ranks in outcomes.golden.items():
        gold = golden(name)
        config = ModelConfig.from_dir(gold.model)
        _, rows, scored, resumed = plans(name, world // tp)
        results = ranks[0].results
        logits = logits_of(results, scored, config.vocab_size)
        torch.testing.assert_close(logits, gold.logits("p200"), atol=LOGITS_TOLERANCE, rtol=0)
        for prompt, row in {**rows, "p200": resumed}.items():
            tokens = tokens_of(results, row)
            assert len(tokens) >= GENERATED - 2
            assert tokens == gold.greedy(prompt)[: len(tokens)], (name, tp, prompt)


def test_every_grid_leaves_the_reference_states(world: int, outcomes: Outcomes) -> None:
    for (name, tp), ranks in outcomes.golden.items():
        gold = golden(name)
        members = ranks[:tp]  # the scored row runs in group 0
        for index, layer in enumerate(ModelConfig.from_dir(gold.model).kda_layers):
            recurrent, conv = gold.kda("p200", layer)
            found = torch.cat([m.kda[index] for m in members])
            torch.testing.assert_close(found, recurrent, atol=STATE_TOLERANCE, rtol=1e-3)
            found = torch.cat([torch.cat([m.conv[index].chunk(3, -1)[i] for m in members], -1) for i in range(3)], -1)
            torch.testing.assert_close(found, conv, atol=STATE_TOLERANCE, rtol=1e-3)
        for member in members[1:]:
            assert torch.equal(member.latents, members[0].latents), (name, tp)


@pytest.mark.parametrize(("name", "tp", "counts"), [("tiny-a", 3, "4 KDA heads and 4 MLA heads"), ("tiny-c", 4, "5 KDA heads and 4 MLA")])
def test_width_that_does_not_divide_the_heads_is_refused(name: str, tp: int, counts: str) -> None:
    mesh = Mesh(rank=0, world=tp, tp=tp)
    with pytest.raises(ConfigError, match=counts):
        build_runner(DATA / name / "model", mesh, device="cpu", dtype=torch.float32, page_size=16, num_pages=1, num_slots=1)


def test_more_shards_than_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="13 shards for 12 experts"):
        Mesh(world=13).shard.check(ModelConfig.from_dir(DATA / "tiny-b" / "model"))


def test_impossible_grid_is_refused_before_anybody_waits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 0 of 4 shards with tp 3"):
        connect(f"file://{tmp_path}/never", rank=0, world=4, tp=3, backend="gloo", timeout=1)


def test_single_process_needs_no_groups() -> None:
    mesh = connect("unused", rank=0, world=1, tp=1, backend="gloo", timeout=1)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert mesh.sum_tp(x) is x
    assert torch.equal(mesh.sum_experts(x, [2]), x.float())
    assert mesh.gather_objects(5) == [5]
    mesh.close()


def test_plan_for_another_number_of_groups_is_an_error() -> None:
    model = DATA / "tiny-b" / "model"
    runner = build_runner(model, Mesh.single(), device="cpu", dtype=torch.float32, page_size=16, num_pages=1, num_slots=1)
    with pytest.raises(ValueError, match="2 groups planned, the mesh has 1"):
        runner.run(StepPlan(step=0, groups=(GroupPlan(), GroupPlan())))
