"""One step of one data-parallel group as tensors: all rows' new tokens in one ragged batch.

Rows of one token come first, so that layers can hand them to decode kernels as a leading slice. KDA works in rounds: a row that asks
for checkpoints inside the step is cut into pieces at their positions, and round r holds the r-th piece of every row that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One row's part of a step: `tokens` at positions start, start + 1, …"""

    tokens: Sequence[int]
    start: int  # 0: begin from the zero state, whatever the slot holds
    slot: int
    pages: Sequence[int]  # of the row, this step's included
    checkpoints: tuple[tuple[int, int], ...] = ()  # (position, slot), positions in (start, start + len(tokens)]
    logits: range = range(0)  # which of the tokens' logits are wanted, counted inside the segment

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Round:
    """Pieces of rows that KDA advances together. Slot -1 as a source is the zero state."""

    tokens: Tensor | None  # [T'] which tokens of the batch; None: all of them
    num_decode: int  # leading pieces of one token
    cu_seqlens: Tensor  # [N + 1]
    read_slots: Tensor  # [N]
    write_slots: Tensor  # [N]
    copy_from: Tensor | None  # [M] further slots that receive a piece's state after the round
    copy_to: Tensor | None  # [M]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows. All tensors on the device, int64."""

    counts: tuple[int, ...]  # tokens of every data-parallel group in this step
    ids: Tensor  # [T]
    num_decode: int  # leading rows of one token
    prefill_cu_seqlens: Tensor  # [R - num_decode + 1], from 0
    lengths: Tensor  # [R] tokens of each row after this step
    prefill_lengths: tuple[int, ...]  # the same of the rows of more than one token, on the host
    prefill_cu_lengths: Tensor  # [R - num_decode + 1], from 0
    page_tables: Tensor  # [R, P]; entries past a row's pages are 0 and masked
    latent_places: Tensor  # [T] page * page_size + offset: where each token's latent goes
    rounds: tuple[Round, ...]
    logits: Tensor  # [S] the tokens whose logits are wanted

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]


def build_batch(segments: Sequence[Segment], counts: Sequence[int], page_size: int, device: torch.device | str) -> Batch:
    """`segments` with those of one token first. Raises `ValueError` for rows that break the contract of `engine.plan`."""

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    num_decode = sum(len(s.tokens) == 1 for s in segments)
    if any(len(s.tokens) == 1 for s in segments[num_decode:]):
        raise ValueError("rows of one token must come first")
    places: list[int] = []
    logits: list[int] = []
    offset = 0
    for s in segments:
        if not s.tokens or len(s.pages) * page_size < s.stop:
            raise ValueError(f"tokens [{s.start}, {s.stop}) of the row in slot {s.slot} with {len(s.pages)} pages of {page_size}")
        places += [s.pages[p // page_size] * page_size + p % page_size for p in range(s.start, s.stop)]
        logits += [offset + i for i in s.logits]
        offset += len(s.tokens)
    width = max((-(-s.stop // page_size) for s in segments), default=0)
    tables = [[*s.pages[:width], *[0] * (width - len(s.pages))] for s in segments]
    return Batch(
        counts=tuple(counts),
        ids=tensor([t for s in segments for t in s.tokens]),
        num_decode=num_decode,
        prefill_cu_seqlens=tensor([0, *accumulate(len(s.tokens) for s in segments[num_decode:])]),
        lengths=tensor([s.stop for s in segments]),
        prefill_lengths=tuple(s.stop for s in segments[num_decode:]),
        prefill_cu_lengths=tensor([0, *accumulate(s.stop for s in segments[num_decode:])]),
        page_tables=tensor([p for table in tables for p in table]).view(len(segments), width),
        latent_places=tensor(places),
        rounds=_rounds(segments, device),
        logits=tensor(logits),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    first: int  # among the batch's tokens
    count: int
    read: int
    writes: tuple[int, ...]


def _rounds(segments: Sequence[Segment], device: torch.device | str) -> tuple[Round, ...]:
    rows = []
    offset = 0
    for s in segments:
        rows.append(_pieces(s, offset))
        offset += len(s.tokens)
    depth = max((len(r) for r in rows), default=0)
    return tuple(_round([r[i] for r in rows if i < len(r)], offset, device) for i in range(depth))


def _pieces(s: Segment, offset: int) -> list[_Piece]:
    cuts: dict[int, list[int]] = {}
    for position, slot in s.checkpoints:
        if not s.start < position <= s.stop:
            raise ValueError(f"checkpoint at {position} outside of tokens ({s.start}, {s.stop}] of the row in slot {s.slot}")
        cuts.setdefault(position, []).append(slot)
    cuts.setdefault(s.stop, []).insert(0, s.slot)
    pieces = []
    begin, read = s.start, s.slot if s.start else -1
    for position in sorted(cuts):
        pieces.append(_Piece(offset + begin - s.start, position - begin, read, tuple(cuts[position])))
        begin, read = position, cuts[position][0]
    return pieces


def _round(pieces: list[_Piece], num_tokens: int, device: torch.device | str) -> Round:
    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    pieces = sorted(pieces, key=lambda p: p.count > 1)  # one-token pieces first, otherwise in order
    tokens = [t for p in pieces for t in range(p.first, p.first + p.count)]
    copies = [(p.writes[0], slot) for p in pieces for slot in p.writes[1:]]
    return Round(
        tokens=None if tokens == list(range(num_tokens)) else tensor(tokens),
        num_decode=sum(p.count == 1 for p in pieces),
        cu_seqlens=tensor([0, *accumulate(p.count for p in pieces)]),
        read_slots=tensor([p.read for p in pieces]),
        write_slots=tensor([p.writes[0] for p in pieces]),
        copy_from=tensor([src for src, _ in copies]) if copies else None,
        copy_to=tensor([dst for _, dst in copies]) if copies else None,
    )
