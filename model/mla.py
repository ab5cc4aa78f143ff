"""The multi-head latent attention layer (NoPE, gated), in token order: project, cache the latent, attend absorbed, gate, project back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kernels.backend import use_triton
from kernels.mla import mla_decode, mla_prefill, mla_prefill_expanded
from kernels.norms import sigmoid_gate
from model.batch import Batch
from model.config import ModelConfig
from model.config_reader import KIMI_K3
from model.layers import Linear, RMSNorm
from model.parallel import Mesh

EXPANDED = 1 << 30  # values of expanded keys and values that are held at once


class MLA(nn.Module):
    """The local heads of one MLA layer. The cached latents have no head axis: every rank of the TP group computes and holds them."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.mla_heads // mesh.tp
        self.nope, self.rope, self.value, self.latent = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        )
        queries, self.gated = self.heads * (self.nope + self.rope), config.family == KIMI_K3
        self.splits = (config.q_lora_rank or queries, self.latent, self.rope, self.heads * self.value if self.gated else 0)
        self.in_proj = Linear(config.hidden_size, sum(self.splits), dtype)  # q_a, or q itself | kv_a | shared key | g
        self.kv_a_layernorm = RMSNorm(self.latent, config.latent_norm_eps, dtype)
        self.compressed = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps, dtype)
            self.q_b_proj = Linear(config.q_lora_rank, queries, dtype)
        self.kv_b_proj = Linear(self.latent, self.heads * (self.nope + self.value), dtype)
        self.o_proj = Linear(self.heads * self.value, config.hidden_size, dtype)
        self.scale = (self.nope + self.rope) ** -0.5  # the unrotated shared dims count
        self.mesh = mesh

    def forward(self, x: Tensor, batch: Batch, latents: Tensor) -> Tensor:
        """x [T, hidden]; latents [pages, page_size, latent + shared key] of this layer: this step's are written, then attended."""
        q, kv_a, shared_key, gate = self.in_proj(x).split(self.splits, -1)
        latents.flatten(0, 1)[batch.latent_places] = torch.cat((self.kv_a_layernorm(kv_a), shared_key), -1).to(latents.dtype)
        if self.compressed:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(1, (self.heads, self.nope + self.rope))
        n, parts = batch.num_decode, []
        if n:
            mix = partial(mla_decode, page_tables=batch.page_tables[:n], lengths=batch.lengths[:n])
            parts.append(self._absorbed(q[:n], latents, mix))
        if n < batch.lengths.shape[0]:
            expanded = use_triton("auto", q, self.nope, self.rope, self.value)
            parts.append(self.prefill(q[n:], batch, latents, expanded=expanded))
        y = parts[0] if len(parts) == 1 else torch.cat([*parts, q.new_empty(0, self.heads * self.value)])
        y = sigmoid_gate(y.to(x.dtype), gate) if self.gated else y.to(x.dtype)
        return self.mesh.sum_tp(self.o_proj(y)).to(x.dtype)

    def prefill(self, q: Tensor, batch: Batch, latents: Tensor, *, expanded: bool, held: int = EXPANDED) -> Tensor:
        """q [T, heads, nope + shared] of the rows of more than one token -> [T, heads * value].

        `expanded`: less arithmetic, and `held` values of memory at most (one head's at least).
        """
        n = batch.num_decode
        if expanded:
            return self._expanded(q, batch, latents, held)
        tables, lengths = batch.page_tables[n:], batch.lengths[n:]
        return self._absorbed(q, latents, partial(mla_prefill, page_tables=tables, cu_seqlens=batch.prefill_cu_seqlens, lengths=lengths))

    def _absorbed(self, q: Tensor, latents: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """q [T, heads, nope + shared] against the latents themselves, the expansion moved into query and output -> [T, heads * value]."""
        key, value = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent).split((self.nope, self.value), 1)
        absorbed = torch.einsum("thn,hnc->thc", q[..., : self.nope], key)
        query = torch.cat((absorbed, q[..., self.nope :]), -1)  # [T, heads, latent + shared key]
        mixed = attend(query, latents, value_dim=self.latent, scale=self.scale).to(q.dtype)  # [T, heads, latent]
        return torch.einsum("thc,hvc->thv", mixed, value).flatten(1)

    def _expanded(self, q: Tensor, batch: Batch, latents: Tensor, held: int) -> Tensor:
        """The same with keys and values expanded, for as many heads at a time as `held` allows."""
        size, tables = latents.shape[1], batch.page_tables[batch.num_decode :]
        rows = [latents[tables[i, : -(-n // size)]].flatten(0, 1)[:n] for i, n in enumerate(batch.prefill_lengths)]
        context = rows[0] if len(rows) == 1 else torch.cat(rows)  # [S, latent + shared key]
        each = self.nope + self.value
        heads = max(1, min(self.heads, held // (context.shape[0] * each)))
        out = q.new_empty(q.shape[0], self.heads, self.value)
        for first in range(0, self.heads, heads):
            own = slice(first, first + heads)
            weight = self.kv_b_proj.weight[first * each : (first + heads) * each]
            expanded = nn.functional.linear(context[:, : self.latent], weight).unflatten(1, (-1, each))
            bounds = (batch.prefill_cu_seqlens, batch.prefill_cu_lengths)
            out[:, own] = mla_prefill_expanded(q[:, own], expanded, context[:, self.latent :], *bounds, self.nope, self.scale)
        return out.flatten(1)
