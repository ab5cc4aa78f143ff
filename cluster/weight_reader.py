"""One shard's blocks, read by threads into the node's memory and handed on as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from cluster.checkpoint import Checkpoint
from cluster.weight_digests import Digests
from cluster.weight_memory import Desk, Grant, Memory, SoleDesk
from cluster.weight_plan import plan_node
from model.feed import Arrived, Block

POLL_S = 0.005  # between questions for a block that another shard reads


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How weights are read."""

    buffer_bytes: int = 2 << 30  # host memory of one node for blocks under way
    threads: int = 16  # reads at a time, of one shard
    patience_s: float = 300.0  # without a byte: give up
    request_bytes: int = 32 << 20  # the most that one read asks for

    @property
    def block_bytes(self) -> int:
        """The same, with room for several in the buffer."""
        return max(4096, min(self.request_bytes, self.buffer_bytes // 4 - 8192))


@dataclass(slots=True)
class Progress:
    """Bytes, of one shard."""

    total: int = 0  # that it needs, as blocks
    taken: int = 0  # that are where they belong
    read: int = 0  # that it fetched itself


class WeightReader:
    """A `model.feed.Feed`. `progress` may be looked at from other threads."""

    def __init__(
        self, checkpoint: Checkpoint, blocks: Sequence[Block], memory: Memory, desk: Desk, settings: LoadSettings, progress: Progress
    ) -> None:
        self._files = checkpoint.files
        self._source = checkpoint.open(patience_s=settings.patience_s, connections=settings.threads)
        self._digests = Digests(self._source) if checkpoint.digests else None
        self._blocks = {block.number: block for block in blocks}
        self._memory, self._desk, self._threads = memory, desk, settings.threads
        self.progress = progress
        progress.total = sum(block.nbytes for block in blocks)
        self._unreleased = len(blocks)
        self._read: list[int] = []  # since the last turn at the desk
        self._taken: list[int] = []

    def memory(self) -> memoryview:
        return self._memory.view()

    def arrivals(self) -> Iterator[Arrived | None]:
        """See `Feed`. Raises what `Source.fill` and `Digests.check` raise."""
        ready: deque[Arrived] = deque()
        reading: dict[Future[None], tuple[Grant, Block]] = {}
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="weights")
        try:
            while self._unreleased:
                for grant in self._turn(2 * self._threads - len(reading) - len(ready)):
                    reading[pool.submit(self._prepare, grant)] = (grant, self._blocks[grant.block])
                for future in wait(reading, timeout=0 if ready else POLL_S, return_when=FIRST_COMPLETED).done:
                    grant, block = reading.pop(future)
                    future.result()
                    if grant.read:
                        self._read.append(block.number)
                    data = self._memory.place(grant.slot, block.start, block.nbytes)
                    ready.append(Arrived(block, data, partial(self._release, block)))
                if not ready and not reading:
                    time.sleep(POLL_S)
                yield ready.popleft() if ready else None
            self._turn(0)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _turn(self, want: int) -> list[Grant]:
        read, self._read = self._read, []
        taken, self._taken = self._taken, []
        return self._desk.turn(read, taken, max(0, want))

    def _prepare(self, grant: Grant) -> None:
        block = self._blocks[grant.block]
        data = self._memory.place(grant.slot, block.start, block.nbytes)
        file = self._files[block.file]
        if grant.read:
            self._source.fill(file, block.start, data, self._count)
        if self._digests is not None:
            self._digests.check(block, data, self._source.where(file.name))

    def _count(self, nbytes: int) -> None:
        self.progress.read += nbytes  # threads may lose each other's: it shows that something moves

    def _release(self, block: Block) -> None:
        self._taken.append(block.number)
        self._unreleased -= 1
        self.progress.taken += block.nbytes


def sole_reader(checkpoint: Checkpoint, settings: LoadSettings, *, rank: int = 0, tp: int = 1, shards: int = 1) -> WeightReader:
    """The reader of a shard that shares its node with none. Raises ConfigError for an impossible grid."""
    plan = plan_node(checkpoint, [rank], tp=tp, shards=shards, block_bytes=settings.block_bytes)
    memory = Memory.create(budget=settings.buffer_bytes, blocks=len(plan.ranges), largest=plan.largest)
    blocks = plan.blocks[rank]
    desk = SoleDesk(rank, [b.number for b in blocks], memory.slots)
    return WeightReader(checkpoint, blocks, memory, desk, settings, Progress())
