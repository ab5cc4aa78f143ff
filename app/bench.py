"""`k3 bench`: closed-loop load on any OpenAI-compatible server: time to first token, time per token, tokens a second."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass

import httpx
import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str  # …/v1
    model: str
    streams: int  # concurrent streams
    requests: int  # in all
    prompt_tokens: int
    max_tokens: int
    vocab_size: int  # prompts are random ids below it
    api_key: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one request saw. Seconds; `gaps` between consecutive frames that carried tokens."""

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

    def percentile(self, values: list[float], q: float) -> float:
        ordered = sorted(values)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


async def run_load(load: Load) -> Outcome:
    """`streams` workers take requests from one pile until it is empty."""
    rng = random.Random(load.seed)
    pile = [[rng.randrange(load.vocab_size // 2) for _ in range(load.prompt_tokens)] for _ in range(load.requests)]
    done: list[Stream] = []
    failures: list[str] = []
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.streams, max_keepalive_connections=load.streams)
    async with httpx.AsyncClient(base_url=load.url, headers=headers, limits=limits, timeout=600) as client:

        async def worker() -> None:
            while pile:
                try:
                    done.append(await _one(client, load, pile.pop()))
                except (httpx.HTTPError, ValueError) as error:
                    failures.append(f"{type(error).__name__}: {error}")

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(load.streams)))
        seconds = time.perf_counter() - begin
    return Outcome(streams=tuple(done), failures=tuple(failures), seconds=seconds)


async def _one(client: httpx.AsyncClient, load: Load, prompt: list[int]) -> Stream:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    begin = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with client.stream("POST", "/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            frame = orjson.loads(line[6:])
            if "error" in frame:
                raise ValueError(frame["error"].get("message", "error frame"))
            count = sum(len(choice.get("token_ids") or ()) for choice in frame["choices"])
            if count:
                tokens += count
                arrivals.append(time.perf_counter())
    if not arrivals:
        raise ValueError("the stream ended without a token")
    gaps = tuple(b - a for a, b in itertools.pairwise(arrivals))
    return Stream(ttft=arrivals[0] - begin, seconds=arrivals[-1] - begin, tokens=tokens, gaps=gaps)
