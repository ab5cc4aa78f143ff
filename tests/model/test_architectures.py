"""Other sizes are configuration: random checkpoints of unusual architectures against an independent float64 implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.load import build_runner
from engine.plan import Output
from model.checkpoint import write_random_checkpoint
from model.config import ModelConfig
from model.parallel import Mesh
from tests.model.float64_k3 import Float64K3
from tests.model.golden import LOGITS_TOLERANCE, golden
from tests.model.planning import Planned, Planner, logits_of

ARCHITECTURES = {
    "default": ModelConfig.tiny(),
    "no MLA, odd heads": ModelConfig.tiny(
        num_layers=4, kda_layers=(0, 1, 2, 3), kda_heads=3, mla_heads=5, attn_res_block_size=1, num_experts=3, num_experts_per_token=3
    ),
    "no KDA, one block": ModelConfig.tiny(num_layers=3, kda_layers=(), attn_res_block_size=12, num_experts=5, num_experts_per_token=1),
    "MLA first, wide conv": ModelConfig.tiny(
        num_layers=5, kda_layers=(1, 4), attn_res_block_size=2, conv_size=5, kda_head_dim=24, v_head_dim=40, qk_rope_head_dim=6
    ),
    "short conv, sparse MoE": ModelConfig.tiny(
        num_layers=6, kda_layers=(0, 1, 3, 4), conv_size=2, first_k_dense_replace=2, moe_layer_freq=2, num_shared_experts=1
    ),
    "all dense, no linear beta": ModelConfig.tiny(
        num_layers=3, kda_layers=(0, 2), first_k_dense_replace=3, situ_linear_beta=None, situ_beta=1.5, gate_lower_bound=-1.25
    ),
    "MoE everywhere, odd widths": ModelConfig.tiny(
        num_layers=4,
        kda_layers=(0, 2),
        vocab_size=1001,
        hidden_size=90,
        intermediate_size=77,
        first_k_dense_replace=0,
        num_experts=37,
        num_experts_per_token=7,
        moe_intermediate_size=32,
        routed_expert_hidden_size=96,
        moe_renormalize=False,
        routed_scaling_factor=3.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        q_lora_rank=33,
        kv_lora_rank=17,
        rms_norm_eps=1e-4,
    ),
}
LENGTH = 70


def ids_for(config: ModelConfig) -> list[int]:
    return np.random.default_rng(11).integers(0, config.vocab_size, LENGTH).tolist()


def score(planner: Planner, ids: list[int]) -> Planned:
    """In unequal chunks, the first longer than one chunk of the linear attention."""
    row = planner.add(ids)
    for count in (66, 1, 3):
        planner.consume(row, count, Output.LOGITS)
        planner.flush()
    return row


def scored(mesh: Mesh, path: Path, ids: list[int]) -> Tensor:
    """Logits [T, vocab] of the row, on rank 0 (elsewhere none)."""
    planner = Planner(groups=mesh.groups)
    row = score(planner, ids)
    runner = build_runner(path, mesh, device="cpu", dtype=torch.float32, page_size=16, num_pages=8, num_slots=2)
    results = [runner.run(plan) for plan in planner.plans]
    return logits_of(results, row, runner.model.config.vocab_size) if mesh.rank == 0 else torch.empty(0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_against_float64(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    write_random_checkpoint(tmp_path, config, seed=3)
    ids = ids_for(config)
    expected = Float64K3(tmp_path).logits(ids)
    found = scored(Mesh.single(), tmp_path, ids)
    assert 1.5 < expected.std() < 4
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=LOGITS_TOLERANCE, rtol=0)


def test_float64_agrees_with_the_goldens() -> None:
    """The judge is judged too."""
    gold = golden("tiny-b")
    expected = Float64K3(gold.model).logits(list(gold.prompt("r33")))
    torch.testing.assert_close(gold.logits("r33").double(), torch.from_numpy(expected), atol=LOGITS_TOLERANCE, rtol=0)
