"""Chunked KDA in Triton: what depends on a chunk alone in parallel, then the states from chunk to chunk.

Two launches for batches that fill the machine with (sequence, head, half of the value channels) programs:

    _prepare   a program per (chunk, head): norms, gates, cumulative decays, the chunk's triangular system and its inverse
    _advance   a program per (sequence, head, value block): S^T stays in registers, five small products a chunk

For few heads and long prompts sequences are cut into segments, and _advance runs twice, over segments instead of sequences: for the
affine map S -> M S + B of each segment (the columns of M are the response to unit states), then, after `_link` has applied the maps one
after the other, for the outputs.

States are held transposed, [V, K]: then every product of _advance has its state-dependent operand on the left, in registers.
With chunks of 32 and decays measured from a chunk's middle no exponent exceeds 16 * |lower_bound|, which fp32 and bf16 hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import held_whole
from kernels.target import fitting_stages, fp32_precision

CHUNK = 32
LOG2_E = tl.constexpr(1.4426950408889634)
MAX_EXPONENT = 85.0  # exp of it is finite in fp32 and bf16
FEW_PROGRAMS = 128  # below it the serial form leaves most of an H200 idle
SEGMENT = 1024


@triton.jit
def _sigmoid(x):
    """In fewer instructions than a division takes."""
    r = tl.rsqrt(1 + tl.exp2(x * -LOG2_E))
    return r * r


@triton.jit
def _inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [C, C], C = 32.

    On the diagonal blocks of 8 by the nilpotent series (I - d)(I + d^2)(I + d^4), whose terms stay small there even for equal keys
    (at most 20 times the result's), so that tf32 products do; then the blocks below them, 8 -> 16 -> 32: [[X, 0], [-Y B X, Y]] is the
    inverse of [[X^-1, 0], [B, Y^-1]].
    """
    o = tl.arange(0, C)
    row, column = o[:, None], o[None, :]
    d = tl.where(row // 8 == column // 8, a, 0.0)
    x = tl.where(row == column, 1.0, 0.0) - d
    power = tl.dot(d, d, input_precision=PRECISION)
    x = tl.dot(x, power, acc=x, input_precision=PRECISION)
    power = tl.dot(power, power, input_precision=PRECISION)
    x = tl.dot(x, power, acc=x, input_precision=PRECISION)
    below = tl.where((row // 16 == column // 16) & (row // 8 > column // 8), a, 0.0)
    x -= tl.dot(x, tl.dot(below, x, input_precision=PRECISION), input_precision=PRECISION)
    below = tl.where(row // 16 > column // 16, a, 0.0)
    x -= tl.dot(x, tl.dot(below, x, input_precision=PRECISION), input_precision=PRECISION)
    return x


@triton.jit
def _pieces(p_cu_seqlens, N, piece, NP: tl.constexpr):
    """-> o_n [NP], bounds of the sequences, cumulative number of pieces (of `piece` tokens; at least one) up to and with each sequence."""
    o_n = tl.arange(0, NP)
    begin = tl.load(p_cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int32)
    end = tl.load(p_cu_seqlens + o_n + 1, mask=o_n < N, other=0).to(tl.int32)
    pieces = tl.where(o_n < N, tl.maximum((end - begin + piece - 1) // piece, 1), 0)
    return o_n, begin, end, tl.cumsum(pieces, 0)


@triton.jit
def _locate(p_cu_seqlens, N, piece, i, NP: tl.constexpr):
    """Piece i of all -> (its sequence, N or more when there is none; its number inside the sequence; that sequence's begin and end)."""
    o_n, begin, end, upto = _pieces(p_cu_seqlens, N, piece, NP)
    i_n = tl.sum(tl.where(upto <= i, 1, 0))
    before = tl.max(tl.where(o_n < i_n, upto, 0))
    here = o_n == i_n
    return i_n, i - before, tl.sum(tl.where(here, begin, 0)), tl.sum(tl.where(here, end, 0))


@triton.jit
def _prepare(
    p_q,
    p_k,
    p_f,
    p_b,
    p_a_log,
    p_dt_bias,
    p_cu_seqlens,
    p_w,
    p_qd,
    p_kd,
    p_t,
    p_a,
    p_end,
    N,
    stride_q,
    stride_k,
    stride_f,
    stride_b,
    lower_bound,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    NP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk and head: w = -T (k e^G), qd = q e^G, kd = k e^(G_end - G), T = (I + A)^-1 diag(beta), a = q k^T decayed, e^G_end."""
    i_h, i_c = tl.program_id(0), tl.program_id(1)
    i_n, i_in, begin, end = _locate(p_cu_seqlens, N, C, i_c, NP)
    if i_n >= N:
        return
    o_t, o_d = tl.arange(0, C), tl.arange(0, D)
    first = begin + i_in * C
    m_t = first + o_t < end
    t = (first + o_t).to(tl.int64)
    head = i_h * D + o_d

    q = tl.load(p_q + t[:, None] * stride_q + head[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)  # [C, D]
    k = tl.load(p_k + t[:, None] * stride_k + head[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    f = tl.load(p_f + t[:, None] * stride_f + head[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(p_b + t * stride_b + i_h, mask=m_t, other=0.0).to(tl.float32))
    beta = tl.where(m_t, beta, 0.0)
    q = q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * (D**-0.5))[:, None]
    k = k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
    f = tl.exp(tl.load(p_a_log + i_h)) * (f + tl.load(p_dt_bias + head)[None, :])
    g = tl.where(m_t[:, None], (lower_bound * LOG2_E) * _sigmoid(f), 0.0)  # log2 of the decay
    last = tl.sum(g, 0)
    # measured from half the chunk's decay, so that no exponent exceeds C / 2 * |lower_bound|
    total = tl.cumsum(g, 0) - 0.5 * last[None, :]
    half = tl.exp2(0.5 * last)
    up, down = tl.exp2(total), tl.exp2(-total)

    dtype = p_w.dtype.element_ty
    i_ch = i_c.to(tl.int64) * H + i_h
    tile = i_ch * C * D + o_t[:, None] * D + o_d[None, :]
    square = i_ch * C * C + o_t[:, None] * C + o_t[None, :]
    tl.store(p_end + i_ch * D + o_d, half * half)
    q_up, k_up, k_down = q * up, k * up, k * down
    tl.store(p_qd + tile, (q_up * half[None, :]).to(dtype))
    tl.store(p_kd + tile, (k_down * half[None, :]).to(dtype))
    k_decayed = (k_up * half[None, :]).to(dtype)
    k_down_t = tl.trans(k_down.to(dtype))
    kk = tl.dot(k_up.to(dtype), k_down_t, input_precision=PRECISION)
    qk = tl.dot(q_up.to(dtype), k_down_t, input_precision=PRECISION)
    # above the diagonal the products overflow: never read
    tl.store(p_a + square, tl.where(o_t[:, None] >= o_t[None, :], qk, 0.0).to(dtype))
    kk = tl.where(o_t[:, None] > o_t[None, :], kk * beta[:, None], 0.0)
    t_beta = (_inverse(kk, C, PRECISION) * beta[None, :]).to(dtype)
    tl.store(p_t + square, t_beta)
    tl.store(p_w + tile, (-tl.dot(t_beta, k_decayed, input_precision=PRECISION)).to(dtype))


@triton.jit
def _advance(
    p_v,
    p_w,
    p_qd,
    p_kd,
    p_t,
    p_a,
    p_end,
    p_o,
    p_state,
    p_read,
    p_write,
    p_cu_seqlens,
    p_maps,
    p_cuts,
    N,
    stride_v,
    stride_state_slot,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    NP: tl.constexpr,
    SEGMENT: tl.constexpr,
    MAPS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S^T [BV, K] over the chunks of a sequence (SEGMENT = 0) or of a segment of SEGMENT chunks.

    MAPS: from zero (B: the first D / BV blocks) or from unit states (M: the further ones), no outputs, result in p_maps [*, H, 2D, D].
    Otherwise outputs; the first state comes from p_cuts [segments, H, D, D] when there are segments.
    """
    NV: tl.constexpr = D // BV
    NB: tl.constexpr = 2 * NV if MAPS else NV
    pid, i_p = tl.program_id(0), tl.program_id(1)
    i_h, i_b = pid // NB, pid % NB
    i_v = i_b % NV
    o_t, o_k = tl.arange(0, C), tl.arange(0, D)
    o_v = i_v * BV + tl.arange(0, BV)
    across = o_k[None, :] * D + o_v[:, None]  # of S [K, V] in memory, as S^T

    if SEGMENT == 0:
        i_n, i_s = i_p, 0
        o_n, _, _, upto = _pieces(p_cu_seqlens, N, C, NP)
        begin, end = tl.load(p_cu_seqlens + i_n).to(tl.int32), tl.load(p_cu_seqlens + i_n + 1).to(tl.int32)
        chunk = tl.max(tl.where(o_n < i_n, upto, 0))
        chunks = (end - begin + C - 1) // C
        is_last = True
    else:
        i_n, i_s, begin, end = _locate(p_cu_seqlens, N, C * SEGMENT, i_p, NP)
        if i_n >= N:
            return
        o_n, _, _, upto = _pieces(p_cu_seqlens, N, C, NP)
        chunk = tl.max(tl.where(o_n < i_n, upto, 0)) + i_s * SEGMENT
        begin += i_s * (C * SEGMENT)
        chunks = tl.minimum((end - begin + C - 1) // C, SEGMENT)
        is_last = begin + C * SEGMENT >= end

    i_ph = i_p.to(tl.int64) * H + i_h
    if MAPS:
        if is_last:
            return
        unit = i_b >= NV
        s = tl.where((o_v[:, None] == o_k[None, :]) & unit, 1.0, 0.0)
    elif SEGMENT == 0:
        unit = False
        read = tl.load(p_read + i_n).to(tl.int64)
        old = tl.full((BV,), read, tl.int64) >= 0
        s = tl.load(p_state + read * stride_state_slot + i_h * D * D + across, mask=old[:, None], other=0.0)
    else:
        unit = False
        s = tl.load(p_cuts + i_ph * D * D + o_v[:, None] * D + o_k[None, :])

    dtype = p_w.dtype.element_ty
    i_ch = chunk.to(tl.int64) * H + i_h
    tile = o_t[:, None] * D + o_k[None, :]
    square = o_t[:, None] * C + o_t[None, :]
    for i in tl.range(0, chunks, num_stages=STAGES):
        i_now = i_ch + i * H
        m_t = (begin + i * C + o_t < end) & (not unit)
        t = (begin + i * C + o_t).to(tl.int64)
        w = tl.load(p_w + i_now * (C * D) + tile)  # [C, K]
        kd = tl.load(p_kd + i_now * (C * D) + tile)
        inverse = tl.load(p_t + i_now * (C * C) + square)  # [C, C]
        v = tl.load(p_v + t[:, None] * stride_v + (i_h * D + o_v)[None, :], mask=m_t[:, None], other=0.0).to(dtype)  # [C, BV]
        decay = tl.load(p_end + i_now * D + o_k)  # [K]
        b_s = s.to(dtype)
        # what the chunk writes, V'^T = (T V)^T - S^T (T k exp(G))^T
        new = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=PRECISION)
        new = tl.dot(b_s, tl.trans(w), acc=new, input_precision=PRECISION)
        b_new = new.to(dtype)
        if not MAPS:
            qd = tl.load(p_qd + i_now * (C * D) + tile)
            a = tl.load(p_a + i_now * (C * C) + square)
            o = tl.dot(b_s, tl.trans(qd), input_precision=PRECISION)
            o = tl.dot(b_new, tl.trans(a), acc=o, input_precision=PRECISION)  # [BV, C]
            p_out = p_o + (t * (H * D))[:, None] + (i_h * D + o_v)[None, :]
            tl.store(p_out, tl.trans(o).to(p_o.dtype.element_ty), mask=m_t[:, None])
        s = tl.dot(b_new, kd, acc=s * decay[None, :], input_precision=PRECISION)

    if MAPS:
        tl.store(p_maps + i_ph * 2 * D * D + (i_b * BV + tl.arange(0, BV))[:, None] * D + o_k[None, :], s)
    elif is_last:
        write = tl.load(p_write + i_n).to(tl.int64)
        tl.store(p_state + write * stride_state_slot + i_h * D * D + o_k[:, None] * D + o_v[None, :], tl.trans(s))


@triton.jit
def _link(
    p_state,
    p_read,
    p_cu_seqlens,
    p_maps,
    p_cuts,
    N,
    stride_state_slot,
    H: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    NP: tl.constexpr,
    SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state before every segment of a sequence: S^T <- S^T M^T + B^T, one segment after the other."""
    i_h, i_v, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n, _, _, upto = _pieces(p_cu_seqlens, N, C * SEGMENT, NP)
    first = tl.max(tl.where(o_n < i_n, upto, 0))
    after = tl.max(tl.where(o_n <= i_n, upto, 0))
    o_k, o_v = tl.arange(0, D), i_v * BV + tl.arange(0, BV)
    read = tl.load(p_read + i_n).to(tl.int64)
    old = tl.full((BV,), read, tl.int64) >= 0
    p_s = p_state + read * stride_state_slot + i_h * D * D
    s = tl.load(p_s + o_k[None, :] * D + o_v[:, None], mask=old[:, None], other=0.0)
    for i in range(0, after - first):
        i_ph = (first.to(tl.int64) + i) * H + i_h
        rows = o_v[:, None] * D + o_k[None, :]
        tl.store(p_cuts + i_ph * D * D + rows, s)
        if first + i + 1 < after:
            b = tl.load(p_maps + i_ph * 2 * D * D + rows)
            m = tl.load(p_maps + i_ph * 2 * D * D + D * D + o_k[:, None] * D + o_k[None, :])
            s = tl.dot(s, m, acc=b, input_precision=PRECISION)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    cu_seqlens: Tensor,
    lower_bound: float,
    segment: int | None,
    block_v: int = 64,
    stages: int = 3,
    prepare_warps: int = 2,
    prepare_registers: int | None = None,
) -> Tensor:
    """As `kernels.kda_prefill.kda_prefill`, which has checked the shapes. Raises `ValueError` for what these kernels do not cover.

    bf16 inputs are multiplied in bf16 with fp32 sums; fp32 inputs in fp32 (on NVIDIA tf32x3 products), for tests.
    """
    tokens, heads, width = q.shape
    sequences = cu_seqlens.shape[0] - 1
    o = torch.empty(tokens, heads, width, dtype=v.dtype, device=v.device)
    if not sequences:
        return o
    if not held_whole(width):
        raise ValueError(f"q: head width {width}, expected a power of two from 16")
    if not -MAX_EXPONENT <= lower_bound * (CHUNK // 2) <= 0:
        raise ValueError(f"lower_bound: {lower_bound}, expected {-MAX_EXPONENT / (CHUNK // 2)} ... 0")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.stride(2) != 1 or x.stride(1) != width:
            raise ValueError(f"{name}: strides {x.stride()}, expected [*, {width}, 1]")
    if f.stride(1) != 1 or b.stride(1) != 1 or not state[0].is_contiguous():
        raise ValueError("f and b need rows without gaps, state contiguous slots")
    dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    precision = fp32_precision() if dtype == torch.float32 else None
    block_v = min(block_v, width)
    blocks = width // block_v
    if segment is None:
        segment = SEGMENT if sequences * heads * blocks < FEW_PROGRAMS and tokens >= 4 * SEGMENT * sequences else 0
    if segment % CHUNK:
        raise ValueError(f"segment: {segment} tokens, expected a multiple of {CHUNK}")
    padded = triton.next_power_of_2(sequences)
    chunks = tokens // CHUNK + sequences  # at most: lengths stay on the device

    def scratch(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    w, qd, kd = (scratch(chunks, heads, CHUNK, width) for _ in range(3))
    inverse, a = (scratch(chunks, heads, CHUNK, CHUNK) for _ in range(2))
    ends = scratch(chunks, heads, width, dtype=torch.float32)
    sizes = {"H": heads, "D": width, "C": CHUNK, "NP": padded}
    _prepare[(heads, chunks)](
        q,
        k,
        f,
        b,
        a_log,
        dt_bias,
        cu_seqlens,
        w,
        qd,
        kd,
        inverse,
        a,
        ends,
        sequences,
        q.stride(0),
        k.stride(0),
        f.stride(0),
        b.stride(0),
        lower_bound,
        **sizes,
        PRECISION=precision,
        num_warps=prepare_warps,
        **({} if prepare_registers is None else {"maxnreg": prepare_registers}),
    )
    pieces = tokens // segment + sequences if segment else 0
    maps = scratch(pieces, heads, 2 * width, width, dtype=torch.float32)
    cuts = scratch(pieces, heads, width, width, dtype=torch.float32)
    inputs = (v, w, qd, kd, inverse, a, ends, o, state, read_slots, write_slots, cu_seqlens, maps, cuts)
    strides = (sequences, v.stride(0), state.stride(0))
    options = {**sizes, "BV": block_v, "STAGES": fitting_stages(stages), "PRECISION": precision, "num_warps": 4 if block_v <= 64 else 8}
    if segment:
        per = segment // CHUNK
        _advance[(heads * 2 * blocks, pieces)](*inputs, *strides, **options, SEGMENT=per, MAPS=True)
        link = min(16, width)
        _link[(heads, width // link, sequences)](
            state,
            read_slots,
            cu_seqlens,
            maps,
            cuts,
            sequences,
            state.stride(0),
            **sizes,
            BV=link,
            SEGMENT=per,
            PRECISION=fp32_precision(),
            num_warps=8,
        )
        _advance[(heads * blocks, pieces)](*inputs, *strides, **options, SEGMENT=per, MAPS=False)
    else:
        _advance[(heads * blocks, sequences)](*inputs, *strides, **options, SEGMENT=0, MAPS=False)
    return o
