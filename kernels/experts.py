"""The packed MLPs of the local experts in the layout that the kernels stream (`pack_experts`, once at load).

The reference is `kernels.moe.grouped_experts` over the checkpoint's layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.checks import check_device, check_shape

if TYPE_CHECKING:
    from kernels.moe_triton import PackedExperts


def packed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    first_expert: int,
    num_experts: int,
    beta: float,
    linear_beta: float | None,
) -> Tensor:
    """The local experts' part of sum_e w_e W2_e situ(W1_e x, W3_e x): x [T, D], ids, weights [T, k] over all `num_experts` -> [T, D] fp32.

    w13 has 2F output rows (gate, then up) over D columns, w2 has D rows over F columns: experts first_expert ... first_expert + E - 1.
    bf16 x: products in bf16, sums in fp32, hidden and per-pair rows rounded to bf16.
    """
    from kernels.moe_triton import launch

    experts, blocks, twice, _ = w13.codes.shape
    check_shape("x", x, None, blocks * 64)
    check_shape("weights", weights, x.shape[0], None)
    check_shape("ids", ids, *weights.shape)
    check_shape("w2.codes", w2.codes, experts, twice // 2 // 64, x.shape[1], 32)
    check_device(x, ids=ids, weights=weights, w13=w13.codes, w2=w2.codes)
    return launch(x, ids, weights, w13, w2, first_expert, num_experts, beta, linear_beta)
