"""`ServiceConfig`: all that an operator may choose, validated once, frozen. The one argument of `app:deployment`.

The same names work as `serve run app:deployment model=DIR tp=2` (every value arrives as a string) and under `args:` in
`ray_config.yaml`. No environment variable changes any of it.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from app.pricing import LIST_PRICES, Price
from engine.lineage import BLOCK


def _names(value: Any) -> Any:
    """`a,b` or a JSON list, as the command line gives it, to a list."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        return json.loads(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _mapping(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _blank_is_none(value: Any) -> Any:
    """`none` and an empty string on the command line say what `null` says in YAML."""
    return None if isinstance(value, str) and value.strip().lower() in ("", "none", "null") else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
MaybeInt = Annotated[PositiveInt | None, BeforeValidator(_blank_is_none)]
MaybeText = Annotated[str | None, BeforeValidator(_blank_is_none)]
MaybePath = Annotated[Path | None, BeforeValidator(_blank_is_none)]


class ServiceConfig(BaseModel):
    """Everything that may be configured. Units: tokens, bytes, seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    # What is served
    model: MaybeText = Field(
        None, description="released layout in a folder, file:///path or s3://bucket/prefix; none = a tiny random K3 made on first start"
    )
    model_endpoint_url: MaybeText = Field(None, description="of an S3-compatible server that has the model; none = AWS")
    tokenizer: MaybePath = Field(None, description="directory with tiktoken.model and tokenizer_config.json; none = beside the model")
    served_model_name: str = Field("kimi-k3", min_length=1, description="the id clients use; several clients look for `kimi-k3` in it")
    aliases: Names = Field((), description="further ids that mean the same model")

    # How it is spread
    replicas: PositiveInt = Field(1, description="engine replicas, each with its own shards")
    tp: MaybeInt = Field(None, description="shards that split the heads of one sequence; must divide both head counts")
    ep: MaybeInt = Field(None, description="shards in all, each holding a share of the experts; a multiple of tp; none = tp")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = cuda where Ray sees accelerators")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="compute dtype; auto = float32 on CPU, bfloat16 on cuda")
    shard_num_cpus: float = Field(0.5, ge=0, description="logical CPUs that Ray reserves for one shard")

    # Limits of one data-parallel group
    max_model_len: MaybeInt = Field(None, description="longest prompt + generation; none = the model's, bounded by the page pool")
    page_size: PositiveInt = Field(64, description="tokens in one page of MLA latents")
    num_pages: MaybeInt = Field(None, description="pages of the pool; none = from cache_bytes")
    num_slots: MaybeInt = Field(None, description="KDA state slots: running rows and cached checkpoints; none = from cache_bytes")
    cache_bytes: ByteSize = Field(ByteSize(256 * 2**20), gt=0, description="bytes a shard gives to pages and slots, e.g. 8GiB")
    max_running: PositiveInt = Field(64, description="rows in one step")
    max_batched_tokens: PositiveInt = Field(2048, description="token budget of one step")
    max_queued: PositiveInt = Field(256, description="waiting requests before 429")
    checkpoint_interval: PositiveInt = Field(8192, description="tokens between state checkpoints of a prefill")
    checkpoint_decode_interval: MaybeInt = Field(
        None, description="generated tokens between state checkpoints: what a stream that moves computes again; none = by bytes of state"
    )
    prefix_cache: bool = Field(True, description="reuse the state of shared prompt prefixes")
    shared_prefixes: MaybePath = Field(
        None, description="JSON file: array of {messages, tools, …} that prompts of all tenants may begin with and share the states of"
    )
    run_ahead: int = Field(1, ge=0, le=1, description="steps submitted before the last result is known")

    # Stored states: sessions that outlive replicas, shards and, with durable_url, the cluster
    state_store: bool = Field(True, description="keep states outside of the shards; off: a lost shard or replica means prefilling again")
    store_bytes: ByteSize = Field(ByteSize(2 * 2**30), gt=0, description="bytes of one node's object store for stored states")
    store_ttl_s: PositiveFloat = Field(24 * 3600.0, description="how long states and sessions that nobody uses are kept in memory")
    durable_url: MaybeText = Field(None, description="file:///path or s3://bucket/prefix: states and sessions are written there behind")
    durable_endpoint_url: MaybeText = Field(None, description="of an S3-compatible server; none = AWS")
    mirror: bool = Field(False, description="a second copy of every pinned session's states, on another node")
    segment_tokens: MaybeInt = Field(None, description="tokens in one stored run of latents, a multiple of 64; none = about 64 MiB")
    export_concurrency: PositiveInt = Field(2, description="states on their way out of one replica at a time")
    import_timeout_s: PositiveFloat = Field(30.0, description="longest wait for a stored object before its tokens are computed again")

    # The HTTP edge
    api_keys: Names = Field((), repr=False, description="keys that clients must send; `file:PATH` reads one key a line; none = open")
    default_max_tokens: PositiveInt = Field(131_072, description="chat token budget when the request names none, cut to what fits")
    max_body_bytes: ByteSize = Field(ByteSize(8 * 2**20), gt=0, description="larger request bodies get 413 unread")
    max_import_bytes: ByteSize = Field(ByteSize(2 * 2**30), gt=0, description="larger files of exported sessions get 413 unread")
    export_key: MaybeText = Field(None, repr=False, description="file:PATH of the key that signs exported sessions; none = no export")
    max_stop_sequences: PositiveInt = Field(5, description="entries of `stop`, as the hosted API has it")
    max_stop_bytes: PositiveInt = Field(32, description="UTF-8 bytes of one entry of `stop`, as the hosted API has it")
    thinking_history: Literal["accept", "repair", "reject"] = Field(
        "accept",
        description="a history whose reasoning is missing: render it empty and say so, put the session's own back, or refuse it",
    )
    prices: Annotated[dict[str, Price], BeforeValidator(_mapping)] = Field(
        default_factory=lambda: dict(LIST_PRICES), description="USD per million tokens, by model name or the longest part of it"
    )

    # Failure detection
    shard_timeout_s: PositiveFloat = Field(60.0, description="a step or a collective longer than this fails the shard group")
    heartbeat_s: PositiveFloat = Field(1.0, description="how often the replica looks after its shards")
    load_buffer_bytes: ByteSize = Field(ByteSize(2 * 2**30), gt=0, description="host memory of a node for weights on their way in")
    load_threads: PositiveInt = Field(16, description="reads of one shard at a time while it loads")
    load_patience_s: PositiveFloat = Field(300.0, description="how long not a byte of weights may arrive before a start gives up")
    recovery_attempts: PositiveInt = Field(5, description="times within recovery_window_s that lost shards are replaced before giving up")
    recovery_window_s: PositiveFloat = Field(300.0, description="see recovery_attempts")
    failover_timeout_s: PositiveFloat = Field(300.0, description="how long a stream whose replica died waits for another one")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    near = difflib.get_close_matches(str(key), cls.model_fields, n=3)
                    hint = f"did you mean {', '.join(near)}?" if near else f"known keys: {', '.join(cls.model_fields)}"
                    raise ValueError(f"unknown configuration key {key!r}; {hint}")
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> ServiceConfig:
        if self.shards % self.tp_size:
            raise ValueError(f"ep={self.shards} must be a multiple of tp={self.tp_size}: every TP group has tp shards")
        if self.max_running > self.max_batched_tokens:
            raise ValueError(
                f"max_running={self.max_running} exceeds max_batched_tokens={self.max_batched_tokens}: a running row needs a token a step"
            )
        if self.num_slots is not None and self.num_slots < self.max_running:
            raise ValueError(f"num_slots={self.num_slots} is below max_running={self.max_running}: each running row owns a slot")
        if self.segment_tokens is not None and self.segment_tokens % BLOCK:
            raise ValueError(f"segment_tokens={self.segment_tokens} must be a multiple of {BLOCK}")
        if self.served_model_name in self.aliases:
            raise ValueError(f"aliases repeat served_model_name {self.served_model_name!r}")
        return self

    @property
    def tp_size(self) -> int:
        """Heads are split this many ways. The embedded model, left alone, runs as two shards: sharding is always exercised."""
        if self.tp is not None:
            return self.tp
        return 2 if self.model is None and self.ep is None else 1

    @property
    def shards(self) -> int:
        """Shard actors of one replica."""
        return self.ep if self.ep is not None else self.tp_size

    @property
    def groups(self) -> int:
        """Data-parallel groups of one replica."""
        return self.shards // self.tp_size
