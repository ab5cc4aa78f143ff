"""How many pages and state slots fit a byte budget. The allocator and every plan ahead of it share these functions."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBytes:
    """Bytes that one shard spends: per page of MLA latents, per KDA state slot (recurrent + conv)."""

    page: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    num_pages: int
    num_slots: int


def pool_sizes(
    cost: PoolBytes, *, budget: int, page_size: int, max_running: int, max_model_len: int, num_pages: int | None, num_slots: int | None
) -> PoolSizes:
    """Pages and slots of one shard within `budget` bytes.

    Slots first: one for each running row and as many again for cached checkpoints, but at most half of the budget; the rest is pages.
    A figure that the operator gave is taken as it is. Raises ConfigError when not even one request of `max_model_len` tokens fits.
    """
    if num_slots is None:
        num_slots = max(2, min(2 * max_running, budget // 2 // cost.slot))
    if num_pages is None:
        num_pages = max(0, budget - num_slots * cost.slot) // cost.page
    need = -(-max_model_len // page_size)
    if num_pages < need:
        raise ConfigError(
            f"one request of max_model_len={max_model_len} needs {need} pages of {page_size} tokens, but the cache budget of "
            f"{budget:,} bytes a shard holds {num_pages} pages ({cost.page:,} B each) beside {num_slots} slots ({cost.slot:,} B each): "
            "raise cache_bytes or lower max_model_len"
        )
    if num_slots < 2:
        raise ConfigError(f"num_slots={num_slots}: at least 2 are needed (one running row and one checkpoint)")
    return PoolSizes(num_pages=num_pages, num_slots=num_slots)


def pool_bytes(model: ModelConfig, *, page_size: int, tp_size: int, latent_bytes: int) -> PoolBytes:
    """What a page and a slot cost one shard: latents are whole on every rank of a TP group, KDA state is fp32 and of the local heads.

    `latent_bytes`: bytes of a latent's element; convolution inputs have the same, but at least 2.
    """
    return PoolBytes(
        page=page_size * model.mla_token_bytes(latent_bytes),
        slot=(model.kda_state_bytes() + model.conv_state_bytes(max(2, latent_bytes))) // tp_size,
    )
