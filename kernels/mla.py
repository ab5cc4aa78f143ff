"""Multi-head latent attention over paged latents, in the absorbed form: one latent-wide key and value per token for all heads.

score[t, h, s] = query[t, h] . latent[s] * scale for s <= t; out[t, h] = sum_s softmax(score)_s latent[s][:value_dim]. fp32 inside.
Source: DeepSeek-V2 (arXiv 2405.04434) absorption; K3 keeps the shared key dims unrotated (facts on K3's architecture, section 7).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.backend import Backend, use_triton
from kernels.checks import check_device, check_shape

QUERY_BLOCK = 256  # tokens whose scores are held at once


def mla_decode(
    query: Tensor,
    latents: Tensor,
    page_tables: Tensor,
    lengths: Tensor,
    value_dim: int,
    scale: float,
    backend: Backend = "auto",
) -> Tensor:
    """One new token per sequence: query [N, heads, D], latents [pages, page_size, D] -> [N, heads, value_dim].

    fp32 from the reference, query's dtype from the kernel.

    Sequence i attends positions [0, lengths[i]) in the pages page_tables[i] ([N, P]); its own latent is already there.
    """
    _check(query, latents, page_tables, lengths=lengths)
    if use_triton(backend, query, value_dim, query.shape[-1] - value_dim):
        from kernels.mla_decode_triton import launch

        return launch(query, latents, page_tables, lengths, value_dim, scale)
    keys, valid = _gather(latents, page_tables, lengths)
    scores = (query.float() @ keys.transpose(1, 2)) * scale  # [N, heads, S]
    p = torch.softmax(scores.masked_fill(~valid.unsqueeze(1), float("-inf")), -1)
    return p @ keys[..., :value_dim]


def mla_prefill(
    query: Tensor,
    latents: Tensor,
    page_tables: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor,
    value_dim: int,
    scale: float,
    query_block: int = QUERY_BLOCK,
) -> Tensor:
    """A run of new tokens per sequence: query [T, heads, D], cu_seqlens [N + 1], lengths [N] after this step -> [T, heads, value_dim] fp32.

    The tokens of sequence i are its last ones; each attends every position up to its own.
    """
    _check(query, latents, page_tables, lengths=lengths, cu_seqlens=cu_seqlens)
    out = torch.empty(*query.shape[:-1], value_dim, dtype=torch.float32, device=query.device)
    bounds, page_size = cu_seqlens.tolist(), latents.shape[1]
    for i, length in enumerate(lengths.tolist()):
        pages = page_tables[i, : -(-length // page_size)]
        keys = latents[pages].flatten(0, 1)[:length].float()  # [S, D]
        for begin in range(bounds[i], bounds[i + 1], query_block):
            end = min(begin + query_block, bounds[i + 1])
            seen = length - (bounds[i + 1] - end)  # positions that the block's last token attends
            position = torch.arange(length - (bounds[i + 1] - begin), seen, device=query.device)
            scores = torch.einsum("thd,sd->hts", query[begin:end].float(), keys[:seen]) * scale
            future = torch.arange(seen, device=query.device) > position[:, None]
            p = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
            out[begin:end] = torch.einsum("hts,sd->thd", p, keys[:seen, :value_dim])
    return out


def mla_prefill_expanded(
    query: Tensor,
    expanded: Tensor,
    shared_key: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    nope: int,
    scale: float,
    backend: Backend = "auto",
) -> Tensor:
    """The same runs with keys and values expanded per head: a third of the arithmetic, for many tokens at once.

    query [T, heads, nope + shared], expanded [S, heads, nope + value] (keys, then values), shared_key [S, shared] -> [T, heads, value].
    cu_queries, cu_keys [N + 1]: sequence i has queries [cu_queries[i], cu_queries[i + 1]) and keys likewise, its queries being its last
    positions. fp32 from the reference, query's dtype from the kernel.
    """
    heads, shared = query.shape[1], query.shape[2] - nope
    check_shape("expanded", expanded, None, heads, None)
    check_shape("shared_key", shared_key, expanded.shape[0], shared)
    check_shape("cu_keys", cu_keys, cu_queries.shape[0])
    check_device(query, expanded=expanded, shared_key=shared_key, cu_queries=cu_queries, cu_keys=cu_keys)
    if use_triton(backend, query, nope, shared, expanded.shape[2] - nope):
        from kernels.mla_prefill_triton import launch

        return launch(query, expanded, shared_key, cu_queries, cu_keys, nope, scale)
    out = torch.empty(*query.shape[:-1], expanded.shape[2] - nope, dtype=torch.float32, device=query.device)
    queries, keys = cu_queries.tolist(), cu_keys.tolist()
    for (begin, end), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
        key = torch.cat((expanded[first:last, :, :nope], shared_key[first:last, None].expand(-1, heads, -1)), -1).float()
        scores = torch.einsum("thd,shd->hts", query[begin:end].float(), key) * scale
        position = torch.arange(last - first - (end - begin), last - first, device=query.device)
        future = torch.arange(last - first, device=query.device) > position[:, None]
        p = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        out[begin:end] = torch.einsum("hts,shd->thd", p, expanded[first:last, :, nope:].float())
    return out


def _gather(latents: Tensor, page_tables: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """-> keys [N, S, D] fp32, zeros where there is none (unwritten memory may hold anything), valid [N, S]."""
    page_size = latents.shape[1]
    keys = latents[page_tables].flatten(1, 2).float()
    valid = torch.arange(page_tables.shape[1] * page_size, device=latents.device) < lengths[:, None]
    return keys.masked_fill(~valid.unsqueeze(-1), 0), valid


def _check(query: Tensor, latents: Tensor, page_tables: Tensor, **indices: Tensor) -> None:
    check_shape("latents", latents, None, None, query.shape[-1])
    check_shape("page_tables", page_tables, indices["lengths"].shape[0], None)
    check_device(query, latents=latents, page_tables=page_tables, **indices)
