"""`kernels.attn_res_norm` in Triton: a program per token, the mix in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 1024  # tokens: below it a program has a multiprocessor to itself


@triton.jit
def _attn_res_norm(
    p_blocks,
    p_run,
    p_added,
    p_norm,
    p_query,
    p_out_norm,
    p_out,
    eps,
    stride_block,
    stride_token,
    D: tl.constexpr,
    B: tl.constexpr,
    SOURCES: tl.constexpr,
    SP: tl.constexpr,
    PIECE: tl.constexpr,
    ADD: tl.constexpr,
):
    """SOURCES sealed blocks (SP padded), then the running sum. [B] = D padded to a power of two."""
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, B)
    m_d = o_d < D
    run = tl.load(p_run + t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if ADD:
        run += tl.load(p_added + t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        rounded = run.to(p_run.dtype.element_ty)
        tl.store(p_run + t * D + o_d, rounded, mask=m_d)
        run = rounded.to(tl.float32)
    mix = run
    if SOURCES > 0:
        weight = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32) * tl.load(p_query + o_d, mask=m_d, other=0.0).to(tl.float32)
        own = tl.sum(run * weight) * tl.rsqrt(tl.sum(run * run) / D + eps)
        # All blocks' scores with one reduction, a piece of the width at a time; the second read of the blocks comes from the cache.
        o_n, o_p = tl.arange(0, SP), tl.arange(0, PIECE)
        p_rows = p_blocks + o_n[:, None] * stride_block + t * stride_token
        dot = tl.zeros((SP, PIECE), tl.float32)
        square = tl.zeros((SP, PIECE), tl.float32)
        for d in range(0, D, PIECE):
            m = (o_n[:, None] < SOURCES) & (d + o_p[None, :] < D)
            s = tl.load(p_rows + d + o_p[None, :], mask=m, other=0.0).to(tl.float32)
            m_p = d + o_p < D
            w = tl.load(p_norm + d + o_p, mask=m_p, other=0.0).to(tl.float32) * tl.load(p_query + d + o_p, mask=m_p, other=0.0).to(
                tl.float32
            )
            dot += s * w[None, :]
            square += s * s
        score = tl.sum(dot, 1) * tl.rsqrt(tl.sum(square, 1) / D + eps)
        score = tl.where(o_n < SOURCES, score, -float("inf"))
        top = tl.maximum(tl.max(score, 0), own)
        alpha = tl.exp(score - top)
        mix = run * tl.exp(own - top)
        total = tl.exp(own - top) + tl.sum(alpha, 0)
        for i in tl.static_range(SOURCES):
            s = tl.load(p_blocks + i * stride_block + t * stride_token + o_d, mask=m_d, other=0.0).to(tl.float32)
            mix += tl.sum(tl.where(o_n == i, alpha, 0.0)) * s
        mix = mix / total
    y = mix * tl.rsqrt(tl.sum(mix * mix) / D + eps) * tl.load(p_out_norm + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_out + t * D + o_d, y.to(p_out.dtype.element_ty), mask=m_d)


def launch(
    blocks: Tensor,
    run: Tensor,
    added: Tensor | None,
    norm: Tensor,
    query: Tensor,
    out_norm: Tensor,
    eps: float,
    piece: int = 1024,
    num_warps: int | None = None,
) -> Tensor:
    """As `kernels.attn_res_norm.attn_res_norm`, which has checked the shapes."""
    tokens, width = run.shape
    if not run.is_contiguous() or (added is not None and not added.is_contiguous()) or blocks.stride(2) != 1:
        raise ValueError("run and added need contiguous memory, blocks rows without gaps")
    out = torch.empty_like(run)
    if tokens:
        _attn_res_norm[(tokens,)](
            blocks,
            run,
            run if added is None else added,
            norm,
            query,
            out_norm,
            out,
            eps,
            blocks.stride(0),
            blocks.stride(1),
            D=width,
            B=triton.next_power_of_2(width),
            SOURCES=blocks.shape[0],
            SP=triton.next_power_of_2(max(1, blocks.shape[0])),
            PIECE=min(piece, triton.next_power_of_2(width)),
            ADD=added is not None,
            num_warps=num_warps or (8 if tokens < FEW else 4),
        )
    return out
