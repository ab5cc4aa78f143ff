"""Building blocks shared by the layer kinds: linear, norm, MLP, attention residual, vocabulary-parallel embedding and head.

Modules are built on the meta device and hold local shapes; `model.loader` assigns every parameter. Methods called `partial` return
this rank's addend of a sum over the TP group; the caller sums once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.attn_res_norm import attn_res_norm
from kernels.linear import linear
from kernels.moe import situ
from kernels.norms import rms_norm
from model.config import ModelConfig
from model.parallel import Mesh
from model.weights import split


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T, no bias; `weight` [out, in] of this rank."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Query(nn.Module):
    """The pseudo-query of an attention residual, stored as [1, hidden]."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(1, width, dtype=dtype)


def mix(blocks: Tensor, run: Tensor, added: Tensor | None, norm: RMSNorm | None, query: Query | None, out_norm: RMSNorm) -> Tensor:
    """What stands between two sub-layers: run += added in place, attention residual over sealed blocks [n, T, hidden] and run, RMSNorm.

    run, added [T, hidden] -> [T, hidden]. Without sealed blocks, or without norm and query, the mix is run itself.
    """
    if norm is None or query is None:  # an ordinary residual stream: nothing is mixed, so any weights will do
        weight = out_norm.weight
        return attn_res_norm(blocks[:0], run, added, weight, weight[None], weight, out_norm.eps)
    return attn_res_norm(blocks, run, added, norm.weight, query.weight, out_norm.weight, norm.eps)


class MLP(nn.Module):
    """down( situ( gate x, up x ) ), its width spread over the TP group."""

    def __init__(self, config: ModelConfig, width: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        start, stop = split(width, mesh.tp, mesh.tp_rank)
        self.gate_up_proj = Linear(config.hidden_size, 2 * (stop - start), dtype)
        self.down_proj = Linear(stop - start, config.hidden_size, dtype)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta

    def partial(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(situ(gate, up, self.beta, self.linear_beta))


class DenseMLP(MLP):
    """The feed-forward of the first layers. x [T, hidden] -> [T, hidden]."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__(config, config.intermediate_size, mesh, dtype)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return self.mesh.sum_tp(self.partial(x)).to(x.dtype)


class Embedding(nn.Module):
    """Token embedding, its rows spread over the TP group. No scaling, no position."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = split(config.vocab_size, mesh.tp, mesh.tp_rank)
        self.weight = parameter(self.last - self.first, config.hidden_size, dtype=dtype)
        self.mesh = mesh

    def forward(self, ids: Tensor) -> Tensor:
        if self.mesh.tp == 1:
            return nn.functional.embedding(ids, self.weight)
        elsewhere = (ids < self.first) | (ids >= self.last)
        rows = nn.functional.embedding((ids - self.first).masked_fill(elsewhere, 0), self.weight)
        return self.mesh.sum_tp(rows.masked_fill(elsewhere.unsqueeze(-1), 0)).to(self.weight.dtype)


class Head(nn.Module):
    """lm_head, its rows spread over the TP group: hidden [S, hidden] -> logits [S, vocab] fp32, on every rank of the group."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        ranges = [split(config.vocab_size, mesh.tp, i) for i in range(mesh.tp)]
        self.sizes = [stop - start for start, stop in ranges]
        self.weight = parameter(self.sizes[mesh.tp_rank], config.hidden_size, dtype=dtype)
        self.mesh = mesh

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mesh.gather_tp(linear(hidden, self.weight).float(), self.sizes)
