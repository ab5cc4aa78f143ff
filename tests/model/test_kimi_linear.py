"""Kimi-Linear's logits, tokens and states against the reference implementation: the same decoder by configuration."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.load import build_runner
from engine.errors import ConfigError
from engine.plan import Output, StepResult
from model.bundle_io import export_latents, export_recurrent, import_latents, import_recurrent
from model.config import ModelConfig
from model.parallel import Mesh
from model.released import KIMI_LINEAR_48B
from model.runner import ModelRunner
from model.weights import ELEMENT_BYTES, Shard, all_specs, component_bytes
from tests.model.golden import STATE_TOLERANCE, Golden
from tests.model.planning import Planned, Planner, logits_of, tokens_of
from tests.model.processes import run_processes
from tests.model.test_golden import assert_logits, assert_tokens_beside_strangers, play

FOLDER = Path(__file__).resolve().parent.parent / "data" / "kimi-linear" / "kl-a"
PROMPTS = ("p1", "p9", "p70", "p130")
GENERATED = 12


@pytest.fixture(scope="module")
def gold() -> Golden:
    return Golden("kl-a", FOLDER / "model", load_file(FOLDER / "expected.safetensors"))


@pytest.fixture(scope="module")
def loaded(gold: Golden) -> ModelRunner:
    return build(gold, Mesh.single())


@pytest.fixture
def runner(loaded: ModelRunner) -> ModelRunner:
    loaded.reset()
    return loaded


def build(gold: Golden, mesh: Mesh) -> ModelRunner:
    return build_runner(gold.model, mesh, device="cpu", dtype=torch.float32, page_size=16, num_pages=60, num_slots=16)


def assert_states(runner: ModelRunner, gold: Golden, prompt: str, row: Planned) -> None:
    config = runner.model.config
    for index, layer in enumerate(config.kda_layers):
        at = f"{prompt}.layer.{layer}."
        torch.testing.assert_close(runner.pools.kda[index, row.slot], gold.expected[at + "kda_state"], atol=STATE_TOLERANCE, rtol=1e-3)
        last = gold.expected[at + "conv_qkv"][:, 1 - config.conv_size :].T  # the file keeps a column more
        torch.testing.assert_close(runner.pools.conv[index, row.slot], last, atol=STATE_TOLERANCE, rtol=1e-3)
    for index, layer in enumerate(config.mla_layers):
        cached = runner.pools.latents[index, row.pages].flatten(0, 1)[: row.computed]
        torch.testing.assert_close(cached, gold.expected[f"{prompt}.layer.{layer}.mla_cache"], atol=STATE_TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_logits_states_and_tokens(runner: ModelRunner, gold: Golden, prompt: str, chunk: int) -> None:
    planner = Planner()
    scored, generated = planner.add(gold.prompt(prompt)), planner.add(gold.prompt(prompt))
    planner.consume_all(scored, chunk, Output.LOGITS)
    planner.generate([generated], GENERATED)
    results = play(runner, planner)
    assert_logits(logits_of(results, scored, runner.model.config.vocab_size), gold.logits(prompt))
    assert tokens_of(results, generated) == gold.greedy(prompt)
    assert_states(runner, gold, prompt, scored)


def test_with_strangers(runner: ModelRunner, gold: Golden) -> None:
    assert_tokens_beside_strangers(runner, gold, dict(zip(PROMPTS, (1, 2, 16, 50), strict=True)), GENERATED, GENERATED + 8)


def test_from_a_state_that_was_stored(runner: ModelRunner, gold: Golden) -> None:
    """Out of the pools after 40 tokens, into another place of them, and on: the same tokens."""
    planner, prompt, at = Planner(), gold.prompt("p70"), 40
    first = planner.add(prompt)
    planner.consume(first, at)
    planner.flush()
    play(runner, planner)
    recurrent, latents = export_recurrent(runner.pools, first.slot), export_latents(runner.pools, first.pages, 0, at)
    slot, pages = planner.slot(), [planner.page() for _ in first.pages]
    import_recurrent(runner.pools, slot, 0, 0, recurrent)
    import_latents(runner.pools, pages, 0, latents)
    resumed = planner.add(prompt, computed=at, slot=slot, pages=pages)
    planner.consume(resumed, 70 - at, Output.SAMPLE)
    planner.flush()
    planner.generate([resumed], GENERATED - 1)
    assert tokens_of(play(runner, planner), resumed) == gold.greedy("p70")


def planned(gold: Golden, groups: int) -> tuple[Planner, Planned, Planned]:
    planner = Planner(groups=groups)
    scored, generated = planner.add(gold.prompt("p130")), planner.add(gold.prompt("p70"), group=groups - 1)
    planner.consume_all(scored, 50, Output.LOGITS)
    planner.generate([generated], GENERATED)
    return planner, scored, generated


def shard(mesh: Mesh, gold: Golden) -> list[StepResult]:
    runner = build(gold, mesh)
    return [runner.run(plan) for plan in planned(gold, mesh.groups)[0].plans]


def test_two_shards(gold: Golden, tmp_path: Path) -> None:
    """Two data-parallel groups over experts spread two ways."""
    [ranks] = run_processes(2, [(1, partial(shard, gold=gold))], tmp_path)
    _, scored, generated = planned(gold, 2)
    assert_logits(logits_of(ranks[0], scored, gold.logits("p130").shape[1]), gold.logits("p130"))
    assert tokens_of(ranks[0], generated) == gold.greedy("p70")


@pytest.mark.parametrize("tp", [2, 5])
def test_a_width_that_does_not_divide_both_head_counts(gold: Golden, tp: int) -> None:
    with pytest.raises(ConfigError, match="5 KDA heads and 4 MLA heads"):
        Shard(tp_rank=0, tp_size=tp, ep_rank=0, ep_size=tp).check(ModelConfig.from_dir(gold.model))


def test_the_released_model_by_its_published_sizes() -> None:
    specs = list(all_specs(KIMI_LINEAR_48B))
    assert sum(math.prod(s.shape) for s in specs) == 49_122_681_728
    assert sum(s.stored_elements * ELEMENT_BYTES[s.dtype] for s in specs) == 98_245_528_576
    assert sum(component_bytes(KIMI_LINEAR_48B).values()) == 98_245_528_576
    assert KIMI_LINEAR_48B.kda_state_bytes() == 41_943_040
    assert KIMI_LINEAR_48B.conv_state_bytes() == 1_474_560
    assert KIMI_LINEAR_48B.mla_token_bytes() == 8_064


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": 64}, "q_lora_rank: expected nothing, found 64"),
        ({"hidden_act": "gelu"}, 'hidden_act: expected "silu"'),
        ({"model_max_length": None}, "model_max_length: expected an integer"),
        ({"attn_res_block_size": 4}, "attn_res_block_size: expected nothing"),
        ({"num_experts": "many"}, "num_experts: expected an integer"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_config_that_is_another_architecture(gold: Golden, change: dict[str, object], message: str) -> None:
    data = json.loads((gold.model / "config.json").read_text()) | change
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(data)
