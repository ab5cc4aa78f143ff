"""`Mesh`: this process' place among all, and the collectives the layers need. Passed in; there is no global.

`tp` consecutive ranks form a TP group (heads and dense widths); the groups are data-parallel; the experts are spread over all ranks.
Sums are in fp32 and in rank order, so every rank of a group holds bit-identical activations and results do not depend on the transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ConfigError
from model.weights import Shard, split

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
MEET_S = 20.0  # longest wait for peers at the meeting place: one of them may have died on its way there
DIRECT_SUM = 1 << 16  # elements up to which a sum is one all-gather; larger ones move each element twice instead of tp times


@dataclass(slots=True, kw_only=True)
class Links:
    """The live process groups of one process. Emptied when a peer is lost, filled when the ranks meet again.

    Nobody else keeps a reference to a group: the sockets of a gloo group close, and its peers get their error, only when the last one goes.
    """

    tp: dist.ProcessGroup | None = None  # the ranks of this TP group
    dp: dist.ProcessGroup | None = None  # the ranks with this TP rank, one of each group
    world: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None  # of all ranks, for small host objects (gloo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks and process groups. With one process every group is None and every collective is the identity."""

    rank: int = 0
    world: int = 1
    tp: int = 1
    links: Links = field(default_factory=Links)

    @classmethod
    def single(cls) -> Mesh:
        return cls()

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def group(self) -> int:
        """Index of this process' data-parallel group."""
        return self.rank // self.tp

    @property
    def groups(self) -> int:
        return self.world // self.tp

    @property
    def shard(self) -> Shard:
        return Shard(tp_rank=self.tp_rank, tp_size=self.tp, ep_rank=self.rank, ep_size=self.world)

    def sum_tp(self, x: Tensor) -> Tensor:
        """Sum of every TP rank's `x` (same shape on each), added in fp32 in rank order -> fp32; `x` itself when there is one rank."""
        if self.tp == 1:
            return x
        x = x.float()
        if x.numel() == 0:
            return x
        if x.numel() <= DIRECT_SUM:
            parts = x.new_empty(self.tp, *x.shape)
            _all_gather(parts.view(-1), x.contiguous().view(-1), group=self.links.tp)
            return _ordered_sum(parts)
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % self.tp))
        parts = torch.empty_like(flat)
        dist.all_to_all_single(parts, flat, group=self.links.tp)
        whole = torch.empty_like(flat)
        _all_gather(whole, _ordered_sum(parts.view(self.tp, -1)), group=self.links.tp)
        return whole[: x.numel()].view_as(x)

    def gather_tp(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate the TP ranks' `x` along the last dim, of which rank i has sizes[i]."""
        if self.tp == 1 or x.shape[:-1].numel() == 0:
            return x if self.tp == 1 else x.new_empty(*x.shape[:-1], sum(sizes))
        parts = self._gather(x.movedim(-1, 0), sizes, self.links.tp)
        return torch.cat(parts).movedim(0, -1)

    def gather_groups(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Each [own tokens, …] -> [all groups' tokens, …] in order of groups, of counts[i] tokens. One collective for all tensors."""
        if self.groups == 1:
            return tuple(tensors)
        columns = [t.contiguous().flatten(1).view(torch.uint8) for t in tensors]
        packed = torch.cat(self._gather(torch.cat(columns, 1), counts, self.links.dp))
        pieces = packed.split([c.shape[1] for c in columns], 1)
        return tuple(p.contiguous().view(t.dtype).unflatten(1, t.shape[1:]) for p, t in zip(pieces, tensors, strict=True))

    def sum_experts(self, partial: Tensor, counts: Sequence[int]) -> Tensor:
        """partial [all groups' tokens, D] of the local experts -> [own tokens, D] fp32: the sum over all ranks, in rank order."""
        partial = partial.float()
        if self.world == 1 or partial.shape[0] == 0:
            return partial
        # Every token is summed by one rank of its group, which then shares it inside the group.
        slices = [stop - start for n in counts for start, stop in (split(n, self.tp, i) for i in range(self.tp))]
        own = slices[self.rank]
        received = partial.new_empty(self.world * own, partial.shape[1])
        dist.all_to_all_single(received, partial.contiguous(), [own] * self.world, slices, group=self.links.world)
        total = _ordered_sum(received.view(self.world, own, partial.shape[1]))
        if self.tp == 1 or counts[self.group] == 0:
            return total
        return torch.cat(self._gather(total, slices[self.group * self.tp : (self.group + 1) * self.tp], self.links.tp))

    def broadcast_tp(self, x: Tensor) -> Tensor:
        """TP rank 0's `x`, on every rank of the group (same shape and dtype on each)."""
        if self.tp > 1 and x.numel():
            dist.broadcast(x, src=self.group * self.tp, group=self.links.tp)
        return x

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Every rank's `value` on rank 0, None elsewhere; over the control group."""
        if self.world == 1:
            return [value]
        received: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, received, dst=0, group=self.links.control)
        return received

    def join(self, url: str, *, backend: str, timeout: float) -> None:
        """Meet the other ranks at `url` (`tcp://host:port`, `file:///path`). `timeout` in seconds bounds every collective.

        With backend "nccl" after this process selected its device. Again after `close`, at another url, with a new peer for a lost one.
        """
        if self.world == 1:
            return
        limit = timedelta(seconds=timeout)
        address = urlparse(url)
        if address.scheme == "tcp" and address.hostname and address.port:
            patience = min(limit, timedelta(seconds=MEET_S))
            store = dist.TCPStore(address.hostname, address.port, self.world, is_master=self.rank == 0, timeout=patience)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=limit)
        else:
            dist.init_process_group(backend, init_method=url, rank=self.rank, world_size=self.world, timeout=limit)
        for first in range(0, self.world, self.tp):
            group = dist.new_group(range(first, first + self.tp), timeout=limit, backend=backend) if self.tp > 1 else None
            if first == self.group * self.tp:
                self.links.tp = group
        for first in range(self.tp):
            group = dist.new_group(range(first, self.world, self.tp), timeout=limit, backend=backend) if self.groups > 1 else None
            if first == self.tp_rank:
                self.links.dp = group
        self.links.world = dist.group.WORLD
        self.links.control = dist.group.WORLD if backend == "gloo" else dist.new_group(timeout=limit, backend="gloo")

    def close(self) -> None:
        """Leave the process groups. Peers blocked in a collective get an error. Idempotent."""
        self.links.tp = self.links.dp = self.links.world = self.links.control = None
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _gather(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
        """Every member's x [sizes[i], …]; shorter ones travel padded to the longest."""
        most = max(sizes)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = list(x.new_empty(len(sizes), most, *x.shape[1:]).unbind())
        if padded.numel():
            dist.all_gather(parts, padded, group=group)
        return [part[:n] for part, n in zip(parts, sizes, strict=True)]


def connect(url: str, *, rank: int, world: int, tp: int, backend: str, timeout: float) -> Mesh:
    """The mesh of one of `world` processes, joined (`Mesh.join`). Raises `ConfigError` for a grid that does not divide."""
    if tp < 1 or world % tp or not 0 <= rank < world:
        raise ConfigError(
            f"rank {rank} of {world} shards with tp {tp}: the number of shards must be a multiple of the tensor-parallel width"
        )
    mesh = Mesh(rank=rank, world=world, tp=tp)
    mesh.join(url, backend=backend, timeout=timeout)
    return mesh


def _ordered_sum(parts: Tensor) -> Tensor:
    """Sum over dim 0, one after the other: the order is the ranks', on every device."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
