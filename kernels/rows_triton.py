"""What is done to rows between the large products, each in one launch: RMSNorm, KDA's gated output norm, SiTU, the sigmoid gate.

As `kernels.norms.rms_norm`, `kernels.norms.gated_rms_norm`, `kernels.moe.situ` and `kernels.norms.sigmoid_gate`, which have checked the
shapes. Sums and functions are in fp32; rows may lie apart, elements of a row may not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # of an element-wise program


@triton.jit
def _rms_norm(p_x, p_weight, p_y, eps, stride_x, D: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, B)
    m = o < D
    x = tl.load(p_x + row * stride_x + o, mask=m, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / D + eps) * tl.load(p_weight + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_y + row * D + o, y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def _gated_heads(p_x, p_weight, p_gate, p_y, eps, stride_gate, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr):
    """BH heads of one token: x [T, H, D] without gaps, gate rows of H * D."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    o = h[:, None] * D + tl.arange(0, D)[None, :]
    m = (h < H)[:, None]
    x = tl.load(p_x + t * H * D + o, mask=m, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * tl.load(p_weight + tl.arange(0, D)).to(tl.float32)[None, :]
    y *= tl.sigmoid(tl.load(p_gate + t * stride_gate + o, mask=m, other=0.0).to(tl.float32))
    tl.store(p_y + t * H * D + o, y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _gate(p_a, p_b, p_y, beta, linear_beta, stride_a, stride_b, C, SITU: tl.constexpr, LIMITED: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * B + tl.arange(0, B)
    m = o < C
    a = tl.load(p_a + row * stride_a + o, mask=m, other=0.0).to(tl.float32)
    b = tl.load(p_b + row * stride_b + o, mask=m, other=0.0).to(tl.float32)
    if SITU:  # a: the gate
        if LIMITED:
            b = linear_beta * _tanh(b / linear_beta)
        y = beta * _tanh(a / beta) * tl.sigmoid(a) * b
    else:
        y = a * tl.sigmoid(b)
    tl.store(p_y + row * C + o, y.to(p_y.dtype.element_ty), mask=m)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    rows = x.flatten(0, -2)
    _check(rows)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    width = x.shape[-1]
    if rows.shape[0]:
        block = triton.next_power_of_2(width)
        warps = 8 if block >= 4096 else 4
        _rms_norm[(rows.shape[0],)](rows, weight, y, eps, rows.stride(0), D=width, B=block, num_warps=warps)
    return y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, heads_each: int = 16) -> Tensor:
    tokens, heads, width = x.shape
    y = torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    if not x.is_contiguous() or gate.stride(2) != 1 or gate.stride(1) != width:
        raise ValueError("x needs contiguous memory, gate heads without gaps")
    if tokens:
        each = min(heads_each, triton.next_power_of_2(heads))
        grid = (tokens, triton.cdiv(heads, each))
        _gated_heads[grid](x, weight, gate, y, eps, gate.stride(0), H=heads, D=width, BH=each, num_warps=4)
    return y


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    return _elementwise(gate, up, beta, linear_beta, True)


def sigmoid_gate(y: Tensor, gate: Tensor) -> Tensor:
    return _elementwise(y, gate, 1.0, None, False)


def _elementwise(a: Tensor, b: Tensor, beta: float, linear_beta: float | None, situ: bool) -> Tensor:
    _check(a, b)
    rows, columns = a.shape
    y = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    if a.numel():
        block = min(COLUMNS, triton.next_power_of_2(columns))
        limits = (beta, linear_beta or 1.0)
        grid = (rows, triton.cdiv(columns, block))
        _gate[grid](a, b, y, *limits, a.stride(0), b.stride(0), columns, SITU=situ, LIMITED=linear_beta is not None, B=block, num_warps=4)
    return y


def _check(*rows: Tensor) -> None:
    for x in rows:
        if x.ndim != 2 or x.stride(1) != 1:
            raise ValueError(f"rows: shape {list(x.shape)}, strides {x.stride()}, expected [rows, columns] without gaps in a row")
