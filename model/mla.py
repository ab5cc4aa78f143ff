"""The multi-head latent attention layer (NoPE, gated), in token order: project, cache the latent, attend absorbed, gate, project back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.mla import mla_decode, mla_prefill
from model.batch import Batch
from model.config import ModelConfig
from model.layers import Linear, RMSNorm
from model.parallel import Mesh


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
        self.splits = (config.q_lora_rank, self.latent, self.rope, self.heads * self.value)  # q_a | kv_a | shared key | g
        self.in_proj = Linear(config.hidden_size, sum(self.splits), dtype)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps, dtype)
        self.kv_a_layernorm = RMSNorm(self.latent, config.latent_norm_eps, dtype)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * (self.nope + self.rope), dtype)
        self.kv_b_proj = Linear(self.latent, self.heads * (self.nope + self.value), dtype)
        self.o_proj = Linear(self.heads * self.value, config.hidden_size, dtype)
        self.scale = (self.nope + self.rope) ** -0.5  # the unrotated shared dims count
        self.mesh = mesh

    def forward(self, x: Tensor, batch: Batch, latents: Tensor) -> Tensor:
        """x [T, hidden]; latents [pages, page_size, latent + shared key] of this layer: this step's are written, then attended."""
        q_a, kv_a, shared_key, gate = self.in_proj(x).split(self.splits, -1)
        latents.flatten(0, 1)[batch.latent_places] = torch.cat((self.kv_a_layernorm(kv_a), shared_key), -1).to(latents.dtype)
        q = self.q_b_proj(self.q_a_layernorm(q_a)).view(-1, self.heads, self.nope + self.rope)
        expand = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        key, value = expand.split((self.nope, self.value), 1)
        absorbed = torch.einsum("thn,hnc->thc", q[..., : self.nope], key)
        query = torch.cat((absorbed, q[..., self.nope :]), -1)  # [T, heads, latent + shared key]
        mixed = self._attend(query, batch, latents).to(x.dtype)  # [T, heads, latent]
        y = torch.einsum("thc,hvc->thv", mixed, value).flatten(1)
        y = (y.float() * torch.sigmoid(gate.float())).to(x.dtype)
        return self.mesh.sum_tp(self.o_proj(y)).to(x.dtype)

    def _attend(self, query: Tensor, batch: Batch, latents: Tensor) -> Tensor:
        n = batch.num_decode
        parts = []
        if n:
            parts.append(mla_decode(query[:n], latents, batch.page_tables[:n], batch.lengths[:n], self.latent, self.scale))
        if n < batch.lengths.shape[0]:
            tables, lengths = batch.page_tables[n:], batch.lengths[n:]
            parts.append(mla_prefill(query[n:], latents, tables, batch.prefill_cu_seqlens, lengths, self.latent, self.scale))
        return torch.cat(parts) if parts else query[..., : self.latent]
