"""MLA decode in Triton: absorbed, paged, split over length. As `kernels.mla.mla_decode`, output in the query's dtype.

A program reads a stretch of one sequence's latents for BH heads; each latent tile serves as keys (whole) and values (first part). The
stretches' results are merged by a second launch. Source: DeepSeek-V2 (arXiv 2405.04434); flash-decoding's split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import held_whole
from kernels.target import fitting_stages, fp32_precision, is_amd

LOG2_E = 1.4426950408889634
PROGRAMS = 264  # enough to fill an H200 twice


@triton.jit
def _decode(
    p_query,
    p_latents,
    p_tables,
    p_lengths,
    p_out,
    p_lse,
    scale,
    stride_query_n,
    stride_query_h,
    stride_table,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Partial out [N, SPLITS, H, V] fp32 and log2 of the sums of exponentials [N, SPLITS, H]; V + R is a latent's width."""
    i_h, i_s, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(p_lengths + i_n).to(tl.int32)
    each = tl.cdiv(tl.cdiv(length, SPLITS), BS) * BS
    first = i_s * each
    last = tl.minimum(first + each, length)
    o_h, o_v, o_r, o_s = i_h * BH + tl.arange(0, BH), tl.arange(0, V), tl.arange(0, R), tl.arange(0, BS)
    m_h = o_h < H
    p_q = p_query + i_n * stride_query_n + o_h[:, None] * stride_query_h
    q_v = tl.load(p_q + o_v[None, :], mask=m_h[:, None], other=0.0)  # [BH, V]
    q_r = tl.load(p_q + V + o_r[None, :], mask=m_h[:, None], other=0.0)  # [BH, R]

    top = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, V), tl.float32)
    for s in tl.range(first, last, BS, num_stages=STAGES):
        at = s + o_s
        m_s = at < last
        page = tl.load(p_tables + i_n * stride_table + at // PAGE, mask=m_s, other=0).to(tl.int64)
        p_row = p_latents + (page * PAGE + at % PAGE)[:, None] * (V + R)
        c = tl.load(p_row + o_v[None, :], mask=m_s[:, None], other=0.0)  # [BS, V]
        r = tl.load(p_row + V + o_r[None, :], mask=m_s[:, None], other=0.0)  # [BS, R]
        score = tl.dot(q_v, tl.trans(c), input_precision=PRECISION)
        score = tl.dot(q_r, tl.trans(r), acc=score, input_precision=PRECISION) * scale
        score = tl.where(m_s[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp2(top - new_top)
        p = tl.exp2(score - new_top[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc=acc * keep[:, None], input_precision=PRECISION)
        top = new_top
    row = (i_n * SPLITS + i_s) * H + o_h
    tl.store(p_out + row[:, None] * V + o_v[None, :], acc / tl.maximum(total, 1e-30)[:, None], mask=m_h[:, None])
    tl.store(p_lse + row, tl.where(total > 0, top + tl.log2(tl.maximum(total, 1e-30)), -float("inf")), mask=m_h)


@triton.jit
def _merge(p_parts, p_lse, p_out, H: tl.constexpr, V: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr):
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_s, o_v = tl.arange(0, SP), tl.arange(0, V)
    row = (i_n * SPLITS + o_s) * H + i_h
    lse = tl.load(p_lse + row, mask=o_s < SPLITS, other=-float("inf"))
    weight = tl.exp2(lse - tl.maximum(tl.max(lse, 0), -1e30))
    top = tl.maximum(tl.max(lse, 0), -1e30)
    total = tl.sum(weight, 0)
    acc = tl.zeros((V,), tl.float32)
    for s in range(SPLITS):
        at = (i_n * SPLITS + s) * H + i_h
        acc += tl.exp2(tl.load(p_lse + at) - top) * tl.load(p_parts + at * V + o_v)
    tl.store(p_out + (i_n * H + i_h) * V + o_v, (acc / tl.maximum(total, 1e-30)).to(p_out.dtype.element_ty))


def launch(
    query: Tensor,
    latents: Tensor,
    page_tables: Tensor,
    lengths: Tensor,
    value_dim: int,
    scale: float,
    splits: int | None = None,
    block: tuple[int, int] | None = None,
    stages: int = 3,
    num_warps: int | None = None,
) -> Tensor:
    """As `kernels.mla.mla_decode`, which has checked the shapes; in query's dtype. Raises `ValueError` for what this kernel does not cover.

    Lengths stay on the device: the number of splits follows from N, heads and the table's width. A length of 0 gives zeros.
    """
    sequences, heads, width = query.shape
    rest = width - value_dim
    if not held_whole(value_dim, rest):
        raise ValueError(f"query: width {width} with {value_dim} of value, expected powers of two from 16 for both parts")
    if not sequences:
        return query.new_empty(0, heads, value_dim)
    if query.stride(2) != 1 or not latents.is_contiguous() or page_tables.stride(1) != 1:
        raise ValueError("latents need contiguous memory, query and page_tables rows without gaps")
    page_size, capacity = latents.shape[1], page_tables.shape[1] * latents.shape[1]
    if query.is_cuda and block is None:
        from kernels import mla_decode_hopper as hopper

        if hopper.fits(query, latents, value_dim):
            splits = splits or hopper.splits_for(sequences, heads, capacity)
            return _merged(*hopper.launch(query, latents, page_tables, lengths, value_dim, scale * LOG2_E, splits), query.dtype)
    bh, bs = block or ((16, 32) if heads <= 16 else (64, 32 if is_amd() else 64))
    num_warps = num_warps or (4 if bh <= 32 else 8)
    blocks = triton.cdiv(heads, bh)
    if splits is None:
        splits = max(1, min(PROGRAMS // max(1, sequences * blocks), triton.cdiv(capacity, 8 * bs), 128))
    parts = torch.empty(sequences, splits, heads, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(sequences, splits, heads, dtype=torch.float32, device=query.device)
    _decode[(blocks, splits, sequences)](
        query,
        latents,
        page_tables,
        lengths,
        parts,
        lse,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        page_tables.stride(0),
        H=heads,
        V=value_dim,
        R=rest,
        PAGE=page_size,
        SPLITS=splits,
        BH=bh,
        BS=bs,
        STAGES=fitting_stages(stages),
        PRECISION=fp32_precision() if query.dtype == torch.float32 else None,
        num_warps=num_warps,
    )
    return _merged(parts, lse, query.dtype)


def _merged(parts: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Partial outputs [N, splits, heads, V], log2 sums [N, splits, heads] -> [N, heads, V]."""
    sequences, splits, heads, value = parts.shape
    if splits == 1 and parts.dtype == dtype:
        return parts[:, 0]
    out = torch.empty(sequences, heads, value, dtype=dtype, device=parts.device)
    _merge[(heads, sequences)](parts, lse, out, H=heads, V=value, SPLITS=splits, SP=triton.next_power_of_2(splits), num_warps=4)
    return out
