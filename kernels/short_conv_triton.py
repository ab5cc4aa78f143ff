"""The short convolution of whole prompts in Triton. As `kernels.short_conv.short_conv`, but y is in x's dtype.

A program does BT tokens of one sequence for BC channels, one after the other, so that each input is read once; those before its first
come from x or, at a sequence's start, from the state. The states are written by a second launch, after every read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _input(p_x, p_state, t, begin, read, c, m, stride_x, stride_slot, C, W: tl.constexpr):
    """x at tokens t [B, 1] for channels c; before `begin` from the slot's columns (read -1: zeros)."""
    new = tl.load(p_x + t.to(tl.int64) * stride_x + c, mask=m & (t >= begin), other=0.0).to(tl.float32)
    p_old = p_state + read * stride_slot + (t - begin + W - 1) * C + c
    return new + tl.load(p_old, mask=m & (t < begin) & (t >= begin - W + 1) & (read + t * 0 >= 0), other=0.0).to(tl.float32)


@triton.jit
def _short_conv(
    p_x,
    p_weight,
    p_state,
    p_read,
    p_cu_seqlens,
    p_y,
    N,
    C,
    stride_x,
    stride_slot,
    NP: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    o_n = tl.arange(0, NP)
    starts = tl.load(p_cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int32)
    ends = tl.load(p_cu_seqlens + o_n + 1, mask=o_n < N, other=0).to(tl.int32)
    upto = tl.cumsum((ends - starts + BT - 1) // BT, 0)
    i = tl.program_id(1)
    i_n = tl.sum(tl.where(upto <= i, 1, 0))
    if i_n >= N:
        return
    before = tl.max(tl.where(o_n < i_n, upto, 0))
    begin = tl.sum(tl.where(o_n == i_n, starts, 0))
    end = tl.sum(tl.where(o_n == i_n, ends, 0))
    t = begin + (i - before) * BT
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    m_c = c < C
    row = tl.zeros((1, BC), tl.int32)
    read = tl.load(p_read + i_n).to(tl.int64)
    w0 = tl.load(p_weight + c * 4, mask=m_c, other=0.0).to(tl.float32)
    w1 = tl.load(p_weight + c * 4 + 1, mask=m_c, other=0.0).to(tl.float32)
    w2 = tl.load(p_weight + c * 4 + 2, mask=m_c, other=0.0).to(tl.float32)
    w3 = tl.load(p_weight + c * 4 + 3, mask=m_c, other=0.0).to(tl.float32)
    x0 = _input(p_x, p_state, row + t - 3, begin, read, c, m_c, stride_x, stride_slot, C, 4)
    x1 = _input(p_x, p_state, row + t - 2, begin, read, c, m_c, stride_x, stride_slot, C, 4)
    x2 = _input(p_x, p_state, row + t - 1, begin, read, c, m_c, stride_x, stride_slot, C, 4)
    for j in tl.static_range(BT):
        m = m_c & (row + t + j < end)
        at = (t + j).to(tl.int64)
        x3 = tl.load(p_x + at * stride_x + c, mask=m, other=0.0).to(tl.float32)
        y = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        tl.store(p_y + at * C + c, (y * tl.sigmoid(y)).to(p_y.dtype.element_ty), mask=m)
        x0, x1, x2 = x1, x2, x3


@triton.jit
def _last_inputs(
    p_x, p_state, p_read, p_write, p_cu_seqlens, C, stride_x, stride_slot, W: tl.constexpr, WP: tl.constexpr, BC: tl.constexpr
):
    """The last W - 1 inputs of a sequence into its slot, oldest first."""
    i_n = tl.program_id(1)
    begin, end = tl.load(p_cu_seqlens + i_n).to(tl.int32), tl.load(p_cu_seqlens + i_n + 1).to(tl.int32)
    read, write = tl.load(p_read + i_n).to(tl.int64), tl.load(p_write + i_n).to(tl.int64)
    o_w = tl.arange(0, WP)[:, None]
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    m = (o_w < W - 1) & (c < C)
    x = _input(p_x, p_state, end - (W - 1) + o_w, begin, read, c, m, stride_x, stride_slot, C, W)
    tl.store(p_state + write * stride_slot + o_w * C + c, x.to(p_state.dtype.element_ty), mask=m)


def launch(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    cu_seqlens: Tensor,
    block: tuple[int, int] = (32, 1024),
    num_warps: int = 8,
) -> Tensor:
    """As `kernels.short_conv.short_conv`, which has checked the shapes; y is in x's dtype.

    No sequence may write a slot that another one reads.
    """
    (tokens, channels), width, sequences = x.shape, weight.shape[-1], cu_seqlens.shape[0] - 1
    if width != 4:
        raise ValueError(f"weight: {width} taps, expected 4")
    if x.stride(1) != 1 or not state[0].is_contiguous():
        raise ValueError("x needs rows without gaps, state contiguous slots")
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not sequences:
        return y
    bt, bc = block
    columns = triton.cdiv(channels, bc)
    sizes = (channels, x.stride(0), state.stride(0))
    _short_conv[(columns, tokens // bt + sequences)](
        x,
        weight,
        state,
        read_slots,
        cu_seqlens,
        y,
        sequences,
        *sizes,
        NP=triton.next_power_of_2(sequences),
        BT=bt,
        BC=bc,
        num_warps=num_warps,
    )
    _last_inputs[(columns, sequences)](
        x, state, read_slots, write_slots, cu_seqlens, *sizes, W=width, WP=triton.next_power_of_2(width - 1), BC=bc
    )
    return y
