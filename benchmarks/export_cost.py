"""What keeping states outside of the shards costs: generated tokens a second with and without it, in turns.

    python -m benchmarks.export_cost                  # the embedded tiny model, two shards, 16 streams

Three applications of the same model on one Ray: no states kept; a state each row every 64 tokens, the default for a model this small; and
every 1,024 tokens, the default at K3's size. Each round runs the same streams on each of them; the medians of the rounds are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import numpy as np
import ray
from ray import serve

from app import ServiceConfig, deployment
from benchmarks.report import Row, publish
from engine.types import SamplingParams

APPS: dict[str, dict[str, Any]] = {
    "none": {"state_store": False},
    "every 64": {"checkpoint_decode_interval": 64},
    "every 1024": {"checkpoint_decode_interval": 1024},
}
SETTINGS: dict[str, Any] = {"tp": 2, "shard_num_cpus": 0.1, "num_pages": 400, "num_slots": 96, "max_running": 16, "max_model_len": 2048}
PROMPT = 100


async def tokens_per_s(handle: Any, streams: int, tokens: int, seed: int) -> float:
    rng = np.random.default_rng(seed)

    async def one(i: int) -> int:
        prompt = [int(t) for t in rng.integers(0, 700, PROMPT)]
        sampling = SamplingParams(temperature=0.8, seed=i)
        count = 0
        async for chunk in handle.generate.remote(prompt, max_tokens=tokens, sampling=sampling, stop_token_ids=[]):
            count += len(chunk.token_ids)
        return count

    begin = time.perf_counter()
    total = sum(await asyncio.gather(*(one(i) for i in range(streams))))
    return total / (time.perf_counter() - begin)


async def measure(handles: dict[str, Any], rounds: int, streams: int, tokens: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Tokens a second of each round, states stored in all of them."""
    found: dict[str, list[float]] = {name: [] for name in handles}
    for number in range(-1, rounds):  # the first one warms up
        for name, handle in handles.items():
            rate = await tokens_per_s(handle, streams, tokens, seed=100 * (number + 1))
            if number >= 0:
                found[name].append(rate)
    exports = {}
    for i, name in enumerate(APPS):
        reports = await serve.get_deployment_handle("engine", f"app{i}").broadcast("report").results_async()
        exports[name] = sum(report.bundles.exports for report in reports)
    return found, exports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=512 << 20, namespace="serve", log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        handles = {}
        for i, (name, settings) in enumerate(APPS.items()):
            config = ServiceConfig.model_validate({**SETTINGS, **settings})
            handles[name] = serve.run(deployment(config), name=f"app{i}", route_prefix=None).options(stream=True)
        found, exports = asyncio.run(measure(handles, args.rounds, args.streams, args.tokens))
    finally:
        serve.shutdown()
        ray.shutdown()
    plain = statistics.median(found["none"])
    rows = [Row(work="no states kept", ours=plain, unit="tokens/s")]
    for name, rates in list(found.items())[1:]:
        ratios = [kept / without for kept, without in zip(rates, found["none"], strict=True)]
        rows.append(Row(work=f"states {name} tokens", ours=statistics.median(rates), peers={"no states": plain}, unit="tokens/s"))
        rows.append(Row(work=f"lost by states {name} tokens", ours=100 * (1 - statistics.median(ratios)), target=2, unit="%"))
    publish(
        "export_cost", rows, packages=("ray", "torch"), notes=f"{args.streams} streams of {args.tokens} tokens; states stored: {exports}"
    )


if __name__ == "__main__":
    main()
