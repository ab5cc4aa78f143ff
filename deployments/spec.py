"""What one engine replica is made of: plain values, computed by `app` from `ServiceConfig` and the checkpoint's config."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.checkpoint import Checkpoint
from cluster.weight_reader import LoadSettings
from engine.bundle import Schema
from engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """One replica's shards. `shards` ranks hold all experts between them; `tp` consecutive ranks share the heads of one DP group."""

    model_dir: str  # a folder, file:///path or s3://bucket/prefix
    model_endpoint_url: str | None = None
    checkpoint: Checkpoint | None = field(default=None, repr=False)  # None: to be checked when it is loaded
    loading: LoadSettings = field(default_factory=LoadSettings)
    vocab_size: int
    tokenizer_dir: str | None  # for grammars; None: token ids only, so nothing is ever constrained
    tp: int
    shards: int
    device: str  # "cpu" | "cuda"
    dtype: str  # compute dtype of weights and latents: "float32" | "bfloat16"
    page_size: int
    num_pages: int
    num_slots: int
    num_cpus: float  # logical CPUs a shard actor reserves
    threads: int  # torch intra-op threads of a shard
    step_timeout_s: float  # a step, or silence between ranks, longer than this is a hang
    heartbeat_s: float  # period of pings and of words to idle ranks
    ping_timeout_s: float  # a shard that does not answer a ping for so long is a hang

    @property
    def num_groups(self) -> int:
        return self.shards // self.tp

    @property
    def num_gpus(self) -> int:
        return 1 if self.device == "cuda" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What becomes of states outside of the device: how they are cut, when they move, where they are kept."""

    schema: Schema
    segment_tokens: int  # of one stored run of latents; a multiple of the lineages' block
    stake_tokens: int  # computing so many tokens again costs more than moving a state
    export_concurrency: int  # bundles on their way out of one replica at a time
    import_timeout_s: float  # longest wait for a stored object
    store_bytes: int  # of one node's holder
    ttl_s: float  # of bundles and records that nobody uses
    durable_url: str | None
    durable_endpoint_url: str | None
    mirror: bool  # a second copy on another node, for every bundle of a pinned session


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySpec:
    """How often a lost shard group is formed again before its replica gives up."""

    attempts: int = 5
    window_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    shards: ShardSpec
    engine: EngineConfig
    state: StateSpec | None = None  # None: states never leave the device
    recovery: RecoverySpec = RecoverySpec()
    fingerprint: str  # hex digest of the model's identity: the root of every lineage
