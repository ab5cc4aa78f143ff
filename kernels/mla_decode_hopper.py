"""MLA decode for NVIDIA's Hopper, in Gluon: the same sums as `kernels.mla_decode_triton`, with layouts and copies laid down by hand.

A program has BH heads and a stretch of one sequence. Both warp groups share every product, by columns: the scores by tokens, the output by
value channels (Triton's own layout for chained products has both compute all scores when a program has 64 heads). Latent tiles of one
page each come by the copy engine into two buffers, one being read while the other fills.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.target import is_amd

BH, BS, WARPS = 64, 64, 8
PROCESSORS = 132  # a program fills one: its tiles take all of the shared memory
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name until Triton 3.6
LATENTS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _fetch(
    d_values,
    d_rest,
    p_table,
    values,
    rest,
    arrived,
    tile,
    tiles,
    first,
    V: gl.constexpr,
    R: gl.constexpr,
    PAGE: gl.constexpr,
    BS: gl.constexpr,
):
    """Tile `tile` of the stretch into its buffer, if there is one."""
    if tile < tiles:
        s = first + tile * BS
        row = gl.load(p_table + s // PAGE).to(gl.int32) * PAGE + s % PAGE
        bar = arrived.index(tile % 2)
        mbarrier.expect(bar, BS * (V + R) * 2)
        _copy_in(d_values, [row, 0], bar, values.index(tile % 2))
        _copy_in(d_rest, [row, V], bar, rest.index(tile % 2))


@gluon.jit
def _decode(
    p_query,
    d_values,
    d_rest,
    p_tables,
    p_lengths,
    p_out,
    p_lse,
    scale,
    stride_query_n,
    stride_query_h,
    stride_table,
    H: gl.constexpr,
    V: gl.constexpr,
    R: gl.constexpr,
    PAGE: gl.constexpr,
    SPLITS: gl.constexpr,
    BH: gl.constexpr,
    BS: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Partial out [N, SPLITS, H, V] fp32 and log2 of the sums of exponentials [N, SPLITS, H]."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, BS // 2, 16])
    mixed: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, V // 2 if V < 512 else 256, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mixed, k_width=2)
    dtype: gl.constexpr = p_query.dtype.element_ty

    i_h, i_s, i_n = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    length = gl.load(p_lengths + i_n).to(gl.int32)
    each = gl.cdiv(gl.cdiv(length, SPLITS), BS) * BS
    first = i_s * each
    last = gl.minimum(first + each, length)
    tiles = gl.cdiv(gl.maximum(last - first, 0), BS)
    p_table = p_tables + i_n * stride_table

    query_v = gl.allocate_shared_memory(dtype, [BH, V], SHARED)
    query_r = gl.allocate_shared_memory(dtype, [BH, R], SHARED)
    values = gl.allocate_shared_memory(dtype, [2, BS, V], SHARED)
    rest = gl.allocate_shared_memory(dtype, [2, BS, R], SHARED)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(0), count=1)
    mbarrier.init(arrived.index(1), count=1)
    _fetch(d_values, d_rest, p_table, values, rest, arrived, 0, tiles, first, V, R, PAGE, BS)
    _fetch(d_values, d_rest, p_table, values, rest, arrived, 1, tiles, first, V, R, PAGE, BS)

    h_wide = i_h * BH + gl.arange(0, BH, gl.SliceLayout(1, wide))
    p_wide = p_query + i_n * stride_query_n + h_wide[:, None] * stride_query_h + gl.arange(0, V, gl.SliceLayout(0, wide))[None, :]
    query_v.store(gl.load(p_wide, mask=(h_wide < H)[:, None], other=0.0))
    h_narrow = i_h * BH + gl.arange(0, BH, gl.SliceLayout(1, narrow))
    p_narrow = p_query + i_n * stride_query_n + h_narrow[:, None] * stride_query_h + V + gl.arange(0, R, gl.SliceLayout(0, narrow))[None, :]
    query_r.store(gl.load(p_narrow, mask=(h_narrow < H)[:, None], other=0.0))
    fence_async_shared()

    o_s = gl.arange(0, BS, gl.SliceLayout(0, scores))
    top = gl.full([BH], -1e30, gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([BH], 0.0, gl.float32, gl.SliceLayout(1, scores))
    nothing = gl.zeros([BH, BS], gl.float32, scores)
    acc = gl.zeros([BH, V], gl.float32, mixed)
    for tile in range(tiles):
        own_v, own_r = values.index(tile % 2), rest.index(tile % 2)
        mbarrier.wait(arrived.index(tile % 2), (tile // 2) & 1)
        left = last - first - tile * BS
        if left < BS:  # behind the last token the page may hold anything, and 0 * NaN is NaN
            o_t = gl.arange(0, BS, gl.SliceLayout(1, wide))
            own_v.store(gl.where((o_t < left)[:, None], own_v.load(wide), 0.0).to(dtype))
            fence_async_shared()
        score = warpgroup_mma(query_v, own_v.permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma(query_r, own_r.permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        score = gl.where((o_s < left)[None, :], score * scale, -float("inf"))
        new_top = gl.maximum(top, gl.max(score, 1))
        keep = gl.exp2(top - new_top)
        p = gl.exp2(score - new_top[:, None])
        total = total * keep + gl.sum(p, 1)
        top = new_top
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, mixed))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p.to(dtype), weights), own_v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _fetch(d_values, d_rest, p_table, values, rest, arrived, tile + 2, tiles, first, V, R, PAGE, BS)
    mbarrier.invalidate(arrived.index(0))
    mbarrier.invalidate(arrived.index(1))

    row = (i_n * SPLITS + i_s) * H + i_h * BH
    o_h = gl.arange(0, BH, gl.SliceLayout(1, scores))
    here = i_h * BH + o_h < H
    gl.store(p_lse + row + o_h, gl.where(total > 0, top + gl.log2(gl.maximum(total, 1e-30)), -float("inf")), mask=here)
    share = gl.convert_layout(1 / gl.maximum(total, 1e-30), gl.SliceLayout(1, mixed))
    o_h = gl.arange(0, BH, gl.SliceLayout(1, mixed))
    p_to = p_out + (row + o_h[:, None]) * V + gl.arange(0, V, gl.SliceLayout(0, mixed))[None, :]
    gl.store(p_to, (acc * share[:, None]).to(p_out.dtype.element_ty), mask=(i_h * BH + o_h < H)[:, None])


def fits(query: Tensor, latents: Tensor, value_dim: int) -> bool:
    """Whether this kernel covers it: a Hopper GPU, bf16, more heads than half a block, whole pages a tile, K3's widths."""
    page, width = latents.shape[1:]
    return (
        query.dtype == torch.bfloat16
        and query.shape[1] > BH // 2
        and page % BS == 0
        and (value_dim, width - value_dim) == (512, 64)
        and not is_amd()
        and torch.cuda.get_device_capability(query.device)[0] == 9
    )


def splits_for(sequences: int, heads: int, capacity: int) -> int:
    """As many stretches as give every multiprocessor one program, of four tiles at least."""
    programs = sequences * -(-heads // BH)
    return max(1, min(PROCESSORS // programs, -(-capacity // (4 * BS)), 128))


def launch(
    query: Tensor, latents: Tensor, page_tables: Tensor, lengths: Tensor, value_dim: int, scale: float, splits: int
) -> tuple[Tensor, Tensor]:
    """Partial outputs [N, splits, heads, value_dim] (fp32; query's dtype with one split) and log2 sums [N, splits, heads]."""
    sequences, heads, width = query.shape
    out = torch.empty(sequences, splits, heads, value_dim, dtype=query.dtype if splits == 1 else torch.float32, device=query.device)
    lse = torch.empty(sequences, splits, heads, dtype=torch.float32, device=query.device)
    rows = latents.flatten(0, 1)
    d_values, d_rest = (TensorDescriptor.from_tensor(rows, [BS, n], LATENTS) for n in (value_dim, width - value_dim))
    _decode[(-(-heads // BH), splits, sequences)](
        query,
        d_values,
        d_rest,
        page_tables,
        lengths,
        out,
        lse,
        scale,
        query.stride(0),
        query.stride(1),
        page_tables.stride(0),
        H=heads,
        V=value_dim,
        R=width - value_dim,
        PAGE=latents.shape[1],
        SPLITS=splits,
        BH=BH,
        BS=BS,
        SHARED=LATENTS,
        num_warps=WARPS,
    )
    return out, lse
