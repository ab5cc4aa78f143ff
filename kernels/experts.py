"""The packed MLPs of the local experts in the layout that the kernels stream (`pack_experts`, once at load).

The reference is `kernels.moe.grouped_experts` over the checkpoint's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_device, check_shape

GROUP = 128  # input columns whose four scale bytes are one word; an iteration of the product


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One projection of E experts, laid out for `_experts`: what one iteration reads of a block of rows is contiguous.

    codes [E, in / 64, out, 16] int16: word j holds columns j, 16 + j, 32 + j, 48 + j of its 64, their bits placed so that one shift and
    one mask make a bf16 of each (`_EXPAND`); scales [E, in / 128, out] int32: byte i, less 126, is the scale byte of columns 32 i ...
    A gated projection has its rows in groups of 16: eight of the gate, then the eight of up that belong to them.
    """

    codes: Tensor
    scales: Tensor


def packable(w13: Tensor, w2: Tensor) -> bool:
    """Whether the widths of a checkpoint's packed [E, out, in / 2] are what `pack_experts` takes."""
    return all(2 * half % GROUP == 0 and out % 64 == 0 for _, out, half in (w13.shape, w2.shape))


def pack_experts(packed: Tensor, scale: Tensor, gated: bool) -> PackedExperts:
    """A checkpoint's packed [E, out, in / 2] and scale [E, out, in / 32] -> the kernels' layout; once, at load.

    gated: the first half of the rows are the gate's, the second up's. Raises `ValueError` for widths that do not divide and for scale
    bytes above 128 (weights above 12), whose expansion would leave bf16's range.
    """
    experts, out, half = packed.shape
    check_shape("scale", scale, experts, out, half // 16)
    if 2 * half % GROUP or out % 64:
        raise ValueError(f"packed: {out} rows of {2 * half} columns, expected multiples of 64 and {GROUP}")
    if scale.numel() and int(scale.max()) > 128:
        raise ValueError(f"scale: byte {int(scale.max())}, expected at most 128")

    def ordered(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (2, out // 16, 8)).transpose(0, 1).flatten(0, 2) if gated else rows

    codes = torch.empty(experts, half // 32, out, 16, dtype=torch.int16, device=packed.device)
    scales = torch.empty(experts, half // 64, out, dtype=torch.int32, device=packed.device)
    for e in range(experts):  # one at a time: the unpacked codes are eight times the size
        rows = ordered(packed[e]).int()
        code = torch.stack((rows & 15, rows >> 4), -1).view(out, half // 32, 4, 16)
        sign, size = code >> 3, code & 7
        words = sign[:, :, 0] << 15 | size[:, :, 0] << 6 | sign[:, :, 1] << 12 | size[:, :, 1] << 3 | sign[:, :, 2] << 9 | size[:, :, 2]
        words = words | sign[:, :, 3] << 14 | (size[:, :, 3] >> 2) << 13 | (size[:, :, 3] & 3) << 10
        codes[e] = words.to(torch.int16).transpose(0, 1)
        scales[e] = (ordered(scale[e]) + 126).contiguous().view(torch.int32).T
    return PackedExperts(codes, scales)


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
    from kernels.experts_triton import launch

    experts, blocks, twice, _ = w13.codes.shape
    check_shape("x", x, None, blocks * 64)
    check_shape("weights", weights, x.shape[0], None)
    check_shape("ids", ids, *weights.shape)
    check_shape("w2.codes", w2.codes, experts, twice // 2 // 64, x.shape[1], 16)
    check_device(x, ids=ids, weights=weights, w13=w13.codes, w2=w2.codes)
    return launch(x, ids, weights, w13, w2, first_expert, num_experts, beta, linear_beta)
