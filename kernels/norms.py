"""RMSNorm, statistics in fp32: y = x / sqrt(mean(x^2) + eps) * weight. Plain weight (no +1), no bias.

Source: facts on K3's architecture, section 5 (Moonshot's modelling code and vLLM agree up to bf16 rounding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import Backend, use_triton
from kernels.checks import check_shape


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: Backend = "auto", dtype: torch.dtype | None = None) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in `dtype`, None: x's."""
    check_shape("weight", weight, x.shape[-1])
    if use_triton(backend, x):
        from kernels import rows_triton

        return rows_triton.rms_norm(x, weight, eps, dtype or x.dtype)
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(dtype or x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, backend: Backend = "auto") -> Tensor:
    """KDA's output: RMSNorm over one head's channels first, then * sigmoid(gate).

    x [T, heads, D], gate [T, heads, D], weight [D] -> [T, heads, D] in gate's dtype.
    """
    check_shape("gate", gate, *x.shape)
    check_shape("weight", weight, x.shape[-1])
    if use_triton(backend, x, x.shape[-1]):
        from kernels import rows_triton

        return rows_triton.gated_rms_norm(x, gate, weight, eps)
    y = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (y * torch.sigmoid(gate.float())).to(gate.dtype)


def sigmoid_gate(y: Tensor, gate: Tensor, backend: Backend = "auto") -> Tensor:
    """MLA's output gate: y * sigmoid(gate), [T, C] each, in y's dtype."""
    check_shape("gate", gate, *y.shape)
    if use_triton(backend, y):
        from kernels import rows_triton

        return rows_triton.sigmoid_gate(y, gate)
    return (y.float() * torch.sigmoid(gate.float())).to(y.dtype)
