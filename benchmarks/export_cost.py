"""What keeping states outside of the shards costs: processor time and throughput with and without it, in turns.

    python -m benchmarks.export_cost                  # the embedded tiny model, two shards, 16 streams

Three applications of the same model on one Ray: no states kept; a state each row every 64 tokens, the default for a model this small; and
every 1,024 tokens, the default at K3's size. Each round runs the same streams on each of them, in an order that rotates. Where client,
engine, shards and stores share two cores, throughput is lost to processor time: that of all of Ray's processes is counted for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
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


def processor_seconds() -> float:
    """Of every process below this one: Ray's servers and all workers."""
    parents, times = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], times[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def below(pid: int) -> bool:
        while pid := parents.get(pid, 0):
            if pid == os.getpid():
                return True
        return False

    return sum(ticks for pid, ticks in times.items() if below(pid)) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Seen:
    """Of one application, a round each."""

    tokens_per_s: list[float] = field(default_factory=list)
    ms_per_token: list[float] = field(default_factory=list)  # of processor time


async def run(handle: Any, streams: int, tokens: int, seed: int, seen: Seen) -> None:
    rng = np.random.default_rng(seed)

    async def one(i: int) -> int:
        prompt = [int(t) for t in rng.integers(0, 700, PROMPT)]
        sampling = SamplingParams(temperature=0.8, seed=i)
        count = 0
        async for chunk in handle.generate.remote(prompt, max_tokens=tokens, sampling=sampling, stop_token_ids=[]):
            count += len(chunk.token_ids)
        return count

    begin, busy = time.perf_counter(), processor_seconds()
    total = sum(await asyncio.gather(*(one(i) for i in range(streams))))
    seen.tokens_per_s.append(total / (time.perf_counter() - begin))
    await asyncio.sleep(1)  # states on their way out are part of it
    seen.ms_per_token.append(1e3 * (processor_seconds() - busy) / total)


async def measure(handles: dict[str, Any], rounds: int, streams: int, tokens: int) -> tuple[dict[str, Seen], dict[str, int]]:
    """What was seen, states stored in all rounds. The first round warms up."""
    found = {name: Seen() for name in handles}
    names = list(handles)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            await run(handles[name], streams, tokens, 100 * number, found[name])
    for seen in found.values():
        del seen.tokens_per_s[0], seen.ms_per_token[0]
    exports = {}
    for i, name in enumerate(APPS):
        reports = await serve.get_deployment_handle("engine", f"app{i}").broadcast("report").results_async()
        exports[name] = sum(report.bundles.exports for report in reports)
    return found, exports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
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
    plain = found["none"]
    rows = [
        Row(work="no states kept", ours=statistics.median(plain.tokens_per_s), unit="tokens/s"),
        Row(work="no states kept", ours=statistics.median(plain.ms_per_token), unit="ms of processor a token"),
    ]
    for name, seen in list(found.items())[1:]:
        rates = [kept / without for kept, without in zip(seen.tokens_per_s, plain.tokens_per_s, strict=True)]
        costs = [kept / without for kept, without in zip(seen.ms_per_token, plain.ms_per_token, strict=True)]
        rows += [
            Row(work=f"states {name} tokens: throughput lost", ours=100 * (1 - statistics.median(rates)), unit="%"),
            Row(work=f"states {name} tokens: more processor time", ours=100 * (statistics.median(costs) - 1), target=2, unit="%"),
            Row(work="… between a quarter and three quarters of the rounds", ours=_spread(costs), unit="%"),
        ]
    publish(
        "export_cost", rows, packages=("ray", "torch"), notes=f"{args.streams} streams of {args.tokens} tokens; states stored: {exports}"
    )


def _spread(ratios: list[float]) -> float:
    low, _, high = statistics.quantiles(ratios, n=4)
    return 100 * (high - low)


if __name__ == "__main__":
    main()
