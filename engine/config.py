"""The engine's knobs. Built by `app` from `ServiceConfig` (and, for pool sizes, from the byte budget); trusted inside."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.lineage import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One data-parallel group's limits. Units: tokens, pages, slots."""

    max_model_len: int  # longest prompt + generation of one request
    page_size: int = 64  # tokens in an MLA page
    num_pages: int  # pages of the pool
    num_slots: int  # KDA state slots: running rows + cached checkpoints
    max_running: int = 64  # rows in one step
    max_batched_tokens: int = 2048  # token budget of a step
    max_queued: int = 256  # waiting requests per group before QueueFull
    prefix_cache: bool = True
    checkpoint_interval: int = 8192  # tokens between interval checkpoints of a prefill
    checkpoint_decode_interval: int = 1024  # the same behind the known tokens: what a moved stream computes again at most
    block_size: int = BLOCK  # of lineages; smaller only where tests need short prompts
    shared_prefixes: tuple[bytes, ...] = ()  # beginnings of prompts that all tenants share, as little-endian u32
    run_ahead: int = 1  # steps submitted beyond the one whose result is awaited: 0 or 1

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "num_pages",
            "num_slots",
            "max_running",
            "max_batched_tokens",
            "max_queued",
            "checkpoint_interval",
            "checkpoint_decode_interval",
            "block_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}: at least 2 is needed (one prompt token, one generated)")
        if self.run_ahead not in (0, 1):
            raise ConfigError(f"run_ahead is {self.run_ahead}: 0 or 1 is needed")
