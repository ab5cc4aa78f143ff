"""A bundle's arrays out of and into the device pools: the wire layout is logical, the pools' layout is the device's.

Arrays are numpy: torch tensors take ten times as long through the object store, and a tensor over a fetched array could corrupt the stored
object, so everything is copied on its way in. bfloat16 travels as uint16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.state import StatePools

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def export_recurrent(pools: StatePools, slot: int) -> dict[str, np.ndarray]:
    """The local heads' state of one slot: `kda` [layers, heads, K, V] and `conv` [layers, 3 (q, k, v), heads, K, taps - 1]."""
    layers, heads, k = pools.kda.shape[0], pools.kda.shape[2], pools.kda.shape[3]
    conv = pools.conv[:, slot].view(layers, -1, 3, heads, k)
    return {"kda": _to_numpy(pools.kda[:, slot]), "conv": _to_numpy(conv.permute(0, 2, 3, 4, 1))}


def export_latents(pools: StatePools, pages: Sequence[int], start: int, stop: int) -> dict[str, np.ndarray]:
    """Tokens [start, stop) of the latents: `latents` [layers, tokens, latent_dim]. `pages` cover the tokens, the first one's page first."""
    size = pools.page_size
    index = torch.tensor(pages, dtype=torch.int64, device=pools.latents.device)
    first = start % size
    rows = pools.latents[:, index].flatten(1, 2)[:, first : first + stop - start]
    return {"latents": _to_numpy(rows)}


def import_recurrent(pools: StatePools, slot: int, first_head: int, arrays: Mapping[str, np.ndarray], part_first: int) -> None:
    """Those heads of one part, of heads [part_first, …), that this process has: heads [first_head, …)."""
    heads = pools.kda.shape[2]
    have = arrays["kda"].shape[1]
    low, high = max(first_head, part_first), min(first_head + heads, part_first + have)
    if low >= high:
        return
    source, target = slice(low - part_first, high - part_first), slice(low - first_head, high - first_head)
    pools.kda[:, slot, target] = _to_torch(arrays["kda"][:, source], pools.kda)
    layers, k = pools.kda.shape[0], pools.kda.shape[3]
    conv = pools.conv[:, slot].view(layers, -1, 3, heads, k)
    conv[:, :, :, target] = _to_torch(arrays["conv"][:, :, source], pools.conv).permute(0, 4, 1, 2, 3)


def import_latents(pools: StatePools, pages: Sequence[int], start: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Tokens [start, …) into `pages`, the page of token `start` first."""
    rows = _to_torch(arrays["latents"], pools.latents)
    size, offset, done = pools.page_size, start % pools.page_size, 0
    for page in pages:
        count = min(size - offset, rows.shape[1] - done)
        pools.latents[:, page, offset : offset + count] = rows[:, done : done + count]
        done, offset = done + count, 0


def logical_shapes(config: ModelConfig) -> dict[str, int]:
    """The sizes of a bundle's schema (`engine.bundle.Schema`)."""
    return {
        "kda_layers": len(config.kda_layers),
        "heads": config.kda_heads,
        "head_dim": config.kda_head_dim,
        "conv_taps": config.conv_size,
        "mla_layers": len(config.mla_layers),
        "latent_dim": config.latent_dim,
    }


def _to_numpy(x: Tensor) -> np.ndarray:
    x = x.contiguous().cpu()
    return (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()


def _to_torch(a: np.ndarray, like: Tensor) -> Tensor:
    """A private copy on the pool's device. Raises ValueError for another dtype: a state is never converted silently."""
    tensor = torch.from_numpy(np.array(a, copy=True))
    if tensor.dtype is torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.dtype is not like.dtype:
        raise ValueError(f"stored as {DTYPES.get(tensor.dtype, tensor.dtype)}, this pool holds {DTYPES.get(like.dtype, like.dtype)}")
    return tensor.to(like.device)
