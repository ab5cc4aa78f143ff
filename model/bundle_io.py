"""A bundle's arrays out of and into the device pools: the wire layout is logical, the pools' layout is the device's.

Arrays are numpy: torch tensors take ten times as long through the object store, and a tensor over a fetched array could corrupt the stored
object. So everything is copied, on its way out and on its way in. bfloat16 travels as uint16; `engine.bundle.Schema` says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.layers import copy_layers
from model.state import StatePools


def export_recurrent(pools: StatePools, slot: int) -> dict[str, np.ndarray]:
    """The local heads' state of one slot: `kda` [layers, heads, K, V] and `conv` [layers, 3 (q, k, v), heads, K, taps - 1]."""
    kda = torch.empty_like(pools.kda[:, slot], memory_format=torch.contiguous_format)
    copy_layers(pools.kda[:, slot], kda)
    return {"kda": _to_numpy(kda) if kda.is_cuda else kda.numpy(), "conv": _to_numpy(_conv_by_head(pools, slot))}


def export_latents(pools: StatePools, pages: Sequence[int], start: int, stop: int) -> dict[str, np.ndarray]:
    """Tokens [start, stop) of the latents: `latents` [layers, tokens, latent_dim]. `pages` cover the tokens, the page of `start` first."""
    index = torch.tensor(pages, dtype=torch.int64, device=pools.latents.device)
    offset = start % pools.page_size
    tokens = pools.latents[:, index].flatten(1, 2)[:, offset : offset + stop - start]
    if tokens.shape[1] != stop - start:
        raise ValueError(f"{len(pages)} pages of {pools.page_size} do not cover tokens [{start}, {stop})")
    return {"latents": _to_numpy(tokens)}


def import_recurrent(pools: StatePools, slot: int, first_head: int, part_first: int, arrays: Mapping[str, np.ndarray]) -> int:
    """Those heads of a part that begins at head `part_first` which this process, that begins at `first_head`, has. Returns how many."""
    heads, count = pools.kda.shape[2], arrays["kda"].shape[1]
    low, high = max(first_head, part_first), min(first_head + heads, part_first + count)
    if low >= high:
        return 0
    theirs, ours = slice(low - part_first, high - part_first), slice(low - first_head, high - first_head)
    pools.kda[:, slot, ours] = _to_torch(arrays["kda"][:, theirs], pools.kda)
    _conv_by_head(pools, slot)[:, :, ours] = _to_torch(arrays["conv"][:, :, theirs], pools.conv)
    return high - low


def import_latents(pools: StatePools, pages: Sequence[int], start: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Tokens from `start` on into `pages`, the page of `start` first. Raises ValueError when they do not fit."""
    tokens = _to_torch(arrays["latents"], pools.latents)
    size, count = pools.page_size, tokens.shape[1]
    offset = start % size
    if len(pages) * size < offset + count:
        raise ValueError(f"{count} tokens from {start} do not fit {len(pages)} pages of {size}")
    index = torch.tensor(pages, dtype=torch.int64, device=tokens.device)
    head = min(-offset % size, count)  # tokens that fill up the page of `start`
    whole = (count - head) // size
    first = 1 if head else 0
    if head:
        pools.latents[:, pages[0], offset : offset + head] = tokens[:, :head]
    if whole:
        body = tokens[:, head : head + whole * size].unflatten(1, (whole, size))
        pools.latents.index_copy_(1, index[first : first + whole], body)
    if rest := count - head - whole * size:
        pools.latents[:, pages[first + whole], :rest] = tokens[:, count - rest :]


def _conv_by_head(pools: StatePools, slot: int) -> Tensor:
    """A view of one slot's conv state with the wire's axes: [layers, 3, heads, K, taps - 1]."""
    layers, heads, k = pools.kda.shape[0], pools.kda.shape[2], pools.kda.shape[3]
    return pools.conv[:, slot].view(layers, -1, 3, heads, k).permute(0, 2, 3, 4, 1)


def _to_numpy(x: Tensor) -> np.ndarray:
    """A private, contiguous copy. From a GPU into page-locked memory, which the copy engine fills several times as fast."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)
    return (out.view(torch.uint16) if out.dtype is torch.bfloat16 else out).numpy()


def _to_torch(a: np.ndarray, like: Tensor) -> Tensor:
    """A private copy on the pool's device. Raises ValueError for another dtype: a state is never converted silently."""
    dtype = torch.bfloat16 if a.dtype == np.uint16 else torch.from_numpy(np.empty(0, a.dtype)).dtype
    if dtype is not like.dtype:
        raise ValueError(f"stored as {dtype}, this pool holds {like.dtype}")
    staged = torch.empty(a.shape, dtype=torch.uint16 if dtype is torch.bfloat16 else dtype, pin_memory=like.is_cuda)
    np.copyto(staged.numpy(), a)
    return staged.view(dtype).to(like.device, non_blocking=True)  # in the current stream's order; pinned blocks wait for their stream
