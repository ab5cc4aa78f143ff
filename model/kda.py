"""The Kimi Delta Attention layer, in token order: project, convolve, gate, recur, norm, project back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.kda import kda_chunk, kda_gate, kda_recurrent
from kernels.norms import gated_rms_norm
from kernels.short_conv import short_conv
from model.batch import Batch, Round
from model.config import ModelConfig
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
        self.splits = (3 * width, width, self.head_dim, self.heads)  # qkv | g | f_a | b
        self.in_proj = Linear(config.hidden_size, sum(self.splits), dtype)
        self.f_b_proj = Linear(self.head_dim, width, dtype)
        self.o_proj = Linear(width, config.hidden_size, dtype)
        self.conv1d = ShortConv(3 * width, config.conv_size)
        self.A_log = parameter(self.heads, dtype=torch.float32)
        self.dt_bias = parameter(width, dtype=torch.float32)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, torch.float32)
        self.mesh = mesh

    def forward(self, x: Tensor, batch: Batch, state: Tensor, conv_state: Tensor) -> Tensor:
        """x [T, hidden]; state [slots, heads, K, V] and conv_state [slots, W - 1, q|k|v] of this layer, advanced in place."""
        qkv, gate, f_a, b = self.in_proj(x).split(self.splits, -1)
        g = kda_gate(self.f_b_proj(f_a), self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(b.float())
        o = torch.empty_like(g)
        for now in batch.rounds:
            if now.tokens is None:
                o = self._advance(qkv, g, beta, now, state, conv_state)
            else:
                t = now.tokens
                o[t] = self._advance(qkv[t], g[t], beta[t], now, state, conv_state)
        y = gated_rms_norm(o, gate.view_as(o), self.o_norm.weight, self.o_norm.eps)
        return self.mesh.sum_tp(self.o_proj(y.flatten(1))).to(x.dtype)

    def _advance(self, qkv: Tensor, g: Tensor, beta: Tensor, now: Round, state: Tensor, conv_state: Tensor) -> Tensor:
        """One round of pieces -> o [T', heads, V] fp32; then the states that further slots asked for."""
        qkv = short_conv(qkv, self.conv1d.weight, conv_state, now.read_slots, now.write_slots, now.cu_seqlens)
        q, k, v = qkv.view(-1, 3, self.heads, self.head_dim).unbind(1)
        n = now.num_decode
        o = torch.empty_like(v)
        for kernel, piece, first in ((kda_recurrent, slice(0, n), 0), (kda_chunk, slice(n, None), n)):
            read, write = now.read_slots[piece], now.write_slots[piece]
            if read.shape[0]:
                bounds = now.cu_seqlens[first : first + read.shape[0] + 1] - first
                o[piece] = kernel(q[piece], k[piece], v[piece], g[piece], beta[piece], state, read, write, bounds)
        if now.copy_to is not None:
            state[now.copy_to] = state[now.copy_from]
            conv_state[now.copy_to] = conv_state[now.copy_from]
        return o
