"""The KDA decode step as one Triton kernel: a program owns one head of one sequence, its state tile stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import held_whole
from kernels.target import is_amd

WIDTH = 4  # taps of K3's short convolution
FEW = 264  # programs: up to two a multiprocessor, the registers of each may be many
REGISTERS = 168  # three programs a multiprocessor at the price of a small spill: 3 % faster from there on (docs/log.md)


@triton.jit
def _convolve(x, x1, x2, x3, p_w):
    """silu of the four taps at p_w; x is the newest input, x3 the oldest. -> as x, fp32"""
    y = tl.load(p_w) * x3 + tl.load(p_w + 1) * x2 + tl.load(p_w + 2) * x1 + tl.load(p_w + 3) * x
    return y * tl.sigmoid(y)


@triton.jit
def _sweep(b_s, q, k, v, decay, beta, kq):
    """One token through state columns b_s [K, V']: (the new columns, o [V']). o = (S + beta k e^T)^T q, so that they are swept once."""
    b_s = b_s * decay[:, None]
    error = v - tl.sum(b_s * k[:, None], 0)  # [V']
    o = tl.sum(b_s * q[:, None], 0) + (beta * kq) * error
    return b_s + (beta * k)[:, None] * error[None, :], o


@triton.jit
def _kda_step(
    p_qkv,
    p_f,
    p_b,
    p_gate,
    p_conv_weight,
    p_a_log,
    p_dt_bias,
    p_norm_weight,
    p_conv_state,
    p_state,
    p_read,
    p_write,
    p_y,
    stride_qkv,
    stride_f,
    stride_b,
    stride_gate,
    stride_conv_slot,
    stride_conv_row,
    stride_state_slot,
    lower_bound,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
):
    # The value channels are worked on in two halves, one after the other: half a tile of registers lets twice the programs hide latency.
    # Vectors are [D, 2] (q and k) and [V / 2, 2] (the halves): loads as large as the block are converted between layouts, smaller ones
    # would be issued again for every layout.
    HALF: tl.constexpr = D // 2
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_half, o_2 = tl.arange(0, D), tl.arange(0, HALF), tl.arange(0, 2)
    c_qk = (o_2[None, :] * H + i_h) * D + o_k[:, None]  # channels of q | k | v
    o_v = o_2[None, :] * HALF + o_half[:, None]  # [V / 2, 2]
    c_v = (2 * H + i_h) * D + o_v

    read = tl.load(p_read + i_n).to(tl.int64)
    old_qk = tl.full((D, 1), read, tl.int64) >= 0
    old_v = tl.full((HALF, 1), read, tl.int64) >= 0
    tile = i_h * D * D + o_k[:, None] * D + o_half[None, :]
    p_old = p_state + read * stride_state_slot + tile
    b_left = tl.load(p_old, mask=old_qk, other=0.0)  # [K, V / 2] fp32

    p_past = p_conv_state + read * stride_conv_slot
    qk3 = tl.load(p_past + c_qk, mask=old_qk, other=0.0).to(tl.float32)
    v3 = tl.load(p_past + c_v, mask=old_v, other=0.0).to(tl.float32)
    p_past += stride_conv_row
    qk2 = tl.load(p_past + c_qk, mask=old_qk, other=0.0).to(tl.float32)
    v2 = tl.load(p_past + c_v, mask=old_v, other=0.0).to(tl.float32)
    p_past += stride_conv_row
    qk1 = tl.load(p_past + c_qk, mask=old_qk, other=0.0).to(tl.float32)
    v1 = tl.load(p_past + c_v, mask=old_v, other=0.0).to(tl.float32)

    scale = tl.exp(tl.load(p_a_log + i_h))
    dt_bias = tl.load(p_dt_bias + i_h * D + o_k)
    norm_weight = tl.load(p_norm_weight + o_v)
    dtype = p_conv_state.dtype.element_ty

    for s in tl.static_range(S):
        t = i_n * S + s
        qk0 = tl.load(p_qkv + t * stride_qkv + c_qk).to(tl.float32)
        v0 = tl.load(p_qkv + t * stride_qkv + c_v).to(tl.float32)
        f = tl.load(p_f + t * stride_f + i_h * D + o_k).to(tl.float32)
        beta = tl.sigmoid(tl.load(p_b + t * stride_b + i_h).to(tl.float32))
        gate = tl.load(p_gate + t * stride_gate + i_h * D + o_v).to(tl.float32)
        write = tl.load(p_write + t).to(tl.int64)
        keep_qk = tl.full((D, 1), write, tl.int64) >= 0
        keep_v = tl.full((HALF, 1), write, tl.int64) >= 0

        qk = _convolve(qk0, qk1, qk2, qk3, p_conv_weight + c_qk * 4)
        v_left, v_right = tl.split(_convolve(v0, v1, v2, v3, p_conv_weight + c_v * 4))
        q, k = tl.split(qk * tl.rsqrt(tl.sum(qk * qk, 0) + 1e-6)[None, :])
        q = q * (D**-0.5)
        decay = tl.exp(lower_bound * tl.sigmoid(scale * (f + dt_bias)))
        kq = tl.sum(k * q)

        p_s = p_state + write * stride_state_slot + tile
        b_left, o_left = _sweep(b_left, q, k, v_left, decay, beta, kq)
        tl.store(p_s, b_left, mask=keep_qk)
        if s == 0:
            b_right = tl.load(p_old + HALF, mask=old_qk, other=0.0)
        b_right, o_right = _sweep(b_right, q, k, v_right, decay, beta, kq)
        tl.store(p_s + HALF, b_right, mask=keep_qk)

        o = tl.join(o_left, o_right)  # [V / 2, 2]
        y = o * tl.rsqrt(tl.sum(o * o) / D + eps) * norm_weight * tl.sigmoid(gate)
        tl.store(p_y + t * (H * D) + i_h * D + o_v, y.to(p_y.dtype.element_ty))

        p_past = p_conv_state + write * stride_conv_slot
        tl.store(p_past + c_qk, qk2.to(dtype), mask=keep_qk)
        tl.store(p_past + c_v, v2.to(dtype), mask=keep_v)
        p_past += stride_conv_row
        tl.store(p_past + c_qk, qk1.to(dtype), mask=keep_qk)
        tl.store(p_past + c_v, v1.to(dtype), mask=keep_v)
        p_past += stride_conv_row
        tl.store(p_past + c_qk, qk0.to(dtype), mask=keep_qk)
        tl.store(p_past + c_v, v0.to(dtype), mask=keep_v)
        qk3, qk2, qk1 = qk2, qk1, qk0
        v3, v2, v1 = v2, v1, v0


def launch(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    lower_bound: float,
    eps: float,
    num_warps: int = 4,
    registers: int | None = None,
) -> Tensor:
    """As `kernels.kda_step.kda_step`, which has checked the shapes. Raises `ValueError` for what this kernel does not cover."""
    (sequences, steps), heads, width = write_slots.shape, a_log.shape[0], norm_weight.shape[0]
    if not held_whole(width):
        raise ValueError(f"norm_weight: head width {width}, expected a power of two from 16")
    if conv_weight.shape[-1] != WIDTH:
        raise ValueError(f"conv_weight: {conv_weight.shape[-1]} taps, expected {WIDTH}")
    for name, tensor in {"qkv": qkv, "f": f, "b": b, "gate": gate, "conv_state": conv_state}.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: stride {tensor.stride(-1)} along its last axis, expected 1")
    if not state[0].is_contiguous() or not write_slots.is_contiguous():
        raise ValueError("state: expected contiguous slots, and write_slots contiguous")
    if registers is None and steps == 1 and heads * sequences > FEW and not is_amd():
        registers = REGISTERS
    y = torch.empty(sequences * steps, heads * width, dtype=qkv.dtype, device=qkv.device)
    if sequences * steps:
        _kda_step[(heads, sequences)](
            qkv,
            f,
            b,
            gate,
            conv_weight,
            a_log,
            dt_bias,
            norm_weight,
            conv_state,
            state,
            read_slots,
            write_slots,
            y,
            qkv.stride(0),
            f.stride(0),
            b.stride(0),
            gate.stride(0),
            conv_state.stride(0),
            conv_state.stride(1),
            state.stride(0),
            lower_bound,
            eps,
            H=heads,
            D=width,
            S=steps,
            num_warps=num_warps,
            **({} if registers is None else {"maxnreg": registers}),
        )
    return y
