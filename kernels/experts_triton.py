"""The packed MLPs of the local experts as grouped products: weights stay 4 bits in memory and become bf16 in registers.

    plan      pairs (token, choice) by expert, and tiles of up to `block_tokens` pairs of one expert; lengths stay on the device
    _experts  gate and up rows of a tile at once, SiTU, to one row a pair; then the same kernel for down
    _combine  per token, its pairs' rows in the router's order with the router's weights, fp32: the same sum on every run

Products are taken as W x^T: the expanded weights are the left operand, which the matrix unit reads from registers, and the tokens are the
columns, so that few tokens cost few columns. Source of format and sums: facts on K3's architecture, sections 8 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import PackedExperts
from kernels.target import fitting_stages, is_amd

# Two words of four codes each -> four pairs of values, times their scales. A code's exponent and mantissa at bits 8..6 of a bf16 with the
# sign on top are its value times 2^-126, subnormal values included; the scale carries the 2^126.
_EXPAND = tl.constexpr("""
{
.reg .b32 a, b;
and.b32 a, $4, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 3;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $1, a, $5;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $6;
shl.b32 a, $4, 1;
and.b32 a, a, 0x80008000;
shr.u32 b, $4, 5;
lop3.b32 a, b, 0x01000100, a, 0xEA;
shr.u32 b, $4, 4;
lop3.b32 a, b, 0x00C000C0, a, 0xEA;
mul.rn.bf16x2 $3, a, $6;
}
""")


@dataclass(frozen=True, slots=True)
class Tile:
    """BN + MORE pairs of one expert, and (BM, stages, warps) of the two projections."""

    bn: int
    more: int
    w13: tuple[int, int, int]
    w2: tuple[int, int, int]


# up to so many pairs for most experts -> what was fastest on an H200 (docs/log.md)
TILES = (
    (16, Tile(16, 0, (256, 3, 4), (256, 3, 4))),
    (32, Tile(32, 0, (128, 3, 4), (128, 3, 4))),
    (64, Tile(64, 0, (128, 2, 4), (128, 3, 8))),
    (96, Tile(64, 32, (128, 2, 4), (256, 3, 8))),
    (128, Tile(128, 0, (128, 2, 8), (128, 2, 8))),
    (1 << 31, Tile(128, 32, (256, 3, 8), (256, 3, 8))),
)


@triton.jit
def _rank(p_ids, p_counts, p_ranks, pairs, first, E: tl.constexpr, B: tl.constexpr):
    """Each pair's place among its expert's pairs, in no particular order."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.load(p_ids + i, mask=i < pairs, other=-1).to(tl.int32) - first
    here = (i < pairs) & (e >= 0) & (e < E)
    tl.store(p_ranks + i, tl.atomic_add(p_counts + tl.where(here, e, 0), 1, mask=here), mask=here)


@triton.jit
def _tile(p_counts, p_begins, p_tile_expert, p_tile_begin, p_tiles, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr):
    """Where each expert's pairs begin; the tiles and how many there are."""
    o_e = tl.arange(0, EP)
    count = tl.load(p_counts + o_e, mask=o_e < E, other=0)
    begin = tl.cumsum(count, 0) - count
    own = (count + BN - 1) // BN
    first = tl.cumsum(own, 0) - own
    tl.store(p_begins + o_e, begin, mask=o_e < E)
    for j in range(0, tl.max(own)):
        tl.store(p_tile_expert + first + j, o_e, mask=j < own)
        tl.store(p_tile_begin + first + j, begin + j * BN, mask=j < own)
    tl.store(p_tiles, tl.sum(own))


@triton.jit
def _place(p_ids, p_begins, p_ranks, p_order, pairs, first, E: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.load(p_ids + i, mask=i < pairs, other=-1).to(tl.int32) - first
    here = (i < pairs) & (e >= 0) & (e < E)
    place = tl.load(p_begins + e, mask=here, other=0) + tl.load(p_ranks + i, mask=here, other=0)
    tl.store(p_order + place, i, mask=here)


@triton.jit
def _value(sign, size, scale, dtype: tl.constexpr):
    """A code's sign bit and its exponent and mantissa bits (0..7), and a scale byte + 126 -> its value."""
    bits = (((size >> 1) + 126) << 23) | ((size & 1) << 22)  # from 2 on: 2^(e - 1) (1 + m / 2)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
    return (tl.where(sign > 0, -value, value) * ((scale - 126) << 23).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def _expand(words, scales, j: tl.constexpr, PTX: tl.constexpr, dtype: tl.constexpr):
    """words [M, 16] int16, scales [M] int32 (bytes 2 j and 2 j + 1 are these columns') -> values [M, 16] of each word's four codes."""
    if PTX:
        bits = scales << 7 if j == 0 else scales >> 9
        low = (bits & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None].broadcast_to(words.shape)
        bits = scales >> 1 if j == 0 else scales >> 17
        high = (bits & 0x7F80).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None].broadcast_to(words.shape)
        four: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(_EXPAND, "=r,=r,=r,=r,r,r,r", [words, low, high], dtype=four, is_pure=True, pack=2)
    else:
        w = words.to(tl.int32)
        low, high = ((scales >> (16 * j)) & 255)[:, None], ((scales >> (16 * j + 8)) & 255)[:, None]
        return (
            _value((w >> 15) & 1, (w >> 6) & 7, low, dtype),
            _value((w >> 12) & 1, (w >> 3) & 7, low, dtype),
            _value((w >> 9) & 1, w & 7, high, dtype),
            _value((w >> 14) & 1, ((w >> 11) & 4) | ((w >> 10) & 3), high, dtype),
        )


@triton.jit
def _multiply(acc, w0, w1, w2, w3, p_row, m_n, PRECISION: tl.constexpr):
    """acc += the four parts' products with 64 columns of x rows at p_row [N, 16]."""
    acc = tl.dot(w0, tl.trans(tl.load(p_row, mask=m_n, other=0.0)), acc=acc, input_precision=PRECISION)
    acc = tl.dot(w1, tl.trans(tl.load(p_row + 16, mask=m_n, other=0.0)), acc=acc, input_precision=PRECISION)
    acc = tl.dot(w2, tl.trans(tl.load(p_row + 32, mask=m_n, other=0.0)), acc=acc, input_precision=PRECISION)
    return tl.dot(w3, tl.trans(tl.load(p_row + 48, mask=m_n, other=0.0)), acc=acc, input_precision=PRECISION)


@triton.jit
def _finish(y, p_out, target, m_n, i_o, beta, linear_beta, OUT: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr):
    """SiTU of the gate and up rows in y [M, N] when GATED; then to the rows `target` of the output."""
    M: tl.constexpr = y.shape[0]
    N: tl.constexpr = y.shape[1]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (M // 16, 2, 8, N)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (M // 2, N)), tl.reshape(up, (M // 2, N))
        # tanh(a) = 2 sigmoid(2 a) - 1
        y = beta * (2 * tl.sigmoid(gate * (2 / beta)) - 1) * tl.sigmoid(gate)
        if LIMITED:
            up = linear_beta * (2 * tl.sigmoid(up * (2 / linear_beta)) - 1)
        y = y * up
    width: tl.constexpr = OUT // 2 if GATED else OUT
    rows: tl.constexpr = M // 2 if GATED else M
    p_y = p_out + target.to(tl.int64)[:, None] * width + (i_o * rows + tl.arange(0, rows))[None, :]
    tl.store(p_y, tl.trans(y).to(p_out.dtype.element_ty), mask=m_n[:, None])


@triton.jit
def _one_tile(
    i_t,
    p_x,
    experts,
    plan,
    p_out,
    stride_x,
    situ,
    K: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BM rows of one expert for a tile of BN + MORE pairs (two powers of two; MORE may be 0): the weights are expanded once for both.

    GATED: x rows are tokens; the result of SiTU goes to the pair's place by expert. Otherwise x rows are places by expert, and the
    result goes to the pair's own row.
    """
    p_order, p_counts, p_begins, p_tile_expert, p_tile_begin = plan
    p_codes, p_scales = experts
    beta, linear_beta = situ
    i_o = tl.program_id(0)
    i_e = tl.load(p_tile_expert + i_t)
    begin = tl.load(p_tile_begin + i_t)
    end = tl.load(p_begins + i_e) + tl.load(p_counts + i_e)
    o_m, o_k = i_o * BM + tl.arange(0, BM), tl.arange(0, 16)
    e = i_e.to(tl.int64)
    p_code = p_codes + e * (K // 4 * OUT) + o_m[:, None] * 16 + o_k[None, :]
    p_scale = p_scales + e * (K // 128 * OUT) + o_m
    dtype: tl.constexpr = p_x.dtype.element_ty

    place = begin + tl.arange(0, BN)
    m_n = place < end
    pair = tl.load(p_order + place, mask=m_n, other=0)
    row = pair // TOP_K if GATED else place
    p_row = p_x + row.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    y = tl.zeros((BM, BN), tl.float32)
    if MORE:
        place_more = begin + BN + tl.arange(0, MORE)
        m_more = place_more < end
        pair_more = tl.load(p_order + place_more, mask=m_more, other=0)
        row_more = pair_more // TOP_K if GATED else place_more
        p_more = p_x + row_more.to(tl.int64)[:, None] * stride_x + o_k[None, :]
        y_more = tl.zeros((BM, MORE), tl.float32)
    for b in tl.range(0, K // 128, num_stages=STAGES):
        scales = tl.load(p_scale + b * OUT)
        for j in tl.static_range(2):
            words = tl.load(p_code + (b * 2 + j) * (OUT * 16))
            w0, w1, w2, w3 = _expand(words, scales, j, PTX, dtype)
            y = _multiply(y, w0, w1, w2, w3, p_row + b * 128 + j * 64, m_n[:, None], PRECISION)
            if MORE:
                y_more = _multiply(y_more, w0, w1, w2, w3, p_more + b * 128 + j * 64, m_more[:, None], PRECISION)
    _finish(y, p_out, place if GATED else pair, m_n, i_o, beta, linear_beta, OUT, GATED, LIMITED)
    if MORE:
        _finish(y_more, p_out, place_more if GATED else pair_more, m_more, i_o, beta, linear_beta, OUT, GATED, LIMITED)


@triton.jit
def _fitting_tile(
    i_t,
    p_x,
    experts,
    plan,
    p_out,
    stride_x,
    situ,
    K: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `_one_tile`, as narrow as the pairs that are left allow: the last tile of an expert is seldom full, and columns cost time."""
    _, p_counts, p_begins, p_tile_expert, p_tile_begin = plan
    i_e = tl.load(p_tile_expert + i_t)
    left = tl.load(p_begins + i_e) + tl.load(p_counts + i_e) - tl.load(p_tile_begin + i_t)
    half: tl.constexpr = BN // 2
    least: tl.constexpr = BN // 4 if BN >= 128 else BN // 2
    full: tl.constexpr = BN if MORE > 0 else BN // 2  # more than these: all columns
    if BN < 64 or left > full:
        _one_tile(i_t, p_x, experts, plan, p_out, stride_x, situ, K, OUT, TOP_K, GATED, LIMITED, BM, BN, MORE, STAGES, PTX, PRECISION)
    elif left > half:  # only with MORE
        _one_tile(i_t, p_x, experts, plan, p_out, stride_x, situ, K, OUT, TOP_K, GATED, LIMITED, BM, BN, 0, STAGES, PTX, PRECISION)
    elif left > least:  # only from 128 columns
        _one_tile(i_t, p_x, experts, plan, p_out, stride_x, situ, K, OUT, TOP_K, GATED, LIMITED, BM, half, 0, STAGES, PTX, PRECISION)
    else:
        _one_tile(i_t, p_x, experts, plan, p_out, stride_x, situ, K, OUT, TOP_K, GATED, LIMITED, BM, least, 0, STAGES, PTX, PRECISION)


@triton.jit
def _experts(
    p_x,
    experts,
    plan,
    p_tiles,
    p_out,
    stride_x,
    situ,
    K: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MORE: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
    LOOP: tl.constexpr,
):
    """All tiles. LOOP: there may be more of them than programs (most pairs are other ranks', but none need be)."""
    tiles, i = tl.load(p_tiles), tl.program_id(1)
    if LOOP:
        for i_t in range(i, tiles, tl.num_programs(1)):
            _fitting_tile(
                i_t, p_x, experts, plan, p_out, stride_x, situ, K, OUT, TOP_K, GATED, LIMITED, BM, BN, MORE, STAGES, PTX, PRECISION
            )
    elif i < tiles:
        _fitting_tile(i, p_x, experts, plan, p_out, stride_x, situ, K, OUT, TOP_K, GATED, LIMITED, BM, BN, MORE, STAGES, PTX, PRECISION)


@triton.jit
def _combine(p_rows, p_ids, p_weights, p_out, first, D, E: tl.constexpr, TOP_K: tl.constexpr, B: tl.constexpr):
    """out[t] = sum over the choices with a local expert of weight * row, in the order of the choices."""
    t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for j in tl.static_range(TOP_K):
        e = tl.full((B,), tl.load(p_ids + t * TOP_K + j), tl.int32) - first
        weight = tl.load(p_weights + t * TOP_K + j).to(tl.float32)
        here = (e >= 0) & (e < E) & (o_d < D)
        total += weight * tl.load(p_rows + (t * TOP_K + j) * D + o_d, mask=here, other=0.0).to(tl.float32)
    tl.store(p_out + t * D + o_d, total, mask=o_d < D)


def tile_for(pairs: int, experts: int) -> Tile:
    """For `pairs` spread over `experts`: as many columns as most experts get, so that few are padding."""
    mean = pairs / max(experts, 1)
    return next(tile for limit, tile in TILES if mean + 2 * mean**0.5 <= limit)


def launch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    first_expert: int,
    num_experts: int,
    beta: float,
    linear_beta: float | None,
    tile: Tile | None = None,
    ptx: bool | None = None,
) -> Tensor:
    """As `kernels.experts.packed_experts`, which has checked the shapes."""
    (tokens, latent), top_k = x.shape, ids.shape[1]
    experts, _, twice, _ = w13.codes.shape
    pairs = tokens * top_k
    out = torch.empty(tokens, latent, dtype=torch.float32, device=x.device)
    if not tokens:
        return out
    if x.stride(1) != 1 or not ids.is_contiguous() or not weights.is_contiguous():
        raise ValueError("x needs rows without gaps, ids and weights contiguous memory")
    tile = tile or tile_for(pairs, num_experts)
    width = tile.bn + tile.more
    bf16 = x.dtype == torch.bfloat16
    ptx = bf16 and x.is_cuda and not is_amd() if ptx is None else ptx
    tiles = pairs // width + min(experts, pairs)

    def integers(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=x.device)

    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    begins, ranks, order = integers(experts), integers(pairs), integers(pairs)
    tile_expert, tile_begin, total = integers(tiles), integers(tiles), integers(1)
    grid = (triton.cdiv(pairs, 256),)
    _rank[grid](ids, counts, ranks, pairs, first_expert, E=experts, B=256)
    _tile[(1,)](counts, begins, tile_expert, tile_begin, total, E=experts, EP=triton.next_power_of_2(experts), BN=width)
    _place[grid](ids, begins, ranks, order, pairs, first_expert, E=experts, B=256)
    hidden = torch.empty(pairs, twice // 2, dtype=x.dtype, device=x.device)
    rows = torch.empty(pairs, latent, dtype=x.dtype, device=x.device)
    plan = (order, counts, begins, tile_expert, tile_begin)
    programs = min(tiles, experts + 2 * pairs * experts // (num_experts * width) + 1)
    options = {
        "TOP_K": top_k,
        "LIMITED": linear_beta is not None,
        "LOOP": programs < tiles,
        "BN": tile.bn,
        "MORE": tile.more,
        "PTX": ptx,
        "PRECISION": None if bf16 else "ieee",
    }
    situ = (beta, linear_beta or 1.0)
    for gated, source, weight, inner, outer, target, (rows_of, stages, warps) in (
        (True, x, w13, latent, twice, hidden, tile.w13),
        (False, hidden, w2, twice // 2, latent, rows, tile.w2),
    ):
        bm = min(rows_of, outer & -outer)  # a power of two that divides the rows
        _experts[(outer // bm, programs)](
            source,
            (weight.codes, weight.scales),
            plan,
            total,
            target,
            source.stride(0),
            situ,
            K=inner,
            OUT=outer,
            GATED=gated,
            BM=bm,
            STAGES=fitting_stages(stages),
            num_warps=warps,
            **options,
        )
    block = min(1024, triton.next_power_of_2(latent))
    _combine[(tokens, triton.cdiv(latent, block))](
        rows, ids, weights, out, first_expert, latent, E=experts, TOP_K=top_k, B=block, num_warps=4
    )
    return out
