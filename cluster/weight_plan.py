"""Which bytes of a checkpoint one node reads, in which blocks, and what each of its shards takes from them. Pure.

A shard needs: its experts and its rows of row-sliced tensors (consecutive bytes), and all of every column-sliced or replicated tensor,
which the node reads once for all its shards. Needs close to each other in a file are read in one go, gaps included, as long as the gaps
are at most `WASTE` of what the node needs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.checkpoint import Checkpoint
from model.feed import Block, Fill
from model.weights import ELEMENT_BYTES, Shard, TensorSlice, local_slices

WASTE = 0.015  # of a node's needs, read for nothing: fewer requests are worth it
MAX_GAP = 1 << 20  # bytes: what a request costs at 50 MB/s and 20 ms
SMALL = 1 << 20  # bytes below which a block is not ended where other shards' needs begin


@dataclass(frozen=True, slots=True)
class Range:
    """One read: [start, stop) of a file, and the ranks that need something in it."""

    file: int
    start: int
    stop: int
    ranks: frozenset[int]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    ranges: tuple[Range, ...]
    blocks: Mapping[int, tuple[Block, ...]]  # by rank; a block is numbered by its range
    union: int  # bytes that at least one shard of the node needs

    @property
    def nbytes(self) -> int:
        """Bytes that the node reads."""
        return sum(r.nbytes for r in self.ranges)

    @property
    def largest(self) -> int:
        return max((r.nbytes for r in self.ranges), default=0)


@dataclass(slots=True)
class Need:
    """Consecutive bytes that a shard needs of one tensor: whole rows."""

    file: int
    start: int
    stop: int
    row: int  # bytes
    base: int  # the tensor's first byte in the file
    rank: int
    piece: TensorSlice


def shard_needs(checkpoint: Checkpoint, shard: Shard) -> Iterator[Need]:
    """What one shard reads. Raises ConfigError for an impossible grid."""
    files, starts = checkpoint.table()
    for piece in local_slices(checkpoint.config, shard):
        element = ELEMENT_BYTES[piece.dtype]
        row = element if piece.padded else math.prod(piece.shape[1:]) * element
        first, last = (piece.start, piece.stop) if piece.padded or piece.dim == 0 else (0, piece.shape[0])
        base = starts[piece.number]
        yield Need(files[piece.number], base + first * row, base + last * row, row, base, shard.ep_rank, piece)


def plan_node(checkpoint: Checkpoint, ranks: Sequence[int], *, tp: int, shards: int, block_bytes: int) -> NodePlan:
    """The reads of a node that holds `ranks` of a grid of `shards` ranks, `tp` of which share the heads of a group.

    No block is larger than `block_bytes`, unless one row of a tensor is.
    """
    needs = [
        need
        for rank in ranks
        for need in shard_needs(checkpoint, Shard(tp_rank=rank % tp, tp_size=tp, ep_rank=rank, ep_size=shards))
        if need.stop > need.start
    ]
    needs.sort(key=lambda n: (n.file, n.start, n.stop))
    segments = _segments(needs)
    union = sum(s.nbytes for s in segments)
    ranges = list(_blocks(segments, _bridged(segments, int(WASTE * union)), block_bytes))
    starts = [(r.file, r.start) for r in ranges]
    fills: dict[int, dict[int, list[Fill]]] = {rank: {} for rank in ranks}
    for need in needs:
        number = bisect_right(starts, (need.file, need.start)) - 1
        while number < len(ranges) and (ranges[number].file, ranges[number].start) < (need.file, need.stop):
            block = ranges[number]
            first = (max(need.start, block.start) - need.base) // need.row
            rows = (min(need.stop, block.stop) - need.base) // need.row - first
            fill = Fill(need.piece, first, rows, need.base + first * need.row - block.start)
            fills[need.rank].setdefault(number, []).append(fill)
            number += 1
    blocks = {
        rank: tuple(Block(n, ranges[n].file, ranges[n].start, ranges[n].stop, taken[n]) for n in sorted(taken))
        for rank, taken in fills.items()
    }
    return NodePlan(ranges=tuple(ranges), blocks=blocks, union=union)


@dataclass(slots=True)
class _Segment:
    """Bytes of one tensor that the same ranks need."""

    file: int
    start: int
    stop: int
    row: int
    ranks: frozenset[int]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _segments(needs: Sequence[Need]) -> list[_Segment]:
    """The union of all needs, cut wherever the set of ranks changes or a tensor ends. In order of file and place."""
    segments: list[_Segment] = []
    index = 0
    while index < len(needs):
        first = needs[index]
        end = index
        while end < len(needs) and (needs[end].file, needs[end].base) == (first.file, first.base):
            end += 1
        same = needs[index:end]
        index = end
        if all((n.start, n.stop) == (first.start, first.stop) for n in same):
            segments.append(_Segment(first.file, first.start, first.stop, first.row, frozenset(n.rank for n in same)))
            continue
        cuts = sorted({n.start for n in same} | {n.stop for n in same})
        for start, stop in pairwise(cuts):
            ranks = frozenset(n.rank for n in same if n.start <= start and stop <= n.stop)
            if ranks:
                segments.append(_Segment(first.file, start, stop, first.row, ranks))
    return segments


def _bridged(segments: Sequence[_Segment], budget: int) -> set[int]:
    """Numbers of the segments before which a gap is read too: the smallest gaps, within the budget of bytes."""
    gaps = []
    for i in range(1, len(segments)):
        before, after = segments[i - 1], segments[i]
        if before.file == after.file and (gap := after.start - before.stop) <= MAX_GAP:
            gaps.append((gap, i))
    bridged = set()
    for gap, i in sorted(gaps):
        budget -= gap
        if budget < 0:
            break
        bridged.add(i)
    return bridged


def _blocks(segments: Sequence[_Segment], bridged: set[int], limit: int) -> Iterator[Range]:
    """Consecutive segments in blocks of at most `limit` bytes; longer segments are cut between rows."""
    current: Range | None = None
    for i, segment in enumerate(segments):
        if current is not None:
            joined = max(current.stop, segment.stop) - current.start
            apart = current.ranks != segment.ranks and min(current.nbytes, segment.nbytes) >= SMALL
            if i in bridged and joined <= limit and not apart:
                current = Range(current.file, current.start, segment.stop, current.ranks | segment.ranks)
                continue
            yield current
        step = max(1, limit // segment.row) * segment.row
        start = segment.start
        while segment.stop - start > step:
            yield Range(segment.file, start, start + step, segment.ranks)
            start += step
        current = Range(segment.file, start, segment.stop, segment.ranks)
    if current is not None:
        yield current
