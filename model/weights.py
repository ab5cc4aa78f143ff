"""The table of the tensors: checkpoint name -> parameter and slice rule. Torch-free.

Names, shapes and dtypes are those of the released files (facts: the tensor inventories of K3 and of Kimi-Linear). A parameter may be
filled by several tensors stacked along dim 0 (`in_proj` = q | k | v | g | f_a | b), so that one matrix product serves them all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from model.config import ModelConfig
from model.config_reader import KIMI_K3, MX_BLOCK

PREFIX = "language_model.model."
HEAD = "language_model.lm_head."
ELEMENT_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
HELD_IN_FP32 = ("conv1d.weight", "o_norm.weight", "e_score_correction_bias")
A_LOG_PADDING = 128  # the released files pad A_log with zeros to a multiple of this


def prefix(c: ModelConfig) -> str:
    """Before the names of everything but the head."""
    return PREFIX if c.family == KIMI_K3 else "model."


def head(c: ModelConfig) -> str:
    return HEAD if c.family == KIMI_K3 else "lm_head."


def small(c: ModelConfig) -> str:
    """Dtype of what K3 keeps in fp32 and Kimi-Linear in bf16: convolutions, KDA's output norm, the router's bias."""
    return "F32" if c.family == KIMI_K3 else "BF16"


def split(n: int, parts: int, index: int) -> tuple[int, int]:
    """Balanced range [start, stop) number `index` of `n` things in `parts` parts: the first n % parts are longer by one."""
    size, longer = divmod(n, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One process' place: its TP group shares heads and dense widths, all processes share the experts."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def check(self, config: ModelConfig) -> None:
        """Refuse a grid that cannot hold this model. Raises `ConfigError` naming the counts."""
        tp, ep = self.tp_size, self.ep_size
        if tp < 1 or ep < 1 or ep % tp:
            raise ConfigError(f"tp {tp} and {ep} shards: the number of shards must be a multiple of the tensor-parallel width")
        if config.kda_heads % tp or config.mla_heads % tp:
            raise ConfigError(
                f"tp {tp} must divide both head counts of the model: {config.kda_heads} KDA heads and {config.mla_heads} MLA heads"
            )
        if config.moe_layers and ep > config.num_experts:
            raise ConfigError(f"{ep} shards for {config.num_experts} experts: each shard holds at least one whole expert")

    def experts(self, config: ModelConfig) -> tuple[int, int]:
        return split(config.num_experts, self.ep_size, self.ep_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor as the checkpoint holds it, and where it goes. `dim` is cut over the TP group in whole units of `unit` elements."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    component: str  # for accounting: experts | kda | mla | vectors | latent | router | shared | dense | embedding
    dtype: str = "BF16"
    dim: int | None = None  # None: every rank holds it whole
    unit: int = 1
    padding: int = 0  # > 0: the file holds a multiple of so many values, maybe in another shape; the first shape[0] count

    @property
    def padded(self) -> bool:
        return self.padding > 0

    @property
    def held(self) -> str:
        """Its dtype in memory: the model keeps some in fp32 that Kimi-Linear's files have in bf16."""
        return "F32" if self.parameter.endswith(HELD_IN_FP32) else self.dtype

    @property
    def stored_elements(self) -> int:
        n, multiple = math.prod(self.shape), max(1, self.padding)
        return -(-n // multiple) * multiple


@dataclass(slots=True, kw_only=True)  # not frozen: there are 650,000 of them for 64 shards of the released model
class TensorSlice:
    """What one process takes from one tensor: [start, stop) along `dim` (all of it when None), into `parameter`.

    It fills the parameter's rows from `offset` on (of its entry `expert`, when the parameter stacks experts).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    parameter: str
    offset: int
    expert: int | None = None
    padded: bool = False
    number: int = 0  # of the tensor in `all_specs`

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.stop - self.start if d == self.dim else n for d, n in enumerate(self.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.local_shape) * ELEMENT_BYTES[self.dtype]


def model_specs(c: ModelConfig) -> list[TensorSpec]:
    """Embedding, head and the vectors of the output."""
    shape = (c.vocab_size, c.hidden_size)
    return [
        TensorSpec(name=f"{prefix(c)}embed_tokens.weight", shape=shape, parameter="embed_tokens.weight", component="embedding", dim=0),
        TensorSpec(name=f"{head(c)}weight", shape=shape, parameter="lm_head.weight", component="embedding", dim=0),
        *_whole(c, "", "embedding", {"norm.weight": (c.hidden_size,), **_attn_res(c, "output_attn_res")}),
    ]


def layer_specs(c: ModelConfig, layer: int) -> list[TensorSpec]:
    """Everything of a layer but its routed experts."""
    at = f"layers.{layer}."
    h = c.hidden_size
    norms: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    vectors = norms | _attn_res(c, "self_attention_res") | _attn_res(c, "mlp_res")
    return [
        *_whole(c, at, "vectors", vectors),
        *(_kda(c, at) if c.is_kda(layer) else _mla(c, at)),
        *(_moe(c, at) if c.is_moe(layer) else _mlp(c, at + "mlp.", c.intermediate_size, "dense")),
    ]


def expert_specs(c: ModelConfig, layer: int, expert: int) -> list[TensorSpec]:
    """One routed expert: w1 = gate, w3 = up, w2 = down. K3: two E2M1 codes a byte, one E8M0 scale per 32 input columns."""
    at = f"layers.{layer}.block_sparse_moe."
    specs = []
    for w, parameter, rows, columns in (
        ("w1", "w13", c.moe_intermediate_size, c.expert_width),
        ("w3", "w13", c.moe_intermediate_size, c.expert_width),
        ("w2", "w2", c.expert_width, c.moe_intermediate_size),
    ):
        kinds = (("_packed", columns // 2), ("_scale", columns // MX_BLOCK)) if c.packed_experts else (("", columns),)
        for kind, width in kinds:
            specs.append(
                TensorSpec(
                    name=f"{prefix(c)}{at}experts.{expert}.{w}.weight{kind}",
                    shape=(rows, width),
                    parameter=f"{at}{parameter}{kind}",
                    component="experts",
                    dtype="U8" if c.packed_experts else "BF16",
                )
            )
    return specs


def all_specs(c: ModelConfig) -> Iterator[TensorSpec]:
    """Every text tensor of a checkpoint: 497,052 for the real model."""
    yield from model_specs(c)
    for layer in range(c.num_layers):
        yield from layer_specs(c, layer)
    for layer in c.moe_layers:
        for expert in range(c.num_experts):
            yield from expert_specs(c, layer, expert)


def named_specs(c: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    """The released names of `all_specs` in its order, each with a spec that gives its dtype and shape: all experts are alike."""
    yield from ((s.name, s) for s in (*model_specs(c), *(s for layer in range(c.num_layers) for s in layer_specs(c, layer))))
    for layer in c.moe_layers:
        alike = expert_specs(c, layer, 0)
        stem = f"{prefix(c)}layers.{layer}.block_sparse_moe.experts."
        ends = [(spec.name.removeprefix(f"{stem}0"), spec) for spec in alike]
        for expert in range(c.num_experts):
            for end, spec in ends:
                yield f"{stem}{expert}{end}", spec


def local_slices(c: ModelConfig, shard: Shard) -> Iterator[TensorSlice]:
    """What one process loads, grouped by parameter in the order it is filled. Raises `ConfigError` for an impossible grid."""
    shard.check(c)
    first, last = shard.experts(c)
    specs = [*model_specs(c), *(s for layer in range(c.num_layers) for s in layer_specs(c, layer))]
    yield from _slices(specs, shard, 0)
    number = len(specs)
    for layer in c.moe_layers:
        for expert in range(first, last):
            specs = expert_specs(c, layer, expert)
            yield from _slices(specs, shard, number + expert * len(specs), expert - first)
        number += c.num_experts * len(expert_specs(c, layer, 0))


def component_bytes(c: ModelConfig) -> Counter[str]:
    """Bytes of the checkpoint's text tensors by component."""
    total: Counter[str] = Counter()
    for spec in (*model_specs(c), *(s for layer in range(c.num_layers) for s in layer_specs(c, layer))):
        total[spec.component] += spec.stored_elements * ELEMENT_BYTES[spec.dtype]
    if c.moe_layers:
        expert = sum(math.prod(s.shape) * ELEMENT_BYTES[s.dtype] for s in expert_specs(c, c.moe_layers[0], 0))
        total["experts"] = expert * c.num_experts * len(c.moe_layers)
    return total


def _slices(specs: Iterable[TensorSpec], shard: Shard, first: int, expert: int | None = None) -> Iterator[TensorSlice]:
    filled: Counter[str] = Counter()
    for number, spec in enumerate(specs, start=first):
        if spec.dim is None:
            start, stop = 0, spec.shape[0]
        else:
            start, stop = (i * spec.unit for i in split(spec.shape[spec.dim] // spec.unit, shard.tp_size, shard.tp_rank))
        piece = TensorSlice(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            dim=spec.dim,
            start=start,
            stop=stop,
            parameter=spec.parameter,
            offset=filled[spec.parameter],
            expert=expert,
            padded=spec.padded,
            number=number,
        )
        filled[spec.parameter] += stop - start if spec.dim in (0, None) else spec.shape[0]
        yield piece


def _whole(c: ModelConfig, at: str, component: str, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> list[TensorSpec]:
    return [TensorSpec(name=prefix(c) + at + n, shape=s, parameter=at + n, component=component, dtype=dtype) for n, s in shapes.items()]


def _attn_res(c: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    if c.attn_res_block_size is None:
        return {}
    return {f"{name}_norm.weight": (c.hidden_size,), f"{name}_proj.weight": (1, c.hidden_size)}


@dataclass(frozen=True, slots=True)
class _Linears:
    """Matrices of one module: `names` stacked in `parameter`, each [rows, columns], cut along `dim` in whole units."""

    model: ModelConfig
    at: str
    component: str

    def __call__(self, names: str, parameter: str, rows: int, columns: int, dim: int | None, unit: int = 1) -> list[TensorSpec]:
        return [
            TensorSpec(
                name=f"{prefix(self.model)}{self.at}{n}.weight",
                shape=(rows, columns),
                parameter=f"{self.at}{parameter}.weight",
                component=self.component,
                dim=dim,
                unit=unit,
            )
            for n in names.split()
        ]


def _kda(c: ModelConfig, layer: str) -> list[TensorSpec]:
    at, h, d, width = f"{layer}self_attn.", c.hidden_size, c.kda_head_dim, c.kda_dim
    linear = _Linears(c, at, "kda")

    def vector(
        name: str, shape: tuple[int, ...], parameter: str, dim: int | None, unit: int, *, dtype: str = "F32", padding: int = 0
    ) -> TensorSpec:
        return TensorSpec(
            name=f"{prefix(c)}{at}{name}",
            shape=shape,
            parameter=f"{at}{parameter}",
            component="kda",
            dtype=dtype,
            dim=dim,
            unit=unit,
            padding=padding,
        )

    full = c.family == KIMI_K3  # the output gate's rank
    return [
        *linear("q_proj k_proj v_proj", "in_proj", width, h, 0, d),
        *(linear("g_proj", "in_proj", width, h, 0, d) if full else linear("g_a_proj", "in_proj", d, h, None)),
        *linear("f_a_proj", "in_proj", d, h, None),
        *linear("b_proj", "in_proj", c.kda_heads, h, 0),
        *linear("f_b_proj", "f_b_proj", width, d, 0, d),
        *([] if full else linear("g_b_proj", "g_b_proj", width, d, 0, d)),
        *linear("o_proj", "o_proj", h, width, 1, d),
        *(vector(f"{n}_conv1d.weight", (width, 1, c.conv_size), "conv1d.weight", 0, d, dtype=small(c)) for n in "qkv"),
        vector("A_log", (c.kda_heads,), "A_log", 0, 1, padding=A_LOG_PADDING if full else 1),
        vector("dt_bias", (width,), "dt_bias", 0, d),
        vector("o_norm.weight", (d,), "o_norm.weight", None, 1, dtype=small(c)),
    ]


def _mla(c: ModelConfig, layer: str) -> list[TensorSpec]:
    at, h, heads = f"{layer}self_attn.", c.hidden_size, c.mla_heads
    query, expanded, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim, c.v_head_dim
    linear, gated = _Linears(c, at, "mla"), c.family == KIMI_K3
    norms = {"kv_a_layernorm.weight": (c.kv_lora_rank,)}
    if c.q_lora_rank is not None:
        norms = {"q_a_layernorm.weight": (c.q_lora_rank,)} | norms
    return [
        *(linear("q_proj", "in_proj", heads * query, h, 0, query) if c.q_lora_rank is None else []),
        *(linear("q_a_proj", "in_proj", c.q_lora_rank, h, None) if c.q_lora_rank is not None else []),
        *linear("kv_a_proj_with_mqa", "in_proj", c.latent_dim, h, None),
        *(linear("g_proj", "in_proj", heads * value, h, 0, value) if gated else []),
        *_whole(c, at, "mla", norms),
        *(linear("q_b_proj", "q_b_proj", heads * query, c.q_lora_rank, 0, query) if c.q_lora_rank is not None else []),
        *linear("kv_b_proj", "kv_b_proj", heads * expanded, c.kv_lora_rank, 0, expanded),
        *linear("o_proj", "o_proj", h, heads * value, 1, value),
    ]


def _mlp(c: ModelConfig, at: str, width: int, component: str) -> list[TensorSpec]:
    linear = _Linears(c, at, component)
    return [
        *linear("gate_proj up_proj", "gate_up_proj", width, c.hidden_size, 0),
        *linear("down_proj", "down_proj", c.hidden_size, width, 1),
    ]


def _moe(c: ModelConfig, layer: str) -> list[TensorSpec]:
    at, h, latent = f"{layer}block_sparse_moe.", c.hidden_size, c.routed_expert_hidden_size
    linear = _Linears(c, at, "latent")
    between = []
    if latent is not None:
        between = [
            *linear("routed_expert_down_proj", "routed_expert_down_proj", latent, h, None),
            *linear("routed_expert_up_proj", "routed_expert_up_proj", h, latent, 1),
            *_whole(c, at, "latent", {"routed_expert_norm.weight": (latent,)}),
        ]
    return [
        *_whole(c, at, "router", {"gate.weight": (c.num_experts, h)}),
        *_whole(c, at, "router", {"gate.e_score_correction_bias": (c.num_experts,)}, small(c)),
        *between,
        *_mlp(c, f"{at}shared_experts.", c.shared_intermediate_size, "shared"),
    ]
