"""One place of every layer into another, in Triton: a slot of a pool [layers, slots, ...] into contiguous memory, back, or into another."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(p_source, p_target, size, stride_source, stride_target, B: tl.constexpr):
    layer, o = tl.program_id(1).to(tl.int64), tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(p_source + layer * stride_source + o, mask=o < size, eviction_policy="evict_first")
    tl.store(p_target + layer * stride_target + o, value, mask=o < size)


def launch(source: Tensor, target: Tensor, block: int = 16384, num_warps: int = 8) -> None:
    """As `kernels.layers.copy_layers`, which has checked the shapes."""
    size = source[0].numel()
    _copy[(triton.cdiv(size, block), source.shape[0])](
        source, target, size, source.stride(0), target.stride(0), B=block, num_warps=num_warps
    )
