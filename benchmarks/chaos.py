"""Kills at random times under streams on real Ray: every stream must go on with the tokens of an unbroken run.

    python -m benchmarks.chaos --kills 100 --streams 16

Streams of half greedy, half sampled requests, longer than a checkpoint interval, run one after the other in every lane. First each request
is run unbroken; then the same requests run while shards (SIGKILL, SIGSTOP), replicas, holders and the session store are killed. Some kills
are aimed: at a shard while a state leaves it, while states come in, and while the group recovers from the kill before. What they hit is
counted by the engine: exports and imports that broke, moved requests by what they were doing, attempts at a recovery that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from app import ServiceConfig, deployment
from benchmarks.report import Row, publish
from engine.types import SamplingParams

SHARD, HANG, REPLICA, HOLDER, STORE, EXPORT, IMPORT, RECOVERY = KINDS = (
    *("shard", "hang", "replica", "holder", "store"),
    *("shard mid-export", "shard mid-import", "shard mid-recovery"),
)
SETTINGS: dict[str, Any] = {
    "tp": 2,
    "shard_num_cpus": 0.1,
    "page_size": 16,
    "num_pages": 600,
    "num_slots": 64,
    "max_running": 16,
    "max_batched_tokens": 128,  # prefills take several steps, so that kills fall into them
    "max_model_len": 1024,
    "checkpoint_decode_interval": 64,
    "segment_tokens": 64,
    "heartbeat_s": 0.5,
    "shard_timeout_s": 30,
    "recovery_attempts": 1000,
    "failover_timeout_s": 240,
}
PHASES = ("import", "prefill", "decode")
QUIET_S = 120.0  # longest wait for the streams to go on after a kill
AIM_S = 20.0  # longest wait for the moment that a kill is aimed at


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams


@dataclass
class Outcome:
    """What the kills did."""

    kills: Counter[str] = field(default_factory=Counter)
    done: int = 0
    lost: list[str] = field(default_factory=list)  # errors that a reader saw
    wrong: list[tuple[Request, list[int], list[int]]] = field(default_factory=list)  # expected, got
    wrong_usage: int = 0
    pauses: list[float] = field(default_factory=list)  # of every stream that was running at a kill: its longest gap around it
    recomputed: int = 0
    counters: Counter[str] = field(default_factory=Counter)


def requests(count: int, seed: int, vocab: int, tokens: tuple[int, int]) -> list[Request]:
    """Half greedy, half sampled; prompts of 20 … 200 tokens, some of which share their beginning, and every fourth of 500 … 600."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(100)]
    made = []
    for i in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.randrange(500, 600) if i % 4 == 3 else rng.randrange(20, 100))]
        sampling = SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, top_p=0.95, frequency_penalty=0.2 * (i % 3))
        made.append(Request(tuple(shared + own if i % 4 < 2 else own), rng.randrange(*tokens), sampling))
    return made


class Chaos:
    """Streams against a running application, and its killer."""

    def __init__(self, app: str, work: Sequence[Request], seed: int) -> None:
        self.handle = serve.get_app_handle(app)
        self.engine = serve.get_deployment_handle("engine", app)
        self.work = list(work)
        self.random = random.Random(seed)
        self.expected: list[list[int]] = []
        self.outcome = Outcome()
        self._last: dict[int, float] = {}  # lane → when its running stream last gave tokens
        self._gaps: dict[int, float] = {}  # lane → longest gap since the last kill
        self._seen: dict[str, Counter[str]] = {}

    async def reference(self, lanes: int) -> None:
        """Every request unbroken."""
        gate = asyncio.Semaphore(lanes)

        async def one(request: Request) -> list[int]:
            async with gate:
                return [t async for chunk in self.stream(request) for t in chunk.token_ids]

        self.expected = list(await asyncio.gather(*map(one, self.work)))

    async def run(self, lanes: int, kinds: Sequence[str], pause_s: tuple[float, float] = (0.5, 4.0)) -> Outcome:
        """One kill of each kind in `kinds`, in that order, at random times, under `lanes` streams."""
        stop = asyncio.Event()
        streams = [asyncio.create_task(self._lane(lane, lanes, stop)) for lane in range(lanes)]
        counting = asyncio.create_task(self._count(stop))
        try:
            for kind in kinds:
                await asyncio.sleep(self.random.uniform(*pause_s))
                self._gaps = dict.fromkeys(self._last, 0.0)
                await self._kill(kind)
                if self.random.random() < 0.7:  # otherwise the next kill falls into the recovery from this one
                    await self._all_go_on(set(self._gaps))
                self.outcome.pauses += self._gaps.values()
        finally:
            stop.set()
            await asyncio.wait(streams, timeout=QUIET_S * 2)
            for task in streams:
                if not task.done():
                    task.cancel()
                    self.outcome.lost.append("never ended")
            await counting
        return self.outcome

    def stream(self, request: Request) -> Any:
        return self.handle.options(stream=True).generate.remote(
            list(request.prompt), max_tokens=request.max_tokens, sampling=request.sampling, stop_token_ids=[]
        )

    async def _lane(self, lane: int, lanes: int, stop: asyncio.Event) -> None:
        at = lane
        while not stop.is_set():
            i = at % len(self.work)
            at += lanes
            got: list[int] = []
            usage = None
            self._last[lane] = time.monotonic()
            try:
                async for chunk in self.stream(self.work[i]):
                    if chunk.token_ids:
                        now = time.monotonic()
                        self._gaps[lane] = max(self._gaps.get(lane, 0.0), now - self._last[lane])
                        self._last[lane] = now
                    got += chunk.token_ids
                    usage = chunk.usage or usage
            except Exception as error:
                self.outcome.lost.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(1)
                continue
            finally:
                self._last.pop(lane, None)
            self.outcome.done += 1
            if got != self.expected[i]:
                self.outcome.wrong.append((self.work[i], self.expected[i], got))
            if usage is None or usage.completion_tokens != len(got) or usage.prompt_tokens != len(self.work[i].prompt):
                self.outcome.wrong_usage += 1

    async def _all_go_on(self, lanes: set[int]) -> None:
        """Until every stream that ran at the kill gave another token or ended."""
        begin = time.monotonic()
        while time.monotonic() - begin < QUIET_S:
            if all(self._last.get(lane, begin + 1) > begin + 0.5 or lane not in self._last for lane in lanes):
                return
            await asyncio.sleep(0.1)

    async def _kill(self, kind: str) -> None:
        self.outcome.kills[kind] += 1
        if kind in (REPLICA, HOLDER, STORE):
            await self.kill_actors({REPLICA: "SERVE_REPLICA::k3#engine#", HOLDER: "k3-holder-", STORE: "k3-sessions"}[kind])
            return
        try:
            pids = await asyncio.wait_for(_value(self.engine.shard_pids.remote()), 10)
        except Exception:  # it is being replaced: kill it again
            await self.kill_actors("SERVE_REPLICA::k3#engine#")
            return
        self.random.shuffle(pids)
        if kind == EXPORT:
            await self._catch("exports_running", pids[-1])
        elif kind == IMPORT:  # states come in after a recovery, those of every stream at once
            os.kill(pids.pop(), signal.SIGKILL)
            self.outcome.kills[SHARD] += 1
            await self._catch("imports_running", pids[-1])
        elif kind == RECOVERY:
            os.kill(pids.pop(), signal.SIGKILL)
            self.outcome.kills[SHARD] += 1
            await asyncio.sleep(self.random.uniform(0.05, 2.5))
        with suppress(ProcessLookupError):  # it went with the one before
            os.kill(pids.pop(), signal.SIGSTOP if kind == HANG else signal.SIGKILL)

    async def _catch(self, level: str, pid: int) -> None:
        """Stops a shard in the middle of that: what needs it stays unfinished. Gives up after a while."""
        with suppress(TimeoutError, ProcessLookupError):
            async with asyncio.timeout(AIM_S):
                while True:
                    if await self._level(level):
                        os.kill(pid, signal.SIGSTOP)
                        await asyncio.sleep(0.05)  # what does not need it ends meanwhile
                        if await self._level(level):
                            return
                        os.kill(pid, signal.SIGCONT)
                    await asyncio.sleep(0.005)

    async def _level(self, level: str) -> bool:
        with suppress(Exception):  # between two replicas nobody answers
            return any(getattr(r.bundles, level) for r in await self.engine.broadcast("report").results_async())
        return False

    async def kill_actors(self, prefix: str) -> None:
        named = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(prefix)]
        if named:
            actor = self.random.choice(named)
            try:
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=prefix.startswith("SERVE"))
            except ValueError:
                return  # gone already

    async def _count(self, stop: asyncio.Event) -> None:
        """Sums the counters of every replica that lived, as last seen."""
        while True:
            last = stop.is_set()
            try:
                for report in await asyncio.wait_for(self.engine.broadcast("report").results_async(), 5):
                    b = report.bundles
                    self._seen[report.replica] = Counter(
                        recomputed=report.stats.tokens_recomputed,
                        recoveries=b.recoveries,
                        recoveries_failed=b.recoveries_failed,
                        shards_replaced=b.shards_replaced,
                        exports=b.exports,
                        imports=sum(b.imports.values()),
                        **{f"moved_in_{k}": v for k, v in b.requests_moved.items()},
                        **{f"import_miss_{k}": v for k, v in b.import_misses.items()},
                        **{f"export_failed_{k}": v for k, v in b.exports_failed.items()},
                    )
            except Exception:
                pass  # between two replicas nobody answers
            if last:
                break
            await asyncio.sleep(1)
        self.outcome.counters = sum(self._seen.values(), Counter())
        self.outcome.recomputed = self.outcome.counters["recomputed"]


async def _value(response: Any) -> Any:
    return await response


def percentile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--tokens", type=int, nargs=2, default=(100, 300), help="shortest and longest output")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durable-url", default=None)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=512 << 20, namespace="serve", log_to_driver=False)
    config = ServiceConfig.model_validate({**SETTINGS, "durable_url": args.durable_url})
    serve.start(proxy_location="Disabled")
    serve.run(deployment(config), name="k3", route_prefix=None)
    rng = random.Random(args.seed)
    kinds = [args.kinds[i % len(args.kinds)] for i in range(args.kills)]
    rng.shuffle(kinds)
    chaos = Chaos("k3", requests(2 * args.streams, args.seed, 700, tuple(args.tokens)), args.seed)

    async def play() -> Outcome:
        await chaos.reference(args.streams)
        return await chaos.run(args.streams, kinds)

    begin = time.monotonic()
    try:
        outcome = asyncio.run(play())
    finally:
        serve.shutdown()
        ray.shutdown()
    for error in outcome.lost[:5]:
        print("lost:", error)
    for request, expected, got in outcome.wrong[:5]:
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
        print(f"wrong: temperature {request.sampling.temperature}, {len(got)} of {len(expected)} tokens, parts at {at}")
    print(dict(outcome.counters))
    kills = sum(outcome.kills.values())
    publish(
        "chaos",
        [
            Row(work="streams lost", ours=len(outcome.lost), target=0, unit="streams"),
            Row(work="streams with wrong tokens", ours=len(outcome.wrong), target=0, unit="streams"),
            Row(work="streams with wrong usage", ours=outcome.wrong_usage, target=0, unit="streams"),
            Row(work="streams ended well", ours=outcome.done - len(outcome.wrong), unit="streams"),
            Row(work="pause p50", ours=statistics.median(outcome.pauses or [0.0]), unit="s"),
            Row(work="pause p99", ours=percentile(outcome.pauses, 0.99), unit="s"),
            Row(work="computed again per kill", ours=outcome.recomputed / max(1, kills), unit="tokens"),
            Row(work="broken exports", ours=outcome.counters["export_failed_ShardLost"], unit="states"),
            Row(
                work="broken imports",
                ours=outcome.counters["import_miss_shard_lost"] + outcome.counters["import_miss_stale"],
                unit="states",
            ),
            Row(work="broken recoveries", ours=outcome.counters["recoveries_failed"], unit="attempts"),
            *(Row(work=f"moved in {phase}", ours=outcome.counters[f"moved_in_{phase}"], unit="streams") for phase in PHASES),
            *(Row(work=f"kills: {kind}", ours=count, unit="kills") for kind, count in sorted(outcome.kills.items())),
        ],
        packages=("ray", "torch"),
        notes=f"{kills} kills under {args.streams} streams in {time.monotonic() - begin:.0f} s; {dict(outcome.counters)}",
    )


if __name__ == "__main__":
    main()
