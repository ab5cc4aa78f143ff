"""`ServiceConfig` + checkpoint + cluster → what the deployments are made of. All that can be refused at start is refused here."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import ServiceConfig
from app.default_model import ensure_default_model
from app.session_file import read_export_key
from app.shared_prefixes import read_shared_prefixes
from chat.tokenizer import TINY_TOKENIZER_DIR, Tokenizer
from cluster.checkpoint import Checkpoint, has_tokenizer, read_checkpoint, read_config, tokenizer_folder
from cluster.durable import check_url
from cluster.pools import PoolBytes, pool_bytes, pool_sizes
from cluster.weight_reader import LoadSettings
from cluster.weight_source import open_source
from deployments.spec import EngineSpec, RecoverySpec, ShardSpec, StateSpec
from engine.bundle import Schema
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.lineage import BLOCK
from model.config import ModelConfig
from model.weights import Shard

SEGMENT_BYTES = 64 * 2**20  # of one stored run of latents
# K3's state is 429 MiB: at 512 KiB a token it leaves a row every 1,024 tokens, 1.6 GB/s for a replica that generates 3,200 tokens/s.
# That is below 2 % of what eight accelerators move to a host, and none of it is on the way of a step.
EXPORT_BYTES_PER_TOKEN = 512 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the HTTP edge must know of the model."""

    max_model_len: int
    vocab_size: int
    tokenizer_dir: str | None  # a folder or s3://…; None: token ids only
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # hex digest of the model's identity
    shared_prefixes: tuple[bytes, ...]  # beginnings of prompts that all tenants share, as little-endian u32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    engine: EngineSpec
    served: Served


def find_checkpoint(config: ServiceConfig) -> Checkpoint:
    """The model's headers, read and checked: half a minute's work for the released one. Raises ConfigError, CheckpointError."""
    url = config.model or str(ensure_default_model())
    Shard(tp_size=config.tp_size, ep_size=config.shards).check(read_config(open_source(url, config.model_endpoint_url)))
    return read_checkpoint(url, config.model_endpoint_url)


def resolve(config: ServiceConfig, *, gpus: int | None = None, checkpoint: Checkpoint | None = None) -> ServicePlan:
    """`gpus`: accelerators of the cluster; None asks Ray. `checkpoint`: what `find_checkpoint` found before.

    Raises ConfigError, CheckpointError.
    """
    checkpoint = checkpoint or find_checkpoint(config)
    model = checkpoint.config
    device = _device(config, _cluster_gpus() if gpus is None else gpus)
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    element = 4 if dtype == "float32" else 2
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(f"max_model_len={max_model_len} exceeds the checkpoint's max_position_embeddings={model.max_position_embeddings}")
    cost = pool_bytes(model, page_size=config.page_size, tp_size=config.tp_size, latent_bytes=element)
    if config.max_model_len is None:
        max_model_len = _affordable(max_model_len, cost, config)
    pools = pool_sizes(
        cost,
        budget=int(config.cache_bytes),
        page_size=config.page_size,
        max_running=config.max_running,
        max_model_len=max_model_len,
        num_pages=config.num_pages,
        num_slots=config.num_slots,
    )
    state = _state(config, model, dtype)
    tokenizer_dir = _tokenizer_dir(config, checkpoint)
    tokenizer = Tokenizer.from_dir(tokenizer_folder(tokenizer_dir, config.model_endpoint_url)) if tokenizer_dir else None
    if tokenizer and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokenizer_dir} has {tokenizer.vocab_size} ids, the checkpoint's vocabulary only {model.vocab_size}: "
            "its ids would index past the embedding; name the checkpoint's own tokenizer"
        )
    if config.export_key is not None:
        read_export_key(config.export_key)
    shared = read_shared_prefixes(config.shared_prefixes, tokenizer) if config.shared_prefixes is not None else ()
    return ServicePlan(
        engine=EngineSpec(
            shards=ShardSpec(
                model_dir=checkpoint.url,
                model_endpoint_url=checkpoint.endpoint_url,
                checkpoint=checkpoint,
                loading=LoadSettings(
                    buffer_bytes=int(config.load_buffer_bytes), threads=config.load_threads, patience_s=config.load_patience_s
                ),
                vocab_size=model.vocab_size,
                tokenizer_dir=tokenizer_dir,
                tp=config.tp_size,
                shards=config.shards,
                device=device,
                dtype=dtype,
                page_size=config.page_size,
                num_pages=pools.num_pages,
                num_slots=pools.num_slots,
                num_cpus=config.shard_num_cpus,
                threads=max(1, round(config.shard_num_cpus)),
                step_timeout_s=config.shard_timeout_s,
                heartbeat_s=config.heartbeat_s,
                ping_timeout_s=max(5.0, 3 * config.heartbeat_s),
            ),
            engine=EngineConfig(
                max_model_len=max_model_len,
                page_size=config.page_size,
                num_pages=pools.num_pages,
                num_slots=pools.num_slots,
                max_running=min(config.max_running, pools.num_slots - 1),
                max_batched_tokens=config.max_batched_tokens,
                max_queued=config.max_queued,
                prefix_cache=config.prefix_cache,
                checkpoint_interval=config.checkpoint_interval,
                checkpoint_decode_interval=state.stake_tokens,
                shared_prefixes=shared,
                run_ahead=config.run_ahead,
            ),
            fingerprint=checkpoint.fingerprint,
            state=state if config.state_store else None,
            recovery=RecoverySpec(attempts=config.recovery_attempts, window_s=config.recovery_window_s),
        ),
        served=Served(
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            tokenizer_dir=tokenizer_dir,
            eos_token_ids=tuple(tokenizer.stop_ids) if tokenizer else (model.eos_token_id,),
            fingerprint=checkpoint.fingerprint,
            shared_prefixes=shared,
        ),
    )


def _state(config: ServiceConfig, model: ModelConfig, dtype: str) -> StateSpec:
    """How states are cut and when they move. Raises ConfigError for a durable store that cannot be meant."""
    if config.durable_url is not None:
        check_url(config.durable_url)
    schema = Schema(
        kda_layers=len(model.kda_layers),
        heads=model.kda_heads,
        head_dim=model.kda_head_dim,
        conv_taps=model.conv_size,
        mla_layers=len(model.mla_layers),
        latent_dim=model.latent_dim,
        state_dtype="float32",
        cache_dtype=dtype,
    )
    return StateSpec(
        schema=schema,
        segment_tokens=config.segment_tokens or max(BLOCK, SEGMENT_BYTES // schema.token_bytes // BLOCK * BLOCK),
        stake_tokens=config.checkpoint_decode_interval or _stake(schema),
        export_concurrency=config.export_concurrency,
        import_timeout_s=config.import_timeout_s,
        store_bytes=int(config.store_bytes),
        ttl_s=config.store_ttl_s,
        durable_url=config.durable_url,
        durable_endpoint_url=config.durable_endpoint_url,
        mirror=config.mirror,
    )


def _stake(schema: Schema) -> int:
    """Tokens between checkpoints: as few as keep what is copied for a generated token within EXPORT_BYTES_PER_TOKEN; a power of two."""
    need = -(-schema.heads * schema.head_bytes // EXPORT_BYTES_PER_TOKEN)
    return min(8192, max(BLOCK, 1 << (need - 1).bit_length()))


def _cluster_gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0


def _device(config: ServiceConfig, gpus: int) -> str:
    need = config.shards * config.replicas
    if config.device == "cuda" and gpus < need:
        raise ConfigError(f"device=cuda needs {need} accelerators ({config.replicas} replicas of {config.shards} shards), Ray sees {gpus}")
    if config.device == "auto":
        return "cuda" if gpus >= need else "cpu"
    return config.device


def _affordable(longest: int, cost: PoolBytes, config: ServiceConfig) -> int:
    """The model's context, cut to the page pool when the operator named no length."""
    sizes = pool_sizes(
        cost,
        budget=int(config.cache_bytes),
        page_size=config.page_size,
        max_running=config.max_running,
        max_model_len=config.page_size,
        num_pages=config.num_pages,
        num_slots=config.num_slots,
    )
    return min(longest, sizes.num_pages * config.page_size)


def _tokenizer_dir(config: ServiceConfig, checkpoint: Checkpoint) -> str | None:
    if config.tokenizer is not None:
        return str(config.tokenizer)
    if config.model is None:
        return str(TINY_TOKENIZER_DIR)
    return checkpoint.url if has_tokenizer(checkpoint.url, checkpoint.endpoint_url) else None
