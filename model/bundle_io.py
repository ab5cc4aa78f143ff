"""A bundle's arrays out of and into the device pools: the wire layout is logical, the pools' layout is the device's.

Arrays are numpy: torch tensors take ten times as long through the object store, and a tensor over a fetched array could corrupt the stored
object. So everything is copied, on its way out and on its way in. bfloat16 travels as uint16; `engine.bundle.Schema` says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from model.state import StatePools


def export_recurrent(pools: StatePools, slot: int) -> dict[str, np.ndarray]:
    """The local heads' state of one slot: `kda` [layers, heads, K, V] and `conv` [layers, 3 (q, k, v), heads, K, taps - 1]."""
    return {"kda": _to_numpy(pools.kda[:, slot]), "conv": _to_numpy(_conv_by_head(pools, slot))}


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
    size, done = pools.page_size, 0
    for page in pages:
        offset = (start + done) % size
        count = min(size - offset, tokens.shape[1] - done)
        pools.latents[:, page, offset : offset + count] = tokens[:, done : done + count]
        done += count
    if done != tokens.shape[1]:
        raise ValueError(f"{tokens.shape[1]} tokens from {start} do not fit {len(pages)} pages of {size}")


def _conv_by_head(pools: StatePools, slot: int) -> Tensor:
    """A view of one slot's conv state with the wire's axes: [layers, 3, heads, K, taps - 1]."""
    layers, heads, k = pools.kda.shape[0], pools.kda.shape[2], pools.kda.shape[3]
    return pools.conv[:, slot].view(layers, -1, 3, heads, k).permute(0, 2, 3, 4, 1)


def _to_numpy(x: Tensor) -> np.ndarray:
    """A private, contiguous copy."""
    x = x.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()


def _to_torch(a: np.ndarray, like: Tensor) -> Tensor:
    """A private copy on the pool's device. Raises ValueError for another dtype: a state is never converted silently."""
    tensor = torch.from_numpy(np.array(a, copy=True))
    if tensor.dtype is torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.dtype is not like.dtype:
        raise ValueError(f"stored as {tensor.dtype}, this pool holds {like.dtype}")
    return tensor.to(like.device)
