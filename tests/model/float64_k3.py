"""An independent K3 in float64 numpy, token by token: written from the architecture alone, sharing nothing with the code under test.

No chunks, no pages, no absorption, no stacking: keys and values are expanded, experts are decoded nibble by nibble, every token is a loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def read_file(file: Path) -> dict[str, NDArray[Any]]:
    """A safetensors file by hand: bf16 -> float64, F32 -> float64, U8 as it is."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        data = raw[8 + length + start : 8 + length + stop]
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif entry["dtype"] == "F32":
            value = np.frombuffer(data, np.float32).astype(np.float64)
        else:
            value = np.frombuffer(data, np.uint8)
        tensors[name] = value.reshape(entry["shape"])
    return tensors


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


class Float64K3:
    """`logits(ids)` -> [T, vocab]."""

    def __init__(self, path: Path) -> None:
        self.c = json.loads((path / "config.json").read_bytes())["text_config"]
        index = json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"]
        self.w: dict[str, Any] = {}
        for file in set(index.values()):
            self.w |= read_file(path / file)
        self.experts: dict[str, Array] = {}

    def logits(self, ids: list[int]) -> Array:
        c = self.c
        self.past: dict[str, Any] = {}
        return np.stack([self.token(i) for i in ids]) if c else np.zeros(0)

    def get(self, name: str) -> Any:
        return self.w["language_model.model." + name]

    def token(self, token_id: int) -> Array:
        c = self.c
        run, blocks = self.get("embed_tokens.weight")[token_id], []
        for l in range(c["num_hidden_layers"]):
            at = f"layers.{l}."
            h = self.mix([*blocks, run], at + "self_attention_res") if blocks else run
            x = rms(h, self.get(at + "input_layernorm.weight"), c["rms_norm_eps"])
            kda = l + 1 in c["linear_attn_config"]["kda_layers"]
            a = self.kda(x, at + "self_attn.") if kda else self.mla(x, at + "self_attn.")
            if l % c["attn_res_block_size"] == 0:
                blocks.append(run)
                run = a
            else:
                run = run + a
            h = self.mix([*blocks, run], at + "mlp_res")
            x = rms(h, self.get(at + "post_attention_layernorm.weight"), c["rms_norm_eps"])
            moe = l >= c["first_k_dense_replace"] and l % c["moe_layer_freq"] == 0
            run = run + (self.moe(x, at + "block_sparse_moe.") if moe else self.mlp(x, at + "mlp."))
        h = self.mix([*blocks, run], "output_attn_res")
        return self.w["language_model.lm_head.weight"] @ rms(h, self.get("norm.weight"), c["rms_norm_eps"])

    def mix(self, sources: list[Array], name: str) -> Array:
        norm, query = self.get(name + "_norm.weight"), self.get(name + "_proj.weight")[0]
        scores = np.array([rms(s, norm, self.c["rms_norm_eps"]) @ query for s in sources])
        return sum((p * s for p, s in zip(softmax(scores), sources, strict=True)), np.zeros_like(sources[0]))

    def kda(self, x: Array, at: str) -> Array:
        k = self.c["linear_attn_config"]
        heads, d, width = k["num_heads"], k["head_dim"], k["short_conv_kernel_size"]
        vectors = []
        for n in "qkv":
            window = self.past.setdefault(at + n, [np.zeros(heads * d)] * width)
            window.append(self.get(f"{at}{n}_proj.weight") @ x)
            window.pop(0)
            taps = self.get(f"{at}{n}_conv1d.weight")[:, 0]
            y = sum((taps[:, i] * window[i] for i in range(width)), np.zeros(heads * d))
            vectors.append((y * sigmoid(y)).reshape(heads, d))
        f = (self.get(at + "f_b_proj.weight") @ (self.get(at + "f_a_proj.weight") @ x)).reshape(heads, d)
        bias = self.get(at + "dt_bias").reshape(heads, d)
        beta = sigmoid(self.get(at + "b_proj.weight") @ x)
        gate = sigmoid(self.get(at + "g_proj.weight") @ x).reshape(heads, d)
        state = self.past.setdefault(at, np.zeros((heads, d, d)))
        out = np.zeros((heads, d))
        for h in range(heads):
            q, key, v = (vector[h] for vector in vectors)
            q = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(d)
            key = key / np.sqrt((key * key).sum() + 1e-6)
            decay = np.exp(k["gate_lower_bound"] * sigmoid(np.exp(self.get(at + "A_log").reshape(-1)[h]) * (f[h] + bias[h])))
            state[h] = decay[:, None] * state[h]
            state[h] = state[h] + beta[h] * np.outer(key, v - key @ state[h])
            out[h] = rms(q @ state[h], self.get(at + "o_norm.weight"), self.c["rms_norm_eps"]) * gate[h]
        return self.get(at + "o_proj.weight") @ out.reshape(-1)

    def mla(self, x: Array, at: str) -> Array:
        c = self.c
        heads, nope, rope, v = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        q = self.get(at + "q_b_proj.weight") @ rms(self.get(at + "q_a_proj.weight") @ x, self.get(at + "q_a_layernorm.weight"), 1e-6)
        kv = self.get(at + "kv_a_proj_with_mqa.weight") @ x
        latent = rms(kv[: c["kv_lora_rank"]], self.get(at + "kv_a_layernorm.weight"), 1e-6)
        expanded = (self.get(at + "kv_b_proj.weight") @ latent).reshape(heads, nope + v)
        shared = np.broadcast_to(kv[c["kv_lora_rank"] :], (heads, rope))
        seen = self.past.setdefault(at, [])
        seen.append((np.concatenate((expanded[:, :nope], shared), 1), expanded[:, nope:]))
        q = q.reshape(heads, nope + rope)
        out = np.zeros((heads, v))
        for h in range(heads):
            p = softmax(np.array([keys[h] @ q[h] for keys, _ in seen]) / np.sqrt(nope + rope))
            out[h] = sum((w * values[h] for w, (_, values) in zip(p, seen, strict=True)), np.zeros(v))
        gate = sigmoid(self.get(at + "g_proj.weight") @ x)
        return self.get(at + "o_proj.weight") @ (out.reshape(-1) * gate)

    def situ(self, gate: Array, up: Array) -> Array:
        beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        up = up if linear is None else linear * np.tanh(up / linear)
        return beta * np.tanh(gate / beta) * sigmoid(gate) * up

    def mlp(self, x: Array, at: str) -> Array:
        y = self.situ(self.get(at + "gate_proj.weight") @ x, self.get(at + "up_proj.weight") @ x)
        return self.get(at + "down_proj.weight") @ y

    def moe(self, x: Array, at: str) -> Array:
        scores = sigmoid(self.get(at + "gate.weight") @ x)
        chosen = np.argsort(-(scores + self.get(at + "gate.e_score_correction_bias")))[: self.c["num_experts_per_token"]]
        total = scores[chosen].sum() if self.c["moe_renormalize"] else 1.0
        z = self.get(at + "routed_expert_down_proj.weight") @ x
        y = np.zeros_like(z)
        for e in chosen:
            w1, w2, w3 = (self.expert(f"{at}experts.{e}.{w}.") for w in ("w1", "w2", "w3"))
            y += scores[e] / total * self.c["routed_scaling_factor"] * (w2 @ self.situ(w1 @ z, w3 @ z))
        y = rms(y, self.get(at + "routed_expert_norm.weight"), self.c["rms_norm_eps"])
        return self.get(at + "routed_expert_up_proj.weight") @ y + self.mlp(x, at + "shared_experts.")

    def expert(self, at: str) -> Array:
        if at not in self.experts:
            packed, scale = self.get(at + "weight_packed"), self.get(at + "weight_scale")
            values = np.empty((packed.shape[0], 2 * packed.shape[1]))
            values[:, 0::2], values[:, 1::2] = CODES[packed & 15], CODES[packed >> 4]
            self.experts[at] = values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, 1)
        return self.experts[at]
