"""`ModelConfig`: what is read, what is refused and in which words, and the byte counts of the released model."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from model.config import ModelConfig
from model.released import K3
from model.weights import all_specs, component_bytes
from tests.model.golden import DATA, SETS


def tiny_a() -> dict[str, Any]:
    return json.loads((DATA / "tiny-a" / "model" / "config.json").read_bytes())


def changed(path: str, value: Any) -> dict[str, Any]:
    """tiny-a's config.json with one value (`...` removes the key)."""
    data = tiny_a()
    *parents, key = path.split(".")
    at = data
    for parent in parents:
        at = at[parent]
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return data


def test_values_of_a_golden_set() -> None:
    config = ModelConfig.from_dir(DATA / "tiny-c" / "model")
    assert (config.kda_heads, config.mla_heads, config.v_head_dim, config.qk_nope_head_dim) == (5, 4, 40, 24)
    assert config.mla_layers == (2, 5, 9, 10)
    assert config.moe_layers == tuple(range(2, 11))
    assert config.routed_scaling_factor == 2.5


@pytest.mark.parametrize("name", SETS)
def test_round_trip(name: str) -> None:
    config = ModelConfig.from_dir(DATA / name / "model")
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_fingerprint_is_of_the_architecture_only() -> None:
    data = tiny_a()
    same = copy.deepcopy(data)
    same["text_config"]["initializer_range"] = 0.5
    other = changed("text_config.rms_norm_eps", 2e-5)
    assert ModelConfig.from_dict(data).fingerprint() == ModelConfig.from_dict(same).fingerprint()
    assert ModelConfig.from_dict(data).fingerprint() != ModelConfig.from_dict(other).fingerprint()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text_config", ..., r"text_config: expected an object .* found nothing"),
        ("text_config.hidden_size", ..., r"text_config\.hidden_size: expected an integer >= 1, found nothing"),
        ("text_config.hidden_size", "128", r"hidden_size: expected an integer >= 1, found '128'"),
        ("text_config.num_hidden_layers", 0, r"num_hidden_layers: expected an integer >= 1, found 0"),
        ("text_config.num_hidden_layers", 9, r"each of the layers 1\.\.9 exactly once; wrong at layers \[9\]"),
        ("text_config.linear_attn_config.kda_layers", [1, 2, 3, 4, 5, 6, 7], r"exactly once; wrong at layers \[4\]"),
        ("text_config.linear_attn_config.full_attn_layers", "4, 8", r"full_attn_layers: expected a list of 1-based layer numbers"),
        ("text_config.linear_attn_config", ..., r"use_full_rank_gate: expected true .* found nothing"),
        ("text_config.linear_attn_config.gate_lower_bound", None, r"gate_lower_bound: expected a negative number .* found nothing"),
        ("text_config.linear_attn_config.use_full_rank_gate", False, r"use_full_rank_gate: expected true .* found False"),
        ("text_config.hidden_act", "silu", r'hidden_act: expected "situ" \(nothing else is supported\), found \'silu\''),
        ("text_config.moe_router_activation_func", "softmax", r"moe_router_activation_func: expected \"sigmoid\""),
        ("text_config.mla_use_nope", False, r"mla_use_nope: expected true"),
        ("text_config.latent_moe_use_norm", ..., r"latent_moe_use_norm: expected true .* found nothing"),
        ("text_config.num_expert_group", 8, r"num_expert_group: expected 1"),
        ("text_config.num_nextn_predict_layers", 1, r"num_nextn_predict_layers: expected 0"),
        ("text_config.tie_word_embeddings", True, r"tie_word_embeddings: expected false"),
        ("text_config.num_key_value_heads", 2, r"num_key_value_heads: expected num_attention_heads \(4\)"),
        ("text_config.num_experts_per_token", 17, r"num_experts_per_token: expected at most num_experts \(16\), found 17"),
        ("text_config.moe_intermediate_size", 48, r"moe_intermediate_size: expected a multiple of 32"),
        ("text_config.eos_token_id", 512, r"eos_token_id: expected a token id below vocab_size 512"),
        ("text_config.rms_norm_eps", float("nan"), r"rms_norm_eps: expected a positive number"),
        ("text_config.quantization_config.format", "int4", r"quantization_config\.format: expected \"mxfp4-pack-quantized\""),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, r"group_0\.weights\.group_size: expected 32"),
    ],
)
def test_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(changed(path, value))


def test_missing_linear_beta_leaves_the_up_branch() -> None:
    assert ModelConfig.from_dict(changed("text_config.activation_situ_linear_beta", ...)).situ_linear_beta is None


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("{", "not JSON"), ("[]", "expected an object, found list")])
def test_unreadable_file_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_released_bytes() -> None:
    """The table reproduces the released model's totals to the byte."""
    assert ModelConfig.from_dict(K3.to_dict()) == K3
    found = component_bytes(K3)
    assert found == {
        "experts": 1_446_456_066_048,
        "kda": 61_258_257_408,
        "mla": 11_145_412_608,
        "vectors": 7_999_488,
        "shared": 24_310_185_984,
        "latent": 9_454_620_672,
        "router": 1_182_074_880,
        "dense": 1_453_326_336,
        "embedding": 4_697_663_488,
    }
    assert sum(found.values()) == 1_559_965_606_912


def test_released_tensor_count() -> None:
    vision = 3 + 165
    assert sum(1 for _ in all_specs(K3)) + vision == 497_220


def test_session_bytes() -> None:
    assert (len(K3.kda_layers), len(K3.mla_layers)) == (69, 24)
    assert K3.latent_dim == 576
    assert K3.mla_token_bytes() == 27_648
    assert K3.kda_state_bytes() == 434_110_464
    assert K3.kda_state_bytes(2) == 217_055_232
    assert K3.conv_state_bytes() == 15_261_696
    assert K3.kda_state_bytes() + K3.conv_state_bytes() == 449_372_160


def test_config_and_weights_need_no_torch() -> None:
    """The planner and the ingress read them in processes without torch."""
    code = "import sys; sys.modules['torch'] = None; import model.config, model.weights"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
