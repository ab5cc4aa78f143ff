"""How long a step takes at best, times a stated efficiency: the larger of memory and arithmetic, and then the links (nothing overlaps)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.accelerators import Accelerator
from engine.errors import ConfigError
from model.config import ModelConfig
from model.weights import ELEMENT_BYTES, expert_specs

SHARED = ("kda", "mla", "vectors", "latent", "router", "shared", "dense")  # read by every step


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the published peaks. Memory and arithmetic from vLLM 0.33 on one H200 with four full-width layers; links assumed."""

    memory: float = 0.56  # an MoE layer at batch 64: 583 experts of 17.5 MB and 0.4 GB beside them in 3.93 ms of 4.8 TB/s
    compute: float = 0.35  # 8,192 tokens of prefill: 75 TFLOP in 219 ms of 989 TFLOP/s
    link: float = 0.6  # assumed
    collective_s: float = 10e-6  # assumed: latency of one collective

    def __post_init__(self) -> None:
        for name in ("memory", "compute", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name} is {getattr(self, name)}: a share above 0 and at most 1 was expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A model laid over accelerators: TP groups inside nodes, experts over all."""

    model: ModelConfig
    accelerator: Accelerator
    count: int
    tp: int
    node_size: int
    network: float  # bytes a second and direction of an accelerator between nodes
    weights: Mapping[str, int]  # bytes of one accelerator by class
    compute_bytes: int = 2  # of an element of the dense weights and of the activations


def step_s(grid: Grid, *, tokens: int, rows: int, context: int, groups: int, latent_bytes: int, efficiency: Efficiency) -> float:
    """Seconds of one step in which each of `groups` groups computes `tokens` new tokens of `rows` rows that have `context` tokens each."""
    m, a = grid.model, grid.accelerator
    everyone = tokens * groups
    element = grid.compute_bytes
    expert = sum(math.prod(s.shape) * ELEMENT_BYTES[s.dtype] for s in expert_specs(m, m.moe_layers[0], 0)) if m.moe_layers else 0
    expert_params = 3 * m.moe_intermediate_size * m.expert_width
    hit = m.num_experts * (1 - (1 - m.num_experts_per_token / m.num_experts) ** everyone)  # distinct experts, uniform routing
    head = grid.weights["embedding"] // 2  # for the last token of each row
    body = sum(grid.weights.get(c, 0) for c in SHARED)
    state = (m.kda_state_bytes() + m.conv_state_bytes()) // grid.tp
    moved = (
        body
        + head
        + len(m.moe_layers) * expert * max(1.0, hit / grid.count)
        + rows * (context * m.mla_token_bytes(latent_bytes) + 2 * state)
    )
    attention = 2 * len(m.mla_layers) * context * (m.mla_heads // grid.tp) * (m.latent_dim + m.kv_lora_rank)
    flops: float = tokens * (2 * body // element + attention) + rows * 2 * head // element
    flops += 2 * everyone * len(m.moe_layers) * m.num_experts_per_token * expert_params / grid.count
    link = a.link / 2 * efficiency.link
    wide = link if grid.count <= grid.node_size else min(link, grid.network * efficiency.link)
    reduced = 2 * m.num_layers * tokens * m.hidden_size * element * 2 * (grid.tp - 1) / grid.tp  # ring all-reduce of both sub-layers
    exchanged = len(m.moe_layers) * everyone * m.expert_width * (element + 4) * (grid.count - 1) / grid.count
    collectives = (2 * m.num_layers if grid.tp > 1 else 0) + (2 * len(m.moe_layers) if grid.count > 1 else 0)
    compute = max(moved / (a.bandwidth * efficiency.memory), flops / (a.bf16_flops * efficiency.compute))
    return compute + reduced / link + exchanged / wide + collectives * efficiency.collective_s


def decode_step_s(grid: Grid, rows: int, context: int, latent_bytes: int, efficiency: Efficiency) -> float:
    """Seconds of a step in which every group generates a token for `rows` rows."""
    return step_s(
        grid, tokens=rows, rows=rows, context=context, groups=grid.count // grid.tp, latent_bytes=latent_bytes, efficiency=efficiency
    )


def prefill_s(grid: Grid, prompt: int, chunk: int, latent_bytes: int, efficiency: Efficiency) -> float:
    """Seconds until the first token of a prompt, computed in chunks by one group of an idle machine."""
    total = 0.0
    for start in range(0, prompt, chunk):
        tokens = min(chunk, prompt - start)
        total += step_s(
            grid, tokens=tokens, rows=1, context=start + tokens // 2, groups=1, latent_bytes=latent_bytes, efficiency=efficiency
        )
    return total
