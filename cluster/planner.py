"""Does a model fit these accelerators, how is it laid out, and what can it hold? A pure function of published figures; torch-free.

Memory is counted tensor by tensor from the table that the loader uses; pages and slots come from `cluster.pools`. The share of memory
that is used and the workspace are assumptions, stated in `Workload`; speeds are `cluster.planner_roofline`'s.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.accelerators import ACCELERATORS, Accelerator
from cluster.planner_roofline import Efficiency, Grid, decode_step_s, prefill_s, step_s
from cluster.pools import PoolSizes, pool_bytes, pool_sizes
from engine.errors import ConfigError
from model.config import ModelConfig
from model.released import K3
from model.weights import ELEMENT_BYTES, Shard, component_bytes, expert_specs, layer_specs, model_specs, split

PEER_POOL = int(42.23 * 2**30)  # bytes of cache a GPU, reported for 3,249,215 tokens of fp8 latents
NEAR = 0.9  # of the most sessions: as good, when something else is better


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the machine, and what is assumed of it."""

    context: int = 131_072  # tokens of a live session, prompt and reply
    prompt: int = 8_192  # new tokens of a turn, for the time to first token
    forks: int = 0  # of each session: they share its pages and have a state of their own
    sessions: int = 1  # that must be live at once
    output_rate: float = 10.0  # tokens a second that every session which generates must get at least
    page_size: int = 64
    max_running: int = 64  # rows of a data-parallel group in one step
    max_batched_tokens: int = 2_048
    latent_bytes: int = 2  # 2: bf16; 1: fp8
    compute_bytes: int = 2  # of what the files hold in bf16: 4 when it is widened to float32
    memory_share: float = 0.9  # of an accelerator's memory that may be filled; the rest is drivers, libraries, fragments
    reserve: int = 2 * 2**30  # bytes an accelerator beside the activations: collectives' buffers, graphs, autotuning
    cache_bytes: int | None = None  # pools of an accelerator; None: all that is left
    num_slots: int | None = None  # None: as `cluster.pools` chooses
    host_bytes: float = 0.0  # host memory of a node for states at rest
    load_rate: float = 10e9  # bytes a second that a node reads of the checkpoint
    network: float = 50e9  # bytes a second and direction of an accelerator between nodes (400 Gb/s)
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        for name in (
            "context",
            "prompt",
            "sessions",
            "output_rate",
            "page_size",
            "max_running",
            "max_batched_tokens",
            "load_rate",
            "network",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: a positive number was expected")
        if self.latent_bytes not in (1, 2, 4):
            raise ConfigError(f"latent_bytes is {self.latent_bytes}: 1 (fp8), 2 (bf16) or 4 (fp32) was expected")
        if self.compute_bytes not in (2, 4):
            raise ConfigError(f"compute_bytes is {self.compute_bytes}: 2 (bf16) or 4 (float32) was expected")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share}: a share above 0 and at most 1 was expected")
        if self.forks < 0 or self.reserve < 0 or self.host_bytes < 0:
            raise ConfigError("forks, reserve and host_bytes: at least 0 was expected")
        if self.prompt > self.context:
            raise ConfigError(f"prompt {self.prompt} is longer than context {self.context}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A layout and what it holds. Byte counts and pools are of one accelerator, the fullest; sessions and rates of the whole replica."""

    accelerator: str
    count: int
    tp: int
    ep: int
    reason: str | None  # why it does not fit; None: it fits
    weights: Mapping[str, int]  # by class of tensor
    workspace: int
    pool: int  # bytes left for pages and slots; negative: missing
    pools: PoolSizes | None = None
    page_size: int = 64
    max_context: int = 0  # tokens that one session can have
    live_sessions: int = 0  # in device memory, at the workload's context; those beyond `rows` wait for their turn
    host_sessions: int = 0  # at rest in host memory
    load_s: float = 0.0
    ttft_s: float = 0.0  # of the workload's prompt on an idle machine
    step_s: float = 0.0  # of a decode step with every group's rows full
    rows: int = 0  # that decode together at the output rate or above, of all groups
    prompt_per_s: float = 0.0  # prompt tokens with every group at a prefill

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def groups(self) -> int:
        return self.count // self.tp

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def pool_tokens(self) -> int:
        """Tokens of latents that one group holds."""
        return self.pools.num_pages * self.page_size if self.pools else 0

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_s if self.step_s else 0.0

    def usd_per_million(self, usd_per_hour: float) -> float:
        """USD per million generated tokens at a price of one accelerator-hour, machines always busy; inf when it does not fit."""
        return self.count * usd_per_hour / 3600 / self.tokens_per_s * 1e6 if self.tokens_per_s else math.inf


def session_bytes(model: ModelConfig, tokens: int, latent_bytes: int = 2) -> int:
    """A whole session at rest: latents of all its tokens, recurrent state in fp32, convolution inputs."""
    cost = pool_bytes(model, page_size=1, tp_size=1, latent_bytes=latent_bytes)
    return tokens * cost.page + cost.slot


def local_bytes(model: ModelConfig, tp: int, ep: int, compute_bytes: int = 2) -> Counter[str]:
    """Bytes of weights that the fullest shard (rank 0) allocates, by class of tensor: what the files hold in bf16 in `compute_bytes`."""
    element = {**ELEMENT_BYTES, "BF16": compute_bytes}
    total: Counter[str] = Counter()
    for spec in (*model_specs(model), *(s for layer in range(model.num_layers) for s in layer_specs(model, layer))):
        n = math.prod(spec.shape)
        if spec.dim is not None:
            units = spec.shape[spec.dim] // spec.unit
            n = n // units * split(units, tp, 0)[1]
        total[spec.component] += n * element[spec.held]
    if model.moe_layers:
        expert = sum(math.prod(s.shape) * element[s.dtype] for s in expert_specs(model, model.moe_layers[0], 0))
        total["experts"] = expert * split(model.num_experts, ep, 0)[1] * len(model.moe_layers)
    return total


def workspace_bytes(model: ModelConfig, tp: int, groups: int, workload: Workload) -> int:
    """Activations of the largest step: block sums, the widest projection, all groups' expert inputs and sums, logits of every row."""
    tokens, rows = workload.max_batched_tokens, workload.max_running
    sources = (-(-model.num_layers // model.attn_res_block_size) if model.attn_res_block_size else 0) + 2
    width = 4 * model.kda_dim // tp + model.intermediate_size * 2 // tp
    experts = groups * tokens * (model.expert_width * (2 + 4) + 2 * model.moe_intermediate_size * 2)
    return workload.reserve + tokens * 2 * (sources * model.hidden_size + width) + experts + rows * model.vocab_size * 4


def plan(
    model: ModelConfig,
    name: str,
    accelerator: Accelerator,
    count: int,
    *,
    node_size: int = 8,
    tp: int | None = None,
    workload: Workload,
) -> ClusterPlan:
    """One replica on `count` accelerators. `tp` None: the width, inside one node, on which most sessions generate at the workload's rate;
    of those within a tenth of it the one with the earliest first token. More groups hold more latents, wider ones answer sooner.

    Raises `ConfigError` for a grid that the model cannot have at all; what is merely too large comes back with its `reason`.
    """
    if count < 1 or node_size < 1:
        raise ConfigError(f"{count} accelerators in nodes of {node_size}: at least 1 of each was expected")
    if count > node_size and count % node_size:
        raise ConfigError(f"{count} accelerators: a multiple of the node size {node_size} was expected")
    if workload.context > model.max_position_embeddings:
        raise ConfigError(f"context {workload.context} exceeds the model's {model.max_position_embeddings}")
    if tp is not None:
        Shard(tp_size=tp, ep_size=count).check(model)
        return _plan(model, name, accelerator, count, node_size, tp, workload)
    heads = math.gcd(model.kda_heads, model.mla_heads, count)
    Shard(tp_size=1, ep_size=count).check(model)
    widths = [w for w in range(1, min(count, node_size) + 1) if heads % w == 0]
    plans = [_plan(model, name, accelerator, count, node_size, w, workload) for w in widths]
    fitting = [p for p in plans if p.fits]
    if not fitting:
        return max(plans, key=lambda p: p.pool)
    most = max(p.rows for p in fitting)
    return min((p for p in fitting if p.rows >= NEAR * most), key=lambda p: p.ttft_s)


def peer_gap() -> int:
    """Bytes an accelerator that this plan gives to pools and a public vLLM run did not: K3 on 8 x B300 with tp 8 had PEER_POOL.

    What was not published may explain it: CUDA graphs, a larger step's activations, the vision tower, another share of the memory.
    """
    return plan(K3, "B300", ACCELERATORS["B300"], 8, tp=8, workload=Workload()).pool - PEER_POOL


def smallest_layouts(
    model: ModelConfig, table: Mapping[str, Accelerator], workload: Workload, *, node_size: int = 8, most: int = 256
) -> list[ClusterPlan]:
    """For each accelerator the fewest whole nodes that fit, up to `most` accelerators; those that never fit are left out."""
    found = []
    stored = sum(component_bytes(model).values())
    for name, accelerator in table.items():
        least = stored / (accelerator.memory * workload.memory_share)  # fewer cannot hold even one copy
        for count in range(node_size, min(most, model.num_experts) + 1, node_size):
            if count < least:
                continue
            candidate = plan(model, name, accelerator, count, node_size=node_size, workload=workload)
            if candidate.fits:
                found.append(candidate)
                break
    return found


def _plan(model: ModelConfig, name: str, accelerator: Accelerator, count: int, node_size: int, tp: int, workload: Workload) -> ClusterPlan:
    weights = local_bytes(model, tp, count, workload.compute_bytes)
    groups = count // tp
    workspace = workspace_bytes(model, tp, groups, workload)
    usable = int(accelerator.memory * workload.memory_share)
    left = usable - sum(weights.values()) - workspace
    budget = left if workload.cache_bytes is None else workload.cache_bytes

    def refused(reason: str) -> ClusterPlan:
        return ClusterPlan(accelerator=name, count=count, tp=tp, ep=count, reason=reason, weights=weights, workspace=workspace, pool=left)

    if left <= 0 or budget > left:
        asked = f" beside pools of {budget / 1e9:,.1f} GB" if workload.cache_bytes else ""
        total = sum(component_bytes(model).values())
        return refused(
            f"{count}x{name} with tp {tp}: weights of {sum(weights.values()) / 1e9:,.1f} GB and {workspace / 1e9:,.1f} GB of workspace an "
            f"accelerator{asked} exceed the usable {usable / 1e9:,.1f} GB "
            f"({workload.memory_share:.0%} of {accelerator.memory / 1e9:,.0f} GB); "
            f"the checkpoint's text tensors have {total / 1e9:,.0f} GB, "
            f"all accelerators together {count * accelerator.memory / 1e9:,.0f} GB"
        )
    cost = pool_bytes(model, page_size=workload.page_size, tp_size=tp, latent_bytes=workload.latent_bytes)
    try:
        pools = pool_sizes(
            cost,
            budget=budget,
            page_size=workload.page_size,
            max_running=workload.max_running,
            max_model_len=workload.context,
            num_pages=None,
            num_slots=workload.num_slots,
        )
    except ConfigError as error:
        return refused(f"{count}x{name} with tp {tp}: the weights fit, the context does not: {error}")
    live = min(pools.num_pages // -(-workload.context // workload.page_size), (pools.num_slots - 1) // (1 + workload.forks))
    groups_live = live * groups
    if groups_live < workload.sessions:
        return refused(
            f"{count}x{name} with tp {tp}: {groups_live} sessions of {workload.context:,} tokens with {workload.forks} forks fit, "
            f"{workload.sessions} are asked for ({pools.num_pages:,} pages and {pools.num_slots} slots a group)"
        )
    grid = Grid(
        model=model,
        accelerator=accelerator,
        count=count,
        tp=tp,
        node_size=node_size,
        network=workload.network,
        weights=weights,
        compute_bytes=workload.compute_bytes,
    )

    def decode_s(rows: int) -> float:
        return decode_step_s(grid, rows, workload.context, workload.latent_bytes, workload.efficiency)

    limit_s = 1 / workload.output_rate
    rows = bisect.bisect_right(range(1, min(live, workload.max_running) + 1), limit_s, key=decode_s)  # steps grow with their rows
    if rows < 1:
        return refused(
            f"{count}x{name} with tp {tp}: a step of one row of {workload.context:,} tokens takes {decode_s(1) * 1e3:,.0f} ms, "
            f"{workload.output_rate:g} tokens a second need {limit_s * 1e3:,.0f} ms"
        )
    nodes = -(-count // node_size)
    chunk = min(workload.prompt, workload.max_batched_tokens)
    chunk_s = step_s(
        grid,
        tokens=chunk,
        rows=1,
        context=workload.prompt // 2,
        groups=groups,
        latent_bytes=workload.latent_bytes,
        efficiency=workload.efficiency,
    )
    return ClusterPlan(
        accelerator=name,
        count=count,
        tp=tp,
        ep=count,
        reason=None,
        weights=weights,
        workspace=workspace,
        pool=budget,
        pools=pools,
        page_size=workload.page_size,
        max_context=min(model.max_position_embeddings, (budget - 2 * cost.slot) // cost.page * workload.page_size),
        live_sessions=groups_live,
        host_sessions=int(workload.host_bytes * nodes // session_bytes(model, workload.context, workload.latent_bytes)),
        load_s=sum(weights.values()) * min(count, node_size) / workload.load_rate,
        ttft_s=prefill_s(grid, workload.prompt, workload.max_batched_tokens, workload.latent_bytes, workload.efficiency),
        step_s=decode_s(rows),
        rows=rows * groups,
        prompt_per_s=groups * chunk / chunk_s,
    )
