"""RMSNorm, statistics in fp32: y = x / sqrt(mean(x^2) + eps) * weight. Plain weight (no +1), no bias.

Source: facts on K3's architecture, section 5 (Moonshot's modelling code and vLLM agree up to bf16 rounding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in x's dtype."""
    check_shape("weight", weight, x.shape[-1])
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA's output: RMSNorm over one head's channels first, then * sigmoid(gate).

    x [T, heads, D] fp32, gate [T, heads, D], weight [D] -> [T, heads, D] in gate's dtype.
    """
    check_shape("gate", gate, *x.shape)
    check_shape("weight", weight, x.shape[-1])
    y = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    return (y * torch.sigmoid(gate.float())).to(gate.dtype)
