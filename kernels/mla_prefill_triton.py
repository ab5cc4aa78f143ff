"""MLA prefill in Triton: keys and values expanded per head, the shared key dims apart. As `kernels.mla.mla_prefill_expanded`.

A program attends from BM consecutive tokens of one sequence and head; whole blocks of keys first, without a mask, then those on the
diagonal. Blocks at a sequence's end, which attend most, come first. Source: FlashAttention-2 (arXiv 2307.08691); the split of the key
into a part per head and a shared one is DeepSeek-V2's (arXiv 2405.04434).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import held_whole
from kernels.target import fitting_stages, fp32_precision

LOG2_E = 1.4426950408889634


@triton.jit
def _stretch(
    acc,
    total,
    top,
    q_n,
    q_r,
    p_keys,
    p_shared,
    first,
    last,
    o_position,
    n_k,
    scale,
    stride_s,
    stride_shared,
    DN: tl.constexpr,
    DR: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys [first, last) of the sequence into the running softmax."""
    o_s, o_n, o_r, o_v = tl.arange(0, BN), tl.arange(0, DN), tl.arange(0, DR), tl.arange(0, DV)
    for s in tl.range(first, last, BN, num_stages=STAGES):
        at = (s + o_s).to(tl.int64)
        p_k = p_keys + at[:, None] * stride_s + o_n[None, :]
        p_r = p_shared + at[:, None] * stride_shared + o_r[None, :]
        p_v = p_keys + DN + at[:, None] * stride_s + o_v[None, :]
        if MASKED:
            inside = (at < n_k)[:, None]
            k, r, v = tl.load(p_k, mask=inside, other=0.0), tl.load(p_r, mask=inside, other=0.0), tl.load(p_v, mask=inside, other=0.0)
        else:
            k, r, v = tl.load(p_k), tl.load(p_r), tl.load(p_v)
        score = tl.dot(q_n, tl.trans(k), input_precision=PRECISION)
        score = tl.dot(q_r, tl.trans(r), acc=score, input_precision=PRECISION)
        if MASKED:
            score = tl.where(at[None, :] <= o_position[:, None], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc=acc * keep[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit
def _prefill(
    p_query,
    p_keys,
    p_shared,
    p_out,
    p_cu_queries,
    p_cu_keys,
    sequences,
    scale,
    stride_q_t,
    stride_q_h,
    stride_s,
    stride_h,
    stride_shared,
    H: tl.constexpr,
    DN: tl.constexpr,
    DR: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_h = tl.program_id(1)
    i_n, block = 0, tl.program_id(0)  # the block's sequence, and its place there
    blocks = tl.cdiv(tl.load(p_cu_queries + 1) - tl.load(p_cu_queries), BM).to(tl.int32)
    while (block >= blocks) & (i_n < sequences - 1):
        block -= blocks
        i_n += 1
        blocks = tl.cdiv(tl.load(p_cu_queries + i_n + 1) - tl.load(p_cu_queries + i_n), BM).to(tl.int32)
    if block >= blocks:
        return
    q_0, k_0 = tl.load(p_cu_queries + i_n).to(tl.int64), tl.load(p_cu_keys + i_n).to(tl.int64)
    n_q = (tl.load(p_cu_queries + i_n + 1) - q_0).to(tl.int32)
    n_k = (tl.load(p_cu_keys + i_n + 1) - k_0).to(tl.int32)
    m = (blocks - 1 - block) * BM
    o_m, o_n, o_r, o_v = m + tl.arange(0, BM), tl.arange(0, DN), tl.arange(0, DR), tl.arange(0, DV)
    m_m = (o_m < n_q)[:, None]
    p_q = p_query + (q_0 + o_m)[:, None] * stride_q_t + i_h * stride_q_h
    q_n = tl.load(p_q + o_n[None, :], mask=m_m, other=0.0)
    q_r = tl.load(p_q + DN + o_r[None, :], mask=m_m, other=0.0)
    p_keys += k_0 * stride_s + i_h * stride_h
    p_shared += k_0 * stride_shared
    before = n_k - n_q  # keys that were there before this run
    o_position = before + o_m
    whole = (before + m + 1) // BN * BN  # every row attends these
    last = tl.minimum(n_k, before + m + BM)
    acc = tl.zeros((BM, DV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -1e30, tl.float32)
    acc, total, top = _stretch(
        acc, total, top, q_n, q_r, p_keys, p_shared, 0, whole, o_position, n_k, scale, stride_s, stride_shared,
        DN, DR, DV, BN, False, STAGES, PRECISION,
    )  # fmt: skip
    acc, total, top = _stretch(
        acc, total, top, q_n, q_r, p_keys, p_shared, whole, last, o_position, n_k, scale, stride_s, stride_shared,
        DN, DR, DV, BN, True, STAGES, PRECISION,
    )  # fmt: skip
    out = (acc / tl.maximum(total, 1e-30)[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + ((q_0 + o_m)[:, None] * H + i_h) * DV + o_v[None, :], out, mask=m_m)


def launch(
    query: Tensor,
    expanded: Tensor,
    shared_key: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    nope: int,
    scale: float,
    block: tuple[int, int] = (128, 64),
    stages: int = 3,
    num_warps: int = 8,
) -> Tensor:
    """As `kernels.mla.mla_prefill_expanded`, which has checked the shapes; in query's dtype. All lengths stay on the device."""
    tokens, heads, width = query.shape
    shared = width - nope
    value = expanded.shape[2] - nope
    if not held_whole(nope, shared, value):
        raise ValueError(f"query: widths {nope} + {shared} and {value} of value, expected powers of two from 16")
    if query.stride(2) != 1 or expanded.stride(2) != 1 or shared_key.stride(1) != 1:
        raise ValueError("query, expanded and shared_key need rows without gaps")
    out = torch.empty(tokens, heads, value, dtype=query.dtype, device=query.device)
    sequences = cu_queries.shape[0] - 1
    if not tokens:
        return out
    bm, bn = block
    _prefill[(tokens // bm + sequences, heads)](
        query,
        expanded,
        shared_key,
        out,
        cu_queries,
        cu_keys,
        sequences,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        expanded.stride(0),
        expanded.stride(1),
        shared_key.stride(0),
        H=heads,
        DN=nope,
        DR=shared,
        DV=value,
        BM=bm,
        BN=bn,
        STAGES=fitting_stages(stages),
        PRECISION=fp32_precision() if query.dtype == torch.float32 else None,
        num_warps=num_warps,
    )
    return out
