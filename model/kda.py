"""The Kimi Delta Attention layer, in token order: project, convolve, gate, recur, norm, project back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.kda_prefill import kda_prefill
from kernels.kda_step import kda_step
from kernels.norms import gated_rms_norm
from kernels.short_conv import short_conv
from model.batch import Batch, Round
from model.config import ModelConfig
from model.config_reader import KIMI_LINEAR
from model.layers import Linear, RMSNorm, parameter
from model.parallel import Mesh


class ShortConv(nn.Module):
    """Depthwise taps of q | k | v, fp32."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, width, dtype=torch.float32)


class KDA(nn.Module):
    """The local heads of one KDA layer. A_log, dt_bias, taps, o_norm and the state are fp32 whatever the compute dtype."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head_dim = config.kda_heads // mesh.tp, config.kda_head_dim
        self.lower_bound = config.gate_lower_bound
        width = self.heads * self.head_dim
        self.low_rank = config.family == KIMI_LINEAR  # of the output gate: g is g_a, and g_b makes it whole
        self.splits = (3 * width, self.head_dim if self.low_rank else width, self.head_dim, self.heads)  # qkv | g | f_a | b
        self.in_proj = Linear(config.hidden_size, sum(self.splits), dtype)
        self.f_b_proj = Linear(self.head_dim, width, dtype)
        if self.low_rank:
            self.g_b_proj = Linear(self.head_dim, width, dtype)
        self.o_proj = Linear(width, config.hidden_size, dtype)
        self.conv1d = ShortConv(3 * width, config.conv_size)
        self.A_log = parameter(self.heads, dtype=torch.float32)
        self.dt_bias = parameter(width, dtype=torch.float32)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, torch.float32)
        self.mesh = mesh

    def forward(self, x: Tensor, batch: Batch, state: Tensor, conv_state: Tensor) -> Tensor:
        """x [T, hidden]; state [slots, heads, K, V] and conv_state [slots, W - 1, q|k|v] of this layer, advanced in place."""
        qkv, gate, f_a, b = self.in_proj(x).split(self.splits, -1)
        f = self.f_b_proj(f_a)
        if self.low_rank:
            gate = self.g_b_proj(gate)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for now in batch.rounds:
            if now.tokens is None:
                y = self._advance(qkv, f, b, gate, now, state, conv_state)
            else:
                t = now.tokens
                y[t] = self._advance(qkv[t], f[t], b[t], gate[t], now, state, conv_state)
        return self.mesh.sum_tp(self.o_proj(y)).to(x.dtype)

    def _advance(self, qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, now: Round, state: Tensor, conv_state: Tensor) -> Tensor:
        """One round of pieces -> normed and gated [T', heads * V]; then the states that further slots asked for."""
        n, parts = now.num_decode, []
        taps, norm = self.conv1d.weight, self.o_norm
        if n:
            rows, slots = (qkv[:n], f[:n], b[:n], gate[:n]), (now.read_slots[:n], now.write_slots[:n, None])
            weights = (taps, self.A_log, self.dt_bias, norm.weight)
            parts.append(kda_step(*rows, *weights, conv_state, state, *slots, self.lower_bound, norm.eps))
        if n < now.read_slots.shape[0]:
            slots, bounds = (now.read_slots[n:], now.write_slots[n:]), now.cu_seqlens[n:] - n
            q, k, v = short_conv(qkv[n:], taps, conv_state, *slots, bounds).view(-1, 3, self.heads, self.head_dim).unbind(1)
            o = kda_prefill(q, k, v, f[n:], b[n:], self.A_log, self.dt_bias, state, *slots, bounds, self.lower_bound)
            parts.append(gated_rms_norm(o, gate[n:].unflatten(1, (self.heads, self.head_dim)), norm.weight, norm.eps).flatten(1))
        if now.copy_to is not None:
            state[now.copy_to] = state[now.copy_from]
            conv_state[now.copy_to] = conv_state[now.copy_from]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
