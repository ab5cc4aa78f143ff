"""LatentMoE, in token order: route, project down, local experts over all tokens, sum over ranks, norm, project up, add the shared MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.moe import grouped_experts, route
from model.config import MX_BLOCK, ModelConfig
from model.layers import MLP, Linear, RMSNorm, parameter
from model.parallel import Mesh
from model.weights import split


class Router(nn.Module):
    """x [T, hidden] -> (expert ids [T, k] int32, weights [T, k] fp32); products in fp32."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(config.num_experts, config.hidden_size, dtype=dtype)
        self.e_score_correction_bias = parameter(config.num_experts, dtype=torch.float32)
        self.top_k, self.renormalise, self.factor = config.num_experts_per_token, config.moe_renormalize, config.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = nn.functional.linear(x.float(), self.weight.float())
        return route(logits, self.e_score_correction_bias, self.top_k, self.renormalise, self.factor)


class LatentMoE(nn.Module):
    """The routed experts of this rank (packed MXFP4) and its part of the shared MLP."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.first_expert, last = mesh.shard.experts(config)
        experts = last - self.first_expert
        self.columns = split(latent, mesh.tp, mesh.tp_rank)
        self.gate = Router(config, dtype)
        self.routed_expert_down_proj = Linear(config.hidden_size, latent, dtype)
        self.w13_packed = parameter(experts, 2 * width, latent // 2, dtype=torch.uint8)
        self.w13_scale = parameter(experts, 2 * width, latent // MX_BLOCK, dtype=torch.uint8)
        self.w2_packed = parameter(experts, latent, width // 2, dtype=torch.uint8)
        self.w2_scale = parameter(experts, latent, width // MX_BLOCK, dtype=torch.uint8)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype)
        self.routed_expert_up_proj = Linear(self.columns[1] - self.columns[0], config.hidden_size, dtype)
        self.shared_experts = MLP(config, config.shared_intermediate_size, mesh, dtype)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.mesh = mesh

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """x [own tokens, hidden]; counts: tokens of every data-parallel group -> [own tokens, hidden]."""
        ids, weights = self.gate(x)
        z, ids, weights = self.mesh.gather_groups((self.routed_expert_down_proj(x), ids, weights), counts)
        partial = grouped_experts(
            z,
            ids,
            weights,
            self.w13_packed,
            self.w13_scale,
            self.w2_packed,
            self.w2_scale,
            self.first_expert,
            self.beta,
            self.linear_beta,
        )
        # The sum over ranks comes before the norm: the norm is of the combined latent.
        y = self.routed_expert_norm(self.mesh.sum_experts(partial, counts)).to(x.dtype)
        y = self.routed_expert_up_proj(y[:, slice(*self.columns)]).float() + self.shared_experts.partial(x).float()
        return self.mesh.sum_tp(y).to(x.dtype)
