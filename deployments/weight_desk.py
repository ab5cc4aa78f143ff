"""An actor a node that shares out the node's weight memory among its shards, and a shard's side of it.

It moves no bytes: shards read into shared memory themselves. It outlives a shard that dies while it loads; the one in its place takes what
the node still holds from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from cluster.checkpoint import Checkpoint, read_checkpoint
from cluster.weight_memory import Grant, Memory, SlotBook
from cluster.weight_plan import plan_node
from cluster.weight_reader import Progress, WeightReader
from deployments.spec import ShardSpec
from engine.errors import ShardLost
from model.feed import Block

GONE_S = 30.0  # longest wait for the process of a killed shard to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one shard needs to read its part."""

    checkpoint: Checkpoint  # without places
    blocks: tuple[Block, ...]
    memory: tuple[str, int, int]  # arguments of Memory.attach


class WeightBook:
    """The actor's class. `open` comes first: a constructor's error would reach nobody with its kind."""

    def open(self, spec: ShardSpec, ranks: Sequence[int]) -> None:
        """Plans the node's reads. Raises ConfigError, CheckpointError."""
        checkpoint = spec.checkpoint or read_checkpoint(spec.model_dir, spec.model_endpoint_url)
        plan = plan_node(checkpoint, ranks, tp=spec.tp, shards=spec.shards, block_bytes=spec.loading.block_bytes)
        self._memory = Memory.create(budget=spec.loading.buffer_bytes, blocks=len(plan.ranges), largest=plan.largest)
        self._book = SlotBook({rank: [b.number for b in blocks] for rank, blocks in plan.blocks.items()}, self._memory.slots)
        self._blocks = plan.blocks
        self._checkpoint = replace(checkpoint, places=(b"", b""))
        self._pids: dict[int, int] = {}

    def join(self, rank: int, pid: int) -> Seat:
        """A rank's process begins to load, possibly in the place of one that died. Raises ShardLost when that one will not end."""
        former = self._pids.get(rank)
        if former is not None:
            deadline = time.monotonic() + GONE_S
            while os.path.exists(f"/proc/{former}"):  # it could still write into its slots
                if time.monotonic() > deadline:
                    raise ShardLost(f"the former process {former} of shard {rank} does not end")
                time.sleep(0.02)
            self._book.restart(rank)
        self._pids[rank] = pid
        memory = self._memory
        return Seat(checkpoint=self._checkpoint, blocks=self._blocks[rank], memory=(memory.path, memory.slots, memory.slot_bytes))

    def turn(self, rank: int, read: Sequence[int], taken: Sequence[int], want: int) -> list[Grant]:
        return self._book.turn(rank, read, taken, want)


WeightDesk = ray.remote(num_cpus=0, max_restarts=0)(WeightBook)


class _Counter:
    """A `cluster.weight_memory.Desk`: one shard's place at the node's."""

    def __init__(self, desk: Any, rank: int) -> None:
        self._desk, self._rank = desk, rank

    def turn(self, read: Sequence[int], taken: Sequence[int], want: int) -> list[Grant]:
        grants: list[Grant] = ray.get(self._desk.turn.remote(self._rank, read, taken, want))
        return grants


def take_seat(desk: Any, rank: int, spec: ShardSpec, progress: Progress) -> tuple[Checkpoint, WeightReader]:
    """A shard's reader at its node's desk. `progress` is kept up to date."""
    seat: Seat = ray.get(desk.join.remote(rank, os.getpid()))
    reader = WeightReader(seat.checkpoint, seat.blocks, Memory.attach(*seat.memory), _Counter(desk, rank), spec.loading, progress)
    return seat.checkpoint, reader
