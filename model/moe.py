"""The mixtures of experts, in token order. K3: route, project down, local experts over all tokens, sum over ranks, norm, project up, add
the shared MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.backend import Backend, use_triton
from kernels.experts import PackedExperts, pack_experts, packable, packed_experts
from kernels.moe import grouped_experts, plain_experts, route
from kernels.norms import rms_norm
from model.config import ModelConfig
from model.config_reader import MX_BLOCK
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
        fused = use_triton("auto", x)
        if fused:  # products of bf16 values are exact in fp32
            logits = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            logits = nn.functional.linear(x.float(), self.weight.float())
        backend: Backend = "triton" if fused else "torch"
        return route(logits, self.e_score_correction_bias, self.top_k, self.renormalise, self.factor, backend)


class LatentMoE(nn.Module):
    """The routed experts of this rank (packed MXFP4) and its part of the shared MLP."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        latent, width = config.expert_width, config.moe_intermediate_size
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
        self.num_experts = config.num_experts
        self.packed = False
        self.mesh = mesh

    def pack(self) -> None:
        """Lays the experts out for the kernel where that runs, in place of the checkpoint's layout. Once, after the weights are there."""
        if self.w13_packed.is_cuda and self.routed_expert_norm.weight.dtype == torch.bfloat16 and packable(self.w13_packed, self.w2_packed):
            self._lay_out("w13", gated=True)
            self._lay_out("w2", gated=False)
            self.packed = True

    def _lay_out(self, name: str, *, gated: bool) -> None:
        stored = self.get_parameter(f"{name}_packed"), self.get_parameter(f"{name}_scale")
        laid = pack_experts(*stored, gated)
        delattr(self, f"{name}_packed")
        delattr(self, f"{name}_scale")
        self.register_parameter(f"{name}_codes", nn.Parameter(laid.codes, requires_grad=False))
        self.register_parameter(f"{name}_scales", nn.Parameter(laid.scales, requires_grad=False))

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """x [own tokens, hidden]; counts: tokens of every data-parallel group -> [own tokens, hidden]."""
        ids, weights = self.gate(x)
        z, ids, weights = self.mesh.gather_groups((self.routed_expert_down_proj(x), ids, weights), counts)
        # The sum over ranks comes before the norm: the norm is of the combined latent.
        combined = self.mesh.sum_experts(self._experts(z, ids, weights), counts)
        norm = self.routed_expert_norm
        y = rms_norm(combined, norm.weight, norm.eps, "triton" if use_triton("auto", x) else "torch", x.dtype)
        y, shared = self.routed_expert_up_proj(y[:, slice(*self.columns)]), self.shared_experts.partial(x)
        if self.mesh.tp == 1:
            return y + shared
        return self.mesh.sum_tp(y.float() + shared.float()).to(x.dtype)

    def _experts(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's addend [T, latent], fp32."""
        if self.packed:
            assert self.beta is not None
            w13, w2 = (PackedExperts(self.get_parameter(f"{n}_codes"), self.get_parameter(f"{n}_scales")) for n in ("w13", "w2"))
            return packed_experts(z, ids, weights, w13, w2, self.first_expert, self.num_experts, self.beta, self.linear_beta)
        stored = (self.w13_packed, self.w13_scale, self.w2_packed, self.w2_scale)
        return grouped_experts(z, ids, weights, *stored, self.first_expert, self.beta, self.linear_beta)


class PlainMoE(nn.Module):
    """Kimi-Linear's: routed experts of the full width, not packed, and nothing between their sum and the shared MLP's."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.first_expert, last = mesh.shard.experts(config)
        experts, width, inner = last - self.first_expert, config.expert_width, config.moe_intermediate_size
        self.gate = Router(config, dtype)
        self.w13 = parameter(experts, 2 * inner, width, dtype=dtype)
        self.w2 = parameter(experts, width, inner, dtype=dtype)
        self.shared_experts = MLP(config, config.shared_intermediate_size, mesh, dtype)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta
        self.mesh = mesh

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """As `LatentMoE.forward`."""
        z, ids, weights = self.mesh.gather_groups((x, *self.gate(x)), counts)
        partial = plain_experts(z, ids, weights, self.w13, self.w2, self.first_expert, self.beta, self.linear_beta)
        shared = self.mesh.sum_tp(self.shared_experts.partial(x))
        return (self.mesh.sum_experts(partial, counts) + shared.float()).to(x.dtype)
