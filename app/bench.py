"""`k3 bench`: closed-loop load on any OpenAI-compatible server: time to first token, time per token, tokens a second.

The client is lean on purpose (aiohttp, one parse a frame), so that a server on the same machine is measured and not its measurer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

TIMEOUT_S = 600.0  # of one request
DATA = b"data: "
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str  # …/v1
    model: str
    streams: int  # concurrent streams
    requests: int  # in all
    prompt_tokens: int
    max_tokens: int
    vocab_size: int  # prompts are random ids below half of it
    chat: bool = False  # /chat/completions with a text of `prompt_tokens` numbers, instead of /completions with ids
    api_key: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one request saw. Seconds; `gaps` between consecutive arrivals that carried tokens."""

    ttft: float
    seconds: float
    tokens: int
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    streams: tuple[Stream, ...]
    failures: tuple[str, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(s.tokens for s in self.streams) / self.seconds

    def ttft_ms(self, quantile: float) -> float:
        return percentile([s.ttft for s in self.streams], quantile) * 1e3

    def gap_ms(self, quantile: float) -> float:
        return percentile([gap for s in self.streams for gap in s.gaps], quantile) * 1e3

    def figures(self) -> dict[str, float | int]:
        """One row of the table: milliseconds, tokens a second."""
        return {
            "requests": len(self.streams),
            "failures": len(self.failures),
            "ttft_p50_ms": self.ttft_ms(0.5),
            "ttft_p95_ms": self.ttft_ms(0.95),
            "gap_p50_ms": self.gap_ms(0.5),
            "gap_p95_ms": self.gap_ms(0.95),
            "tokens_per_s": self.tokens_per_second,
            "seconds": self.seconds,
        }


def percentile(values: Sequence[float], quantile: float) -> float:
    """The value below which `quantile` of them lie; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else float("nan")


async def run_load(load: Load) -> Outcome:
    """`streams` workers take requests from one pile until it is empty."""
    rng = random.Random(load.seed)
    pile = [[rng.randrange(max(1, load.vocab_size // 2)) for _ in range(load.prompt_tokens)] for _ in range(load.requests)]
    done: list[Stream] = []
    failures: list[str] = []
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=load.streams)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as client:

        async def worker() -> None:
            while pile:
                try:
                    done.append(await _one(client, load, pile.pop()))
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    failures.append(f"{type(error).__name__}: {error}")

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(load.streams)))
        seconds = time.perf_counter() - begin
    return Outcome(streams=tuple(done), failures=tuple(failures), seconds=seconds)


async def _one(client: aiohttp.ClientSession, load: Load, prompt: list[int]) -> Stream:
    begin = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with client.post(f"{load.url}/{'chat/' if load.chat else ''}completions", data=_body(load, prompt), headers=JSON) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text(errors='replace'))[:200]}")
        async for events in _events(response):
            count = 0
            for event in events:
                frame = orjson.loads(event)
                if "error" in frame:
                    raise ValueError(frame["error"].get("message", "error frame"))
                count += sum(len(choice.get("token_ids") or ()) for choice in frame["choices"])
            if count:
                tokens += count
                arrivals.append(time.perf_counter())
    if not arrivals:
        raise ValueError("the stream ended without a token")
    gaps = tuple(b - a for a, b in itertools.pairwise(arrivals))
    return Stream(ttft=arrivals[0] - begin, seconds=arrivals[-1] - begin, tokens=tokens, gaps=gaps)


JSON = {"content-type": "application/json"}


def _body(load: Load, prompt: list[int]) -> bytes:
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if load.chat:
        body["messages"] = [{"role": "user", "content": " ".join(map(str, prompt))}]
    else:
        body["prompt"] = prompt
    return orjson.dumps(body)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """The data of the events that arrived together, `[DONE]` left out."""
    rest = b""
    async for piece in response.content.iter_any():
        *events, rest = (rest + piece).split(b"\n\n")
        data = [event[len(DATA) :] for event in events if event.startswith(DATA)]
        yield [one for one in data if one != DONE]
