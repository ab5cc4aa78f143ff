"""Keys of a `config.json`: what must be there, what a value may be, and what is said when it is not. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from engine.errors import ConfigError

MX_BLOCK = 32  # input columns that share one E8M0 scale (OCP MX v1.0)
Family = Literal["kimi_k3", "kimi_linear"]
KIMI_K3: Final = "kimi_k3"
KIMI_LINEAR: Final = "kimi_linear"

# What the layers do without being told. Another value means other mathematics, so it is refused instead of ignored.
_BOTH: dict[str, Any] = {
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
FIXED: dict[Family, dict[str, Any]] = {
    KIMI_K3: {
        **_BOTH,
        "hidden_act": "situ",
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "topk_method": "noaux_tc",
        "linear_attn_config.use_full_rank_gate": True,
    },
    KIMI_LINEAR: {
        **_BOTH,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "attn_res_block_size": None,
        "routed_expert_hidden_size": None,
        "mla_use_output_gate": None,
        "linear_attn_config.use_full_rank_gate": None,
        "quantization_config": None,
    },
}
MAY_BE_ABSENT = ("num_expert_group", "topk_group", "num_nextn_predict_layers", "tie_word_embeddings")


class Reader:
    """Reads the text decoder's keys by dotted path and says precisely what is wrong with one.

    Kimi K3 has them under `text_config`; Kimi-Linear's file is flat.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        flat = data.get("model_type") == KIMI_LINEAR and "text_config" not in data
        text = data if flat else data.get("text_config")
        if not isinstance(text, Mapping):
            found = "nothing" if text is None else type(text).__name__
            raise ConfigError(f"text_config: expected an object with the text decoder's values, found {found}")
        self.text = text
        self.family: Family = KIMI_LINEAR if flat else KIMI_K3
        self._at = "" if flat else "text_config."

    def get(self, key: str) -> Any:
        value: Any = self.text
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def fail(self, key: str, expected: str) -> ConfigError:
        value = self.get(key)
        return ConfigError(f"{self._at}{key}: expected {expected}, found {'nothing' if value is None else repr(value)}")

    def size(self, key: str, least: int = 1, multiple: int = 1) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fail(key, f"an integer >= {least}")
        if value % multiple:
            raise self.fail(key, f"a multiple of {multiple} (MXFP4 scales cover {multiple} columns)")
        return value

    def token_id(self, key: str) -> int:
        value = self.size(key, least=0)
        if value >= self.size("vocab_size"):
            raise self.fail(key, f"a token id below vocab_size {self.get('vocab_size')}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def gate_lower_bound(self) -> float | None:
        """None: Kimi-Linear's softplus gate, which has none."""
        value = self.get("linear_attn_config.gate_lower_bound")
        if self.family == KIMI_LINEAR:
            if value is not None:
                raise self.fail("linear_attn_config.gate_lower_bound", "nothing")
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not -float("inf") < value < 0:
            raise self.fail("linear_attn_config.gate_lower_bound", "a negative number (the unbounded softplus gate is not supported)")
        return float(value)

    def kda_layers(self) -> tuple[int, ...]:
        lists = {}
        for key in ("linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"):
            value = self.get(key)
            if not isinstance(value, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
                raise self.fail(key, "a list of 1-based layer numbers")
            lists[key] = cast("list[int]", list(value))
        kda, full = lists.values()
        count = self.size("num_hidden_layers")
        if sorted(kda + full) != list(range(1, count + 1)):
            wrong = sorted(set(range(1, count + 1)) ^ set(kda + full)) or sorted(l for l in set(kda + full) if (kda + full).count(l) > 1)
            raise ConfigError(
                f"{self._at}linear_attn_config: kda_layers and full_attn_layers must name each of the layers 1..{count} exactly once; "
                f"wrong at layers {wrong[:8]}"
            )
        return tuple(sorted(l - 1 for l in kda))

    def check_fixed(self) -> None:
        for key, fixed in FIXED[self.family].items():
            value = self.get(key)
            if value != fixed and not (value is None and key in MAY_BE_ABSENT):
                raise self.fail(key, "nothing" if fixed is None else f"{json.dumps(fixed)} (nothing else is supported)")
        quantization = self.get("quantization_config")
        if quantization is not None:
            if self.get("quantization_config.format") != "mxfp4-pack-quantized":
                raise self.fail("quantization_config.format", '"mxfp4-pack-quantized" (nothing else is supported)')
            groups = self.get("quantization_config.config_groups") or {}
            for name in groups:
                key = f"quantization_config.config_groups.{name}.weights.group_size"
                if self.get(key) != MX_BLOCK:
                    raise self.fail(key, str(MX_BLOCK))

    def check_consistent(self) -> None:
        heads, experts = self.get("num_attention_heads"), self.get("num_experts")
        if self.get("num_key_value_heads") not in (None, heads):
            raise self.fail("num_key_value_heads", f"num_attention_heads ({heads}): grouped heads are not supported")
        if self.get("num_experts_per_token") > experts:
            raise self.fail("num_experts_per_token", f"at most num_experts ({experts})")
