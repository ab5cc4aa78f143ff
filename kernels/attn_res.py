"""Block Attention Residuals: the input of a sub-layer is a softmax-weighted mix of block sums.

Per token, over n sources s_i: score_i = sum_d s_i[d] * r_i * norm[d] * query[d], r_i = 1 / rms(s_i); out = sum_i softmax(score)_i * s_i.
The values are the raw sources; no 1/sqrt(D). All in fp32. Source: facts on K3's architecture, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_shape


def attn_res(blocks: Tensor, run: Tensor, norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """blocks [n, T, D] sealed block sums, run [T, D] the running sum (last source), norm [D], query [1, D] -> [T, D] in run's dtype."""
    check_shape("blocks", blocks, None, *run.shape)
    check_shape("norm", norm, run.shape[-1])
    check_shape("query", query, 1, run.shape[-1])
    sources = torch.cat((blocks, run.unsqueeze(0))).float()  # [n + 1, T, D]
    inverse_rms = torch.rsqrt(sources.square().mean(-1) + eps)
    scores = (sources @ (norm.float() * query[0].float())) * inverse_rms  # [n + 1, T]
    alpha = torch.softmax(scores, 0)
    return (alpha.unsqueeze(-1) * sources).sum(0).to(run.dtype)
