"""One row times a weight matrix in Triton: bound by the weights' bytes, which matrix units would only wait for.

As `kernels.linear.linear`. A program has BN outputs; each thread keeps its own partial sums over the inputs, added up once at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _linear(p_x, p_weight, p_y, N, K, stride_w, BN: tl.constexpr, BK: tl.constexpr):
    o_n, o_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    p_w = p_weight + o_n.to(tl.int64)[:, None] * stride_w + o_k[None, :]
    here = (o_n < N)[:, None]
    acc = tl.zeros((BN, BK), tl.float32)
    for k in range(0, K, BK):
        inside = (k + o_k < K)[None, :]
        w = tl.load(p_w + k, mask=here & inside, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * tl.load(p_x + k + o_k, mask=k + o_k < K, other=0.0).to(tl.float32)[None, :]
    tl.store(p_y + o_n, tl.sum(acc, 1).to(p_y.dtype.element_ty), mask=o_n < N)


def launch(x: Tensor, weight: Tensor, block: tuple[int, int] = (4, 1024), num_warps: int = 2) -> Tensor:
    """As `kernels.linear.linear`, which has checked the shapes: x [1, K], weight [N, K] -> [1, N]."""
    outputs, inputs = weight.shape
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("x and weight need rows without gaps")
    y = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    bn, bk = block
    _linear[(triton.cdiv(outputs, bn),)](x, weight, y, outputs, inputs, weight.stride(0), BN=bn, BK=bk, num_warps=num_warps)
    return y
