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

from kernels.checks import check_shape

# Four bytes of codes -> the low nibbles' four values and the high nibbles' four, times their scales. A code's exponent and mantissa moved
# to bits 8..6 of a bf16 are its value times 2^-126, subnormal values included; the scale operand carries the 2^126.
_EXPAND = tl.constexpr("""
{
.reg .b32 a, b, s, m, n;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shl.b32 s, a, 4;
shr.u32 m, a, 2;
and.b32 n, m, 0x01C001C0;
lop3.b32 n, s, 0x80008000, n, 0xEA;
mul.rn.bf16x2 $0, n, $5;
shl.b32 s, b, 4;
shr.u32 m, b, 2;
and.b32 n, m, 0x01C001C0;
lop3.b32 n, s, 0x80008000, n, 0xEA;
mul.rn.bf16x2 $1, n, $6;
shr.u32 m, a, 6;
and.b32 n, m, 0x01C001C0;
lop3.b32 n, a, 0x80008000, n, 0xEA;
mul.rn.bf16x2 $2, n, $7;
shr.u32 m, b, 6;
and.b32 n, m, 0x01C001C0;
lop3.b32 n, b, 0x80008000, n, 0xEA;
mul.rn.bf16x2 $3, n, $8;
}
""")


GROUP = 256  # input columns whose eight scale bytes are one word; an iteration of the product


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One projection of E experts, laid out for `_experts`: what one iteration reads of a block of rows is contiguous.

    codes [E, in / 64, out, 32] uint8: byte j holds column j (low nibble) and 32 + j (high) of its 64; scales [E, in / 256, out] int64:
    byte i is the scale of columns 32 i ... 32 i + 31.
    """

    codes: Tensor
    scales: Tensor


def pack_experts(packed: Tensor, scale: Tensor) -> PackedExperts:
    """A checkpoint's packed [E, out, in / 2] and scale [E, out, in / 32] -> the kernels' layout; once, at load.

    Raises `ValueError` for widths that are no multiple of 256 and for scale bytes above 128 (weights above 12), whose expansion would
    leave bf16's range.
    """
    experts, out, half = packed.shape
    check_shape("scale", scale, experts, out, half // 16)
    if 2 * half % GROUP:
        raise ValueError(f"packed: {2 * half} input columns, expected a multiple of {GROUP}")
    if scale.numel() and int(scale.max()) > 128:
        raise ValueError(f"scale: byte {int(scale.max())}, expected at most 128")
    codes = torch.empty(experts, half // 32, out, 32, dtype=torch.uint8, device=packed.device)
    for e in range(experts):  # one at a time: the unpacked codes are twice the size
        columns = torch.stack((packed[e] & 15, packed[e] >> 4), -1).view(out, half // 32, 2, 32)
        codes[e] = (columns[:, :, 0] | columns[:, :, 1] << 4).transpose(0, 1)
    return PackedExperts(codes, scale.contiguous().view(torch.int64).transpose(1, 2).contiguous())


@triton.jit
def _rank(p_ids, p_counts, p_ranks, pairs, first, E: tl.constexpr, B: tl.constexpr):
    """Each pair's place among its expert's pairs, in no particular order."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.load(p_ids + i, mask=i < pairs, other=-1).to(tl.int32) - first
    here = (i < pairs) & (e >= 0) & (e < E)
    tl.store(p_ranks + i, tl.atomic_add(p_counts + tl.where(here, e, 0), 1, mask=here), mask=here)


@triton.jit
def _tile(p_counts, p_begins, p_tile_expert, p_tile_begin, tiles, E: tl.constexpr, EP: tl.constexpr, BN: tl.constexpr):
    """Where each expert's pairs begin, and the tiles; tiles past the last get expert -1."""
    o_e = tl.arange(0, EP)
    count = tl.load(p_counts + o_e, mask=o_e < E, other=0)
    begin = tl.cumsum(count, 0) - count
    own = (count + BN - 1) // BN
    first = tl.cumsum(own, 0) - own
    tl.store(p_begins + o_e, begin, mask=o_e < E)
    for j in range(0, tl.max(own)):
        tl.store(p_tile_expert + first + j, o_e, mask=j < own)
        tl.store(p_tile_begin + first + j, begin + j * BN, mask=j < own)
    for j in range(tl.sum(own), tiles, EP):
        tl.store(p_tile_expert + j + o_e, -1, mask=j + o_e < tiles)


@triton.jit
def _place(p_ids, p_begins, p_ranks, p_order, pairs, first, E: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.load(p_ids + i, mask=i < pairs, other=-1).to(tl.int32) - first
    here = (i < pairs) & (e >= 0) & (e < E)
    place = tl.load(p_begins + e, mask=here, other=0) + tl.load(p_ranks + i, mask=here, other=0)
    tl.store(p_order + place, i, mask=here)


@triton.jit
def _value(code, scale, dtype: tl.constexpr):
    """A code (0..15; bits: sign, exponent, exponent, mantissa) and its scale byte -> its value."""
    magnitude = code & 7
    bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)  # from code 2 on: 2^(e - 1) (1 + m / 2)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
    value = tl.where(code > 7, -value, value)
    return (value * ((scale & 255).to(tl.int32) << 23).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def _expand(codes, low, high, PTX: tl.constexpr, dtype: tl.constexpr):
    """codes [M, 32] uint8, low, high [M] scales in the lowest byte -> values of the low and of the high nibbles, [M, 32] each."""
    if PTX:
        low = (((low & 255).to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)[:, None].broadcast_to(codes.shape)
        high = (((high & 255).to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)[:, None].broadcast_to(codes.shape)
        return tl.inline_asm_elementwise(
            _EXPAND, "=r,=r,=r,=r,r,r,r,r,r", [codes, low, high], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.int32)
        return _value(wide & 15, low[:, None], dtype), _value(wide >> 4, high[:, None], dtype)


@triton.jit
def _experts(
    p_x,
    p_codes,
    p_scales,
    p_order,
    p_counts,
    p_begins,
    p_tile_expert,
    p_tile_begin,
    p_out,
    stride_x,
    beta,
    linear_beta,
    K: tl.constexpr,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BM output rows of one expert for a tile of BN pairs.

    GATED: x rows are tokens; gate rows i and up rows OUT / 2 + i together; the result of SiTU goes to the pair's place by expert.
    Otherwise x rows are places by expert, and the result goes to the pair's own row.
    """
    i_o, i_t = tl.program_id(0), tl.program_id(1)
    i_e = tl.load(p_tile_expert + i_t)
    if i_e < 0:
        return
    begin = tl.load(p_tile_begin + i_t)
    end = tl.load(p_begins + i_e) + tl.load(p_counts + i_e)
    place = begin + tl.arange(0, BN)
    m_n = place < end
    pair = tl.load(p_order + place, mask=m_n, other=0)
    row = pair // TOP_K if GATED else place
    o_m, o_k = i_o * BM + tl.arange(0, BM), tl.arange(0, 32)
    p_row = p_x + row.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    e = i_e.to(tl.int64)
    p_code = p_codes + e * (K // 2 * OUT) + o_m[:, None] * 32 + o_k[None, :]
    p_scale = p_scales + e * (K // 256 * OUT) + o_m
    dtype: tl.constexpr = p_x.dtype.element_ty

    y = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for b in tl.range(0, K // 256, num_stages=STAGES):
        s = tl.load(p_scale + b * OUT)
        if GATED:
            s_up = tl.load(p_scale + b * OUT + OUT // 2)
        for j in tl.static_range(4):
            x_low = tl.trans(tl.load(p_row + b * 256 + j * 64, mask=m_n[:, None], other=0.0))  # [32, BN]
            x_high = tl.trans(tl.load(p_row + b * 256 + j * 64 + 32, mask=m_n[:, None], other=0.0))
            codes = tl.load(p_code + (b * 4 + j) * (OUT * 32))
            w_low, w_high = _expand(codes, s >> 16 * j, s >> 16 * j + 8, PTX, dtype)
            y = tl.dot(w_low, x_low, acc=y, input_precision=PRECISION)
            y = tl.dot(w_high, x_high, acc=y, input_precision=PRECISION)
            if GATED:
                codes = tl.load(p_code + (b * 4 + j) * (OUT * 32) + OUT // 2 * 32)
                w_low, w_high = _expand(codes, s_up >> 16 * j, s_up >> 16 * j + 8, PTX, dtype)
                up = tl.dot(w_low, x_low, acc=up, input_precision=PRECISION)
                up = tl.dot(w_high, x_high, acc=up, input_precision=PRECISION)
    if GATED:
        # tanh(a) = 2 sigmoid(2 a) - 1
        y = beta * (2 * tl.sigmoid(y * (2 / beta)) - 1) * tl.sigmoid(y)
        if LIMITED:
            up = linear_beta * (2 * tl.sigmoid(up * (2 / linear_beta)) - 1)
        y = y * up
    width: tl.constexpr = OUT // 2 if GATED else OUT
    target = place if GATED else pair
    p_y = p_out + target.to(tl.int64)[:, None] * width + o_m[None, :]
    tl.store(p_y, tl.trans(y).to(p_out.dtype.element_ty), mask=m_n[:, None])


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


def block_tokens_for(pairs: int, experts: int) -> int:
    """Columns of a tile: about what an expert gets, so that few are padding; from 16 to 128."""
    return min(128, max(16, triton.next_power_of_2(-(-pairs // max(experts, 1)))))


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
    block_tokens: int | None = None,
    block_rows: int = 64,
    stages: int = 4,
    num_warps: int = 4,
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
    block_rows = min(block_rows, latent & -latent, twice // 2 & -(twice // 2))  # a power of two that divides both widths
    bn = block_tokens or block_tokens_for(pairs, num_experts)
    bf16 = x.dtype == torch.bfloat16
    ptx = bf16 and x.is_cuda and torch.version.hip is None if ptx is None else ptx
    tiles = pairs // bn + min(experts, pairs)

    def integers(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=x.device)

    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    begins, ranks, order, tile_expert, tile_begin = integers(experts), integers(pairs), integers(pairs), integers(tiles), integers(tiles)
    grid = (triton.cdiv(pairs, 256),)
    _rank[grid](ids, counts, ranks, pairs, first_expert, E=experts, B=256)
    _tile[(1,)](counts, begins, tile_expert, tile_begin, tiles, E=experts, EP=triton.next_power_of_2(experts), BN=bn)
    _place[grid](ids, begins, ranks, order, pairs, first_expert, E=experts, B=256)
    hidden = torch.empty(pairs, twice // 2, dtype=x.dtype, device=x.device)
    rows = torch.empty(pairs, latent, dtype=x.dtype, device=x.device)
    plan = (order, counts, begins, tile_expert, tile_begin)
    options = {
        "TOP_K": top_k,
        "LIMITED": linear_beta is not None,
        "BM": block_rows,
        "BN": bn,
        "STAGES": stages,
        "PTX": ptx,
        "PRECISION": None if bf16 else "ieee",
        "num_warps": num_warps,
    }
    situ = (beta, linear_beta or 1.0)
    _experts[(twice // 2 // block_rows, tiles)](
        x, w13.codes, w13.scales, *plan, hidden, x.stride(0), *situ, K=latent, OUT=twice, GATED=True, **options
    )
    _experts[(latent // block_rows, tiles)](
        hidden, w2.codes, w2.scales, *plan, rows, twice // 2, *situ, K=twice // 2, OUT=latent, GATED=False, **options
    )
    block = min(1024, triton.next_power_of_2(latent))
    _combine[(tokens, triton.cdiv(latent, block))](
        rows, ids, weights, out, first_expert, latent, E=experts, TOP_K=top_k, B=block, num_warps=4
    )
    return out
