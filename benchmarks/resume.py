"""What a stored state saves: resume against prefilling again, forks of a long session, bytes a second against a plain copy.

    python -m benchmarks.resume            # the embedded tiny model on the CPU, 1k … 16k tokens of history
    python -m benchmarks.resume --lengths 65536 --device cuda --model DIR

One process, one shard, no Ray: what is measured is the model, the pools and the copies.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Row, publish
from deployments.load import build_runner
from engine.bundle import digest
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.plan import StepPlan, StepResult
from engine.types import GenerateRequest, SamplingParams, TokenChunk
from model.bundle_io import export_latents, export_recurrent, import_latents, import_recurrent
from model.parallel import Mesh
from model.runner import ModelRunner

FORKS = 100
ROUNDS = 5
PAGE = 64
NEW = 16  # tokens of the next turn


class InProcess:
    """`engine.executor.Executor` on the calling thread; counts what plans copy."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens = self.slot_copies = self.page_copies = 0

    async def run(self, plan: StepPlan) -> StepResult:
        self.tokens += plan.num_tokens
        for copy in plan.groups[0].copies:
            self.slot_copies += copy.kind == "slot"
            self.page_copies += copy.kind == "page"
        return self.runner.run(plan)


class Engine:
    def __init__(self, runner: ModelRunner, tokens: int) -> None:
        pools = runner.pools
        self.executor = InProcess(runner)
        config = EngineConfig(
            max_model_len=tokens + 1024,
            page_size=PAGE,
            num_pages=pools.latents.shape[1],
            num_slots=pools.kda.shape[1],
            max_running=16,
            checkpoint_interval=1 << 30,
            checkpoint_decode_interval=1 << 30,
        )
        self.loop = EngineLoop(config, self.executor, deliver=self.deliver)
        self.first: dict[str, float] = {}
        self.done: dict[str, asyncio.Event] = {}
        self.failed: Exception | None = None

    def deliver(self, chunks: list[TokenChunk], failures: dict[str, Exception]) -> None:
        for chunk in chunks:
            if chunk.token_ids:
                self.first.setdefault(chunk.request_id, time.perf_counter())
            if chunk.finish is not None:
                self.done[chunk.request_id].set()
        for name, error in failures.items():
            self.failed = error
            self.done[name].set()

    async def ask(self, name: str, prompt: tuple[int, ...], max_tokens: int = 2) -> float:
        """Seconds to the first token."""
        self.done[name] = asyncio.Event()
        begin = time.perf_counter()
        self.loop.submit(GenerateRequest(request_id=name, prompt=prompt, max_tokens=max_tokens, sampling=SamplingParams(temperature=0)))
        await self.done[name].wait()
        if self.failed is not None:
            raise self.failed
        return self.first[name] - begin


async def by_length(runner: ModelRunner, length: int, vocab: int) -> list[Row]:
    """Prefill, export, import into an empty engine, next turn."""
    history = tuple(int(i) for i in np.random.default_rng(length).integers(0, vocab, length))
    turn = (*history, *range(1, NEW + 1))
    cold = Engine(runner, length)
    cold.loop.start()
    again = await cold.ask("cold", turn)
    lineage = cold.loop.lineage(GenerateRequest(request_id="", prompt=turn))
    at = len(turn) - 1
    checkpoint = cold.loop.pin(0, lineage.at(at))
    assert checkpoint is not None
    begin = time.perf_counter()
    recurrent = export_recurrent(runner.pools, checkpoint.slot)
    latents = export_latents(runner.pools, checkpoint.pages, 0, at)
    exported = time.perf_counter() - begin
    digests = digest(recurrent), digest(latents)
    cold.loop.unpin(0, checkpoint)
    await cold.loop.stop()
    runner.reset()
    warm = Engine(runner, length)
    warm.loop.start()
    begin = time.perf_counter()
    taken = await warm.loop.reserve(0, at)
    assert taken is not None
    assert (digest(recurrent), digest(latents)) == digests
    import_recurrent(runner.pools, taken.slot, 0, 0, recurrent)
    import_latents(runner.pools, taken.pages, 0, latents)
    warm.loop.commit(0, taken, lineage, "store")
    resumed = time.perf_counter() - begin + await warm.ask("warm", turn)
    await warm.loop.stop()
    runner.reset()
    size = sum(a.nbytes for a in (*recurrent.values(), *latents.values()))
    print(f"{length} tokens: {size / 2**20:.1f} MiB exported in {exported * 1e3:.1f} ms")
    return [Row(work=f"{length} tokens: first token", ours=resumed * 1e3, unit="ms", peers={"prefill again": again * 1e3})]


async def forks(runner: ModelRunner, length: int, vocab: int) -> list[Row]:
    """A long session forked a hundred times: each fork is one more turn from the same state."""
    history = tuple(int(i) for i in np.random.default_rng(1).integers(0, vocab, length))
    engine = Engine(runner, length)
    engine.loop.start()
    await engine.ask("session", history)
    counted = engine.executor
    counted.tokens = counted.slot_copies = counted.page_copies = 0
    pages = engine.loop.stats().pages_free
    begin = time.perf_counter()
    for i in range(FORKS):
        await engine.ask(f"fork{i}", history, 1)
    seconds = time.perf_counter() - begin
    await engine.loop.stop()
    pools = runner.pools
    page_bytes, slot_bytes = pools.latents[:, 0].nbytes, pools.kda[:, 0].nbytes + pools.conv[:, 0].nbytes
    runner.reset()
    copied = counted.page_copies * page_bytes + counted.slot_copies * slot_bytes
    return [
        Row(work=f"{FORKS} forks of {length} tokens: prefilled", ours=counted.tokens - FORKS, target=0, unit="tokens"),
        Row(
            work="bytes copied a fork (a state, at most one page)",
            ours=copied / FORKS,
            unit="B",
            peers={"all pages": -(-length // PAGE) * page_bytes},
        ),
        Row(work="pages that the forks keep", ours=pages - engine.loop.stats().pages_free, unit="pages"),
        Row(work="first token of a fork", ours=seconds / FORKS * 1e3, unit="ms"),
    ]


def best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds, the best of some rounds."""
    times = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def bandwidth(runner: ModelRunner, tokens: int) -> list[Row]:
    """Copies out and in, and the digest, against a plain copy of as many bytes (on a GPU into page-locked memory)."""
    pools, device = runner.pools, runner.device
    pages = list(range(-(-tokens // PAGE)))
    latents = export_latents(pools, pages, 0, tokens)
    size = latents["latents"].nbytes
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    plain = size / best(lambda: target.copy_(source), device) / 1e9
    out = size / best(lambda: export_latents(pools, pages, 0, tokens), device) / 1e9
    back = size / best(lambda: import_latents(pools, pages, 0, latents), device) / 1e9
    checked = size / best(lambda: digest(latents), device) / 1e9
    return [
        Row(work=f"export of {size / 2**20:.0f} MiB", ours=out, unit="GB/s", peers={"plain copy": plain}),
        Row(work="import", ours=back, unit="GB/s", peers={"plain copy": plain}),
        Row(work="digest", ours=checked, unit="GB/s", peers={"plain copy": plain}),
    ]


async def measure(runner: ModelRunner, lengths: list[int], vocab: int) -> list[Row]:
    rows = []
    for length in lengths:
        rows += await by_length(runner, length, vocab)
    rows += await forks(runner, lengths[-1], vocab)
    return rows + bandwidth(runner, lengths[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.model is None:
        from app.default_model import ensure_default_model  # needs more than the model itself does

        args.model = ensure_default_model()
    device = torch.device(args.device)
    longest = max(args.lengths)
    runner = build_runner(
        args.model,
        Mesh.single(),
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        page_size=PAGE,
        num_pages=2 * (longest // PAGE) + 300,
        num_slots=140,
    )
    rows = asyncio.run(measure(runner, sorted(args.lengths), runner.model.config.vocab_size))
    publish("resume" if device.type == "cpu" else f"resume_{device.type}", rows, packages=("torch",))


if __name__ == "__main__":
    main()
