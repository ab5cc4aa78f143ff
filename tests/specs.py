"""A replica's spec for toy executors: no checkpoint behind it."""

from __future__ import annotations

from typing import Any

from deployments.spec import EngineSpec, ShardSpec
from tests.engine.driver import config


def engine_spec(*, shards: int = 1, engine: dict[str, Any] | None = None, **more: Any) -> EngineSpec:
    """`engine`: changes to the engine's configuration; `more`: other fields of the spec."""
    toy = ShardSpec(
        model_dir="",
        vocab_size=1024,
        tokenizer_dir=None,
        tp=shards,
        shards=shards,
        device="cpu",
        dtype="float32",
        page_size=4,
        num_pages=128,
        num_slots=32,
        num_cpus=0,
        threads=1,
        step_timeout_s=5,
        heartbeat_s=1,
        ping_timeout_s=1,
    )
    return EngineSpec(shards=toy, engine=config(**engine or {}), fingerprint="toy", **more)
