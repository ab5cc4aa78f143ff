"""Kimi K3's text decoder: embed -> layers with block attention residuals -> head.

There is no ordinary residual stream: a sub-layer reads a softmax-weighted mix of block sums and its output joins the running sum.
Kimi-Linear is the same decoder without blocks: then the running sum is the residual stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.batch import Batch
from model.config import ModelConfig
from model.kda import KDA
from model.layers import DenseMLP, Embedding, Head, Query, RMSNorm, mix
from model.mla import MLA
from model.moe import LatentMoE, PlainMoE
from model.parallel import Mesh
from model.state import StatePools


class Layer(nn.Module):
    """One decoder layer; the attributes carry the checkpoint's names."""

    def __init__(self, config: ModelConfig, layer: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        mixed = config.attn_res_block_size is not None
        self.self_attention_res_norm = RMSNorm(hidden, eps, dtype) if mixed else None
        self.self_attention_res_proj = Query(hidden, dtype) if mixed else None
        self.mlp_res_norm = RMSNorm(hidden, eps, dtype) if mixed else None
        self.mlp_res_proj = Query(hidden, dtype) if mixed else None
        self.starts_block = config.attn_res_block_size is not None and layer % config.attn_res_block_size == 0
        self.pool_index = (config.kda_layers if config.is_kda(layer) else config.mla_layers).index(layer)
        self.self_attn: KDA | MLA = KDA(config, mesh, dtype) if config.is_kda(layer) else MLA(config, mesh, dtype)
        if config.is_moe(layer):
            latent = config.routed_expert_hidden_size is not None
            self.block_sparse_moe: LatentMoE | PlainMoE = LatentMoE(config, mesh, dtype) if latent else PlainMoE(config, mesh, dtype)
        else:
            self.mlp = DenseMLP(config, mesh, dtype)

    def attend(self, x: Tensor, batch: Batch, pools: StatePools) -> Tensor:
        if isinstance(self.self_attn, KDA):
            return self.self_attn(x, batch, pools.kda[self.pool_index], pools.conv[self.pool_index])
        return self.self_attn(x, batch, pools.latents[self.pool_index])

    def feed_forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.block_sparse_moe(x, batch.counts) if hasattr(self, "block_sparse_moe") else self.mlp(x)


class KimiK3(nn.Module):
    """The part of K3 that one process holds. Built on the meta device; `model.loader.load` gives it weights."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = Embedding(config, mesh, dtype)
        self.layers = nn.ModuleList(Layer(config, l, mesh, dtype) for l in range(config.num_layers))
        block = config.attn_res_block_size
        self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype) if block else None
        self.output_attn_res_proj = Query(config.hidden_size, dtype) if block else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.blocks = -(-config.num_layers // block) if block else 0
        self.lm_head = Head(config, mesh, dtype)

    def forward(self, batch: Batch, pools: StatePools) -> Tensor:
        """Advance every row of the batch -> logits [S, vocab] fp32 of the tokens in `batch.logits`; pools are updated in place."""
        run = self.embed_tokens(batch.ids)  # [T, hidden]: the running sum
        added: Tensor | None = None  # the last sub-layer's output, not in `run` yet
        blocks = run.new_empty(self.blocks, *run.shape)  # sealed block sums, the first n of them
        n = 0
        for layer in self.layers:
            assert isinstance(layer, Layer)
            # The first layer of a block reads the finished sum once more and then seals it; block 0 is the embedding alone.
            x = mix(blocks[:n], run, added, layer.self_attention_res_norm, layer.self_attention_res_proj, layer.input_layernorm)
            added = layer.attend(x, batch, pools)
            if layer.starts_block:
                blocks[n] = run
                n += 1
                run, added = added, None
            x = mix(blocks[:n], run, added, layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm)
            added = layer.feed_forward(x, batch)
        if batch.logits.shape[0] == 0:
            return run.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        wanted = batch.logits
        last = None if added is None else added[wanted]
        x = mix(blocks[:n, wanted], run[wanted], last, self.output_attn_res_norm, self.output_attn_res_proj, self.norm)
        return self.lm_head(x)
