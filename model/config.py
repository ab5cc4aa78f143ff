"""`ModelConfig`: the architecture of a checkpoint, read from its `config.json`. Torch-free: the planner and the ingress read it too.

Kimi K3, and Kimi-Linear, its smaller sibling: the same layers with parts left out (facts on Kimi-Linear, section 3). Names in comments
are the checkpoint's keys; a value that this decoder does not implement is refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from model.config_reader import FIXED, KIMI_K3, MX_BLOCK, Family, Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A text decoder. Layers and experts are numbered from 0; sizes are in elements. None: Kimi-Linear has no such part."""

    family: Family = KIMI_K3  # how its files name and store tensors
    vocab_size: int
    hidden_size: int
    num_layers: int  # num_hidden_layers
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    rms_norm_eps: float
    latent_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm: not in the file, Moonshot's code uses its class default
    attn_res_block_size: int | None  # None: an ordinary residual stream
    # Kimi Delta Attention (linear_attn_config)
    kda_layers: tuple[int, ...]  # 0-based; the others are MLA
    kda_heads: int  # num_heads
    kda_head_dim: int  # head_dim: key dim = value dim = rank of the forget gate
    conv_size: int  # short_conv_kernel_size
    gate_lower_bound: float | None  # None: the softplus gate
    # Multi-head latent attention
    mla_heads: int  # num_attention_heads
    q_lora_rank: int | None  # None: one projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # kept and cached, never rotated
    v_head_dim: int
    # Feed-forward
    intermediate_size: int  # of the dense layers
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None  # latent width that the routed experts read and write; None: the full width
    moe_renormalize: bool
    routed_scaling_factor: float
    situ_beta: float | None  # activation_situ_beta; None: SiLU
    situ_linear_beta: float | None  # activation_situ_linear_beta; None leaves the up branch as it is

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `path/config.json`. Raises `ConfigError` naming the key, what was expected and what was found."""
        file = Path(path) / "config.json"
        try:
            raw = file.read_bytes()
        except OSError as e:
            raise ConfigError(f"{file}: cannot be read ({e.strerror}); a checkpoint directory with config.json was expected") from e
        return cls.from_json(raw, str(file))

    @classmethod
    def from_json(cls, raw: bytes, file: str) -> ModelConfig:
        """The content of a config.json; `file` names it in messages. Raises `ConfigError`."""
        try:
            return cls.from_dict(json.loads(raw))
        except ValueError as e:
            raise ConfigError(f"{file}: not JSON ({e})") from e
        except ConfigError as e:
            raise ConfigError(f"{file}: {e}") from e

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        if not isinstance(data, Mapping):
            raise ConfigError(f"expected an object, found {type(data).__name__}")
        reader = Reader(data)
        reader.check_fixed()
        k3 = reader.family == KIMI_K3
        config = cls(
            family=reader.family,
            vocab_size=reader.size("vocab_size"),
            hidden_size=reader.size("hidden_size"),
            num_layers=reader.size("num_hidden_layers"),
            max_position_embeddings=reader.size("max_position_embeddings" if k3 else "model_max_length"),
            bos_token_id=reader.token_id("bos_token_id"),
            eos_token_id=reader.token_id("eos_token_id"),
            pad_token_id=reader.token_id("pad_token_id"),
            rms_norm_eps=reader.positive("rms_norm_eps"),
            attn_res_block_size=reader.size("attn_res_block_size") if k3 else None,
            kda_layers=reader.kda_layers(),
            kda_heads=reader.size("linear_attn_config.num_heads"),
            kda_head_dim=reader.size("linear_attn_config.head_dim"),
            conv_size=reader.size("linear_attn_config.short_conv_kernel_size", least=2),
            gate_lower_bound=reader.gate_lower_bound(),
            mla_heads=reader.size("num_attention_heads"),
            q_lora_rank=reader.size("q_lora_rank") if k3 else None,
            kv_lora_rank=reader.size("kv_lora_rank"),
            qk_nope_head_dim=reader.size("qk_nope_head_dim"),
            qk_rope_head_dim=reader.size("qk_rope_head_dim"),
            v_head_dim=reader.size("v_head_dim"),
            intermediate_size=reader.size("intermediate_size"),
            first_k_dense_replace=reader.size("first_k_dense_replace", least=0),
            moe_layer_freq=reader.size("moe_layer_freq"),
            num_experts=reader.size("num_experts"),
            num_experts_per_token=reader.size("num_experts_per_token"),
            num_shared_experts=reader.size("num_shared_experts"),
            moe_intermediate_size=reader.size("moe_intermediate_size", multiple=MX_BLOCK if k3 else 1),
            routed_expert_hidden_size=reader.size("routed_expert_hidden_size", multiple=MX_BLOCK) if k3 else None,
            moe_renormalize=reader.flag("moe_renormalize"),
            routed_scaling_factor=reader.positive("routed_scaling_factor"),
            situ_beta=reader.positive("activation_situ_beta", default=1.0) if k3 else None,
            situ_linear_beta=reader.positive("activation_situ_linear_beta") if reader.get("activation_situ_linear_beta") else None,
        )
        reader.check_consistent()
        return config

    @classmethod
    def tiny(cls, **changes: Any) -> ModelConfig:
        """A K3 small enough for a laptop, with every mechanism of the real one: the embedded default, for the tiny tokenizer."""
        tiny = cls(
            vocab_size=1024,
            hidden_size=128,
            num_layers=8,
            max_position_embeddings=32768,
            bos_token_id=768,
            eos_token_id=770,
            pad_token_id=1023,
            rms_norm_eps=1e-5,
            attn_res_block_size=3,
            kda_layers=(0, 1, 2, 4, 5),
            kda_heads=8,
            kda_head_dim=16,
            conv_size=4,
            gate_lower_bound=-5.0,
            mla_heads=8,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            intermediate_size=256,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            num_experts=16,
            num_experts_per_token=4,
            num_shared_experts=2,
            moe_intermediate_size=64,
            routed_expert_hidden_size=64,
            moe_renormalize=True,
            routed_scaling_factor=1.0,
            situ_beta=4.0,
            situ_linear_beta=25.0,
        )
        return dataclasses.replace(tiny, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The released `config.json` shape of Kimi K3: `from_dict(to_dict())` gives an equal config."""
        text: dict[str, Any] = {key: value for key, value in FIXED[KIMI_K3].items() if "." not in key}
        values = dataclasses.asdict(self)
        del values["family"]
        for field in ("latent_norm_eps", "num_layers", "mla_heads", "situ_beta", "situ_linear_beta"):
            values.pop(field)
        for field in ("kda_layers", "kda_heads", "kda_head_dim", "conv_size", "gate_lower_bound"):
            values.pop(field)
        text |= values
        text |= {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.mla_heads,
            "num_key_value_heads": self.mla_heads,
            "activation_situ_beta": self.situ_beta,
            "activation_situ_linear_beta": self.situ_linear_beta,
            "use_grouped_topk": True,
            "linear_attn_config": {
                "kda_layers": [l + 1 for l in self.kda_layers],
                "full_attn_layers": [l + 1 for l in self.mla_layers],
                "num_heads": self.kda_heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": self.conv_size,
                "use_full_rank_gate": True,
                "gate_lower_bound": self.gate_lower_bound,
            },
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": MX_BLOCK}}},
            },
        }
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "text_config": text,
        }

    def fingerprint(self) -> str:
        """sha256 (hex) over every architecture value: equal for equal mathematics, independent of process and sharding."""
        canonical = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(l for l in range(self.num_layers) if l not in self.kda_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(l for l in range(self.num_layers) if self.is_moe(l))

    @property
    def kda_dim(self) -> int:
        """Width of each of KDA's q, k, v, gate vectors: heads x head_dim."""
        return self.kda_heads * self.kda_head_dim

    @property
    def expert_width(self) -> int:
        """Values that a routed expert reads and writes."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def packed_experts(self) -> bool:
        """MXFP4; otherwise the experts are bf16 like everything else."""
        return self.family == KIMI_K3

    @property
    def latent_dim(self) -> int:
        """Values that MLA caches per token and layer: the normalised latent and the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    def mla_token_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of MLA cache per token, all layers (every rank of a TP group holds them whole)."""
        return len(self.mla_layers) * self.latent_dim * element_bytes

    def kda_state_bytes(self, element_bytes: int = 4) -> int:
        """Bytes of one session's recurrent state, all layers and heads."""
        return len(self.kda_layers) * self.kda_heads * self.kda_head_dim**2 * element_bytes

    def conv_state_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of one session's short-convolution state (q, k, v; conv_size - 1 columns), all layers and heads."""
        return len(self.kda_layers) * 3 * self.kda_dim * (self.conv_size - 1) * element_bytes
