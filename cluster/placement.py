"""Where a replica's actors go: one placement group, the engine replica in bundle 0, shard r in bundle r + 1."""

from __future__ import annotations


def bundles(*, shards: int, shard_cpus: float, shard_gpus: int, replica_cpus: float) -> list[dict[str, float]]:
    """Resource bundles of one replica. A shard that reserves nothing still needs a bundle of its own, so it asks for a sliver of CPU."""
    shard = {"CPU": max(shard_cpus, 0.01)}
    if shard_gpus:
        shard["GPU"] = float(shard_gpus)
    return [{"CPU": max(replica_cpus, 0.01)}, *(dict(shard) for _ in range(shards))]
