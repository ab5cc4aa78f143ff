"""The table of K3's tensors: checkpoint name -> parameter and slice rule; and the check of a checkpoint against it. Torch-free.

Names, shapes and dtypes are those of the released files (facts: the tensor inventory of the K3 architecture). A parameter may be
filled by several tensors stacked along dim 0 (`in_proj` = q | k | v | g | f_a | b), so that one matrix product serves them all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine.errors import CheckpointError, ConfigError
from model.config import MX_BLOCK, ModelConfig
from model.safetensors_header import Folder, Stored, read_directory

PREFIX = "language_model.model."
HEAD = "language_model.lm_head."
VISION = ("vision_tower.", "mm_projector.")  # served by another module, skipped here
ELEMENT_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
EXPERT_TENSORS = 6  # of one routed expert
A_LOG_PADDING = 128  # the released files pad A_log with zeros to a multiple of this


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
    padded: bool = False  # the file may hold more values, or the same in another shape: take the first shape[0]

    @property
    def stored_elements(self) -> int:
        n = math.prod(self.shape)
        return -(-n // A_LOG_PADDING) * A_LOG_PADDING if self.padded else n


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
        TensorSpec(name=f"{PREFIX}embed_tokens.weight", shape=shape, parameter="embed_tokens.weight", component="embedding", dim=0),
        TensorSpec(name=f"{HEAD}weight", shape=shape, parameter="lm_head.weight", component="embedding", dim=0),
        *_whole(PREFIX, "", "embedding", {"norm.weight": (c.hidden_size,), **_attn_res(c, "output_attn_res")}),
    ]


def layer_specs(c: ModelConfig, layer: int) -> list[TensorSpec]:
    """Everything of a layer but its routed experts."""
    at = f"layers.{layer}."
    h = c.hidden_size
    norms: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    vectors = norms | _attn_res(c, "self_attention_res") | _attn_res(c, "mlp_res")
    return [
        *_whole(PREFIX + at, at, "vectors", vectors),
        *(_kda(c, at) if c.is_kda(layer) else _mla(c, at)),
        *(_moe(c, at) if c.is_moe(layer) else _mlp(at + "mlp.", h, c.intermediate_size, "dense")),
    ]


def expert_specs(c: ModelConfig, layer: int, expert: int) -> list[TensorSpec]:
    """One routed expert: w1 = gate, w3 = up, w2 = down; two E2M1 codes a byte, one E8M0 scale per 32 input columns."""
    at = f"layers.{layer}.block_sparse_moe."
    specs = []
    for w, parameter, rows, columns in (
        ("w1", "w13", c.moe_intermediate_size, c.routed_expert_hidden_size),
        ("w3", "w13", c.moe_intermediate_size, c.routed_expert_hidden_size),
        ("w2", "w2", c.routed_expert_hidden_size, c.moe_intermediate_size),
    ):
        for kind, width in (("packed", columns // 2), ("scale", columns // MX_BLOCK)):
            specs.append(
                TensorSpec(
                    name=f"{PREFIX}{at}experts.{expert}.{w}.weight_{kind}",
                    shape=(rows, width),
                    parameter=f"{at}{parameter}_{kind}",
                    component="experts",
                    dtype="U8",
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
        stem = f"{PREFIX}layers.{layer}.block_sparse_moe.experts."
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
            yield from _slices(expert_specs(c, layer, expert), shard, number + expert * EXPERT_TENSORS, expert - first)
        number += c.num_experts * EXPERT_TENSORS


def component_bytes(c: ModelConfig) -> Counter[str]:
    """Bytes of the checkpoint's text tensors by component."""
    total: Counter[str] = Counter()
    for spec in (*model_specs(c), *(s for layer in range(c.num_layers) for s in layer_specs(c, layer))):
        total[spec.component] += spec.stored_elements * ELEMENT_BYTES[spec.dtype]
    if c.moe_layers:
        expert = sum(math.prod(s.shape) for s in expert_specs(c, c.moe_layers[0], 0))
        total["experts"] = expert * c.num_experts * len(c.moe_layers)
    return total


def canonical_name(name: str) -> str:
    """The released name of a text tensor; some writers drop the inner `model.`."""
    if not name.startswith((PREFIX, HEAD)) and name.startswith("language_model."):
        return PREFIX + name.removeprefix("language_model.")
    return name


def check_checkpoint(folder: Folder, config: ModelConfig) -> dict[str, Stored]:
    """Compare a checkpoint's headers with the table before anything is allocated: released name -> where the tensor lies.

    Reads the index and the safetensors headers only. Raises `CheckpointError` naming file and tensor when a file is absent or
    truncated, or a tensor is missing, unknown, twice there, of another shape or of another dtype.
    """
    found: dict[str, Stored] = {}
    for stored in read_directory(folder):
        if stored.name.startswith(VISION):
            continue
        name = canonical_name(stored.name)
        if name in found:
            file, other = folder.where(stored.file), folder.where(found[name].file)
            raise CheckpointError(f"{file}: tensor {stored.name} is also in {other}; each tensor must be there once")
        found[name] = stored
    missing: list[str] = []
    known = 0
    for name, spec in named_specs(config):
        at = found.get(name)
        if at is None:
            missing.append(name)
        else:
            known += 1
            if at.dtype != spec.dtype or at.shape != spec.shape:
                _check_tensor(folder.where(at.file), spec, at)
    if known < len(found):
        unknown = found[next(iter(found.keys() - {name for name, _ in named_specs(config)}))]
        raise CheckpointError(
            f"{folder.where(unknown.file)}: tensor {unknown.name} {list(unknown.shape)} is not part of this architecture "
            f"({len(found) - known} such tensors); config.json and the files disagree"
        )
    if missing:
        raise CheckpointError(
            f"{folder.where('')}: tensor {missing[0]} is missing ({len(missing)} tensors missing); config.json and the files disagree"
        )
    return found


def _check_tensor(file: str, spec: TensorSpec, stored: Stored) -> None:
    if stored.dtype != spec.dtype:
        raise CheckpointError(f"{file}: tensor {stored.name} has dtype {stored.dtype}, expected {spec.dtype}")
    n = spec.shape[0]
    if spec.padded and math.prod(stored.shape) == max(stored.shape, default=0) >= n:
        return
    expected = f"[{n}] (or padded, or [1, 1, {n}, 1])" if spec.padded else str(list(spec.shape))
    raise CheckpointError(f"{file}: tensor {stored.name} has shape {list(stored.shape)}, expected {expected}")


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


def _whole(prefix: str, at: str, component: str, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> list[TensorSpec]:
    return [TensorSpec(name=prefix + n, shape=s, parameter=at + n, component=component, dtype=dtype) for n, s in shapes.items()]


def _attn_res(c: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}_norm.weight": (c.hidden_size,), f"{name}_proj.weight": (1, c.hidden_size)}


def _linear(
    at: str, component: str, names: Iterable[str], parameter: str, rows: int, columns: int, dim: int | None, unit: int = 1
) -> list[TensorSpec]:
    return [
        TensorSpec(
            name=f"{PREFIX}{at}{n}.weight",
            shape=(rows, columns),
            parameter=f"{at}{parameter}.weight",
            component=component,
            dim=dim,
            unit=unit,
        )
        for n in names
    ]


def _kda(c: ModelConfig, layer: str) -> list[TensorSpec]:
    at, h, d, width = f"{layer}self_attn.", c.hidden_size, c.kda_head_dim, c.kda_dim

    def fp32(name: str, shape: tuple[int, ...], parameter: str, dim: int | None, unit: int, padded: bool = False) -> TensorSpec:
        return TensorSpec(
            name=f"{PREFIX}{at}{name}",
            shape=shape,
            parameter=f"{at}{parameter}",
            component="kda",
            dtype="F32",
            dim=dim,
            unit=unit,
            padded=padded,
        )

    return [
        *_linear(at, "kda", ("q_proj", "k_proj", "v_proj", "g_proj"), "in_proj", width, h, 0, d),
        *_linear(at, "kda", ("f_a_proj",), "in_proj", d, h, None),
        *_linear(at, "kda", ("b_proj",), "in_proj", c.kda_heads, h, 0),
        *_linear(at, "kda", ("f_b_proj",), "f_b_proj", width, d, 0, d),
        *_linear(at, "kda", ("o_proj",), "o_proj", h, width, 1, d),
        *(fp32(f"{n}_conv1d.weight", (width, 1, c.conv_size), "conv1d.weight", 0, d) for n in "qkv"),
        fp32("A_log", (c.kda_heads,), "A_log", 0, 1, padded=True),
        fp32("dt_bias", (width,), "dt_bias", 0, d),
        fp32("o_norm.weight", (d,), "o_norm.weight", None, 1),
    ]


def _mla(c: ModelConfig, layer: str) -> list[TensorSpec]:
    at, h, heads = f"{layer}self_attn.", c.hidden_size, c.mla_heads
    query, expanded, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim, c.v_head_dim
    return [
        *_linear(at, "mla", ("q_a_proj",), "in_proj", c.q_lora_rank, h, None),
        *_linear(at, "mla", ("kv_a_proj_with_mqa",), "in_proj", c.latent_dim, h, None),
        *_linear(at, "mla", ("g_proj",), "in_proj", heads * value, h, 0, value),
        *_whole(PREFIX + at, at, "mla", {"q_a_layernorm.weight": (c.q_lora_rank,), "kv_a_layernorm.weight": (c.kv_lora_rank,)}),
        *_linear(at, "mla", ("q_b_proj",), "q_b_proj", heads * query, c.q_lora_rank, 0, query),
        *_linear(at, "mla", ("kv_b_proj",), "kv_b_proj", heads * expanded, c.kv_lora_rank, 0, expanded),
        *_linear(at, "mla", ("o_proj",), "o_proj", h, heads * value, 1, value),
    ]


def _mlp(at: str, hidden: int, width: int, component: str) -> list[TensorSpec]:
    return [
        *_linear(at, component, ("gate_proj", "up_proj"), "gate_up_proj", width, hidden, 0),
        *_linear(at, component, ("down_proj",), "down_proj", hidden, width, 1),
    ]


def _moe(c: ModelConfig, layer: str) -> list[TensorSpec]:
    at, h, latent = f"{layer}block_sparse_moe.", c.hidden_size, c.routed_expert_hidden_size
    return [
        *_whole(PREFIX + at, at, "router", {"gate.weight": (c.num_experts, h)}),
        *_whole(PREFIX + at, at, "router", {"gate.e_score_correction_bias": (c.num_experts,)}, "F32"),
        *_linear(at, "latent", ("routed_expert_down_proj",), "routed_expert_down_proj", latent, h, None),
        *_linear(at, "latent", ("routed_expert_up_proj",), "routed_expert_up_proj", h, latent, 1),
        *_whole(PREFIX + at, at, "latent", {"routed_expert_norm.weight": (latent,)}),
        *_mlp(f"{at}shared_experts.", h, c.shared_intermediate_size, "shared"),
    ]
