"""Can the processes that will be shards reach each other, do their collectives add up, and how fast are they? One call a process."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from cluster.doctor import Finding, fail, in_child, ok, size, warn
from engine.errors import EngineFailure

ELEMENTS = 4 * 2**20  # float32: 16 MiB a message
ROUNDS = 3  # the best counts
SLOW_SHARE = 0.5  # of the median of the ring: slower neighbours are told
NETWORK = (
    "open all ports between the nodes; if a node has several addresses, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME before Ray starts"
)


class LinkBroken(EngineFailure):
    """Says which ranks did not come, or what did not add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """Of one rank. Bytes a second."""

    rank: int
    ring: float  # to the next rank, while every rank sends
    reduce: float  # of an all-reduce, as the bytes that a ring moves per rank


def measure_links(rank: int, world: int, url: str, device_name: str, limit_s: float) -> LinkFacts:
    """Meets the other ranks at `url` (tcp://host:port of rank 0) and measures: by gloo on "cpu", by NCCL on "cuda:0".

    Raises LinkBroken within about `limit_s`.
    """
    import torch
    import torch.distributed as dist

    deadline = time.monotonic() + limit_s
    address = urlparse(url)
    assert address.hostname is not None
    assert address.port is not None
    device = torch.device(device_name)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = dist.TCPStore(address.hostname, address.port, world, is_master=rank == 0, wait_for_workers=False, timeout=_left(deadline))
        store.set(f"here/{rank}", "yes")
    except dist.DistError as error:
        raise LinkBroken(f"rank {rank} cannot reach rank 0 at {url}: {_line(error)}") from None
    _meet(store, rank, world, deadline)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_left(deadline))
        x = torch.full((ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(x)
        expected = world * (world + 1) / 2
        if not bool((x == expected).all()):
            raise LinkBroken(f"rank {rank}: an all-reduce gave {x[0].item()} instead of {expected}")
        reduce = max(_timed(lambda: dist.all_reduce(x.fill_(1.0)), device) for _ in range(ROUNDS)) * 2 * (world - 1) / world
        y = torch.empty_like(x)
        ring = max(_timed(lambda: _pass_on(dist, x, y, rank, world), device) for _ in range(ROUNDS))
        dist.barrier()
        return LinkFacts(rank=rank, ring=ring, reduce=reduce)
    except RuntimeError as error:  # gloo's and NCCL's own
        raise LinkBroken(f"rank {rank}: the ranks met, but {backend} does not connect them: {_line(error)}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def judge_links(facts: Sequence[LinkFacts], places: Sequence[str], backend: str) -> list[Finding]:
    """`places`: the node of each rank. The slowest neighbours are told where they are far below the others."""
    median = sorted(f.ring for f in facts)[len(facts) // 2]
    findings = []
    for f in facts:
        if f.ring < SLOW_SHARE * median:
            other = places[(f.rank + 1) % len(places)]
            what = f"rank {f.rank} → {other}: {size(f.ring)}/s, the median is {size(median)}/s"
            findings.append(warn("links", what, "look at this pair's cable, port, PCIe width and NUMA placement", places[f.rank]))
    slowest = min(f.reduce for f in facts)
    what = (
        f"{len(facts)} processes, {len(set(places))} machine{'s' * (len(set(places)) > 1)}, {backend}: {size(median)}/s to the next one, "
        f"all-reduce {size(slowest)}/s"
    )
    return [ok("links", what, ring_bytes_per_s=median, all_reduce_bytes_per_s=slowest, processes=len(facts)), *findings]


def links_here(devices: Sequence[str], limit_s: float) -> list[Finding]:
    """Of this machine without Ray: a process a device, e.g. ("cpu", "cpu"). Ends within `limit_s`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    world = len(devices)

    def one(rank: int) -> LinkFacts:
        measured: LinkFacts = in_child(measure_links, rank, world, url, devices[rank], limit_s - 2, limit_s=limit_s)
        return measured

    with ThreadPoolExecutor(world) as pool:
        ranks = [pool.submit(one, rank) for rank in range(world)]
    faults = [str(rank.exception()) for rank in ranks if rank.exception() is not None]
    if faults:
        return [broken_links(faults[0])]
    return judge_links([rank.result() for rank in ranks], ["this machine"] * world, "gloo" if devices[0] == "cpu" else "NCCL")


def broken_links(what: str, where: str = "") -> Finding:
    return fail("links", what, NETWORK, where)


def _meet(store: Any, rank: int, world: int, deadline: float) -> None:
    """Every rank waits for all, so that each can say who is missing."""
    for other in range(world):
        try:
            store.wait([f"here/{other}"], _left(deadline))
        except RuntimeError:
            missing = [r for r in range(world) if not store.check([f"here/{r}"])]
            raise LinkBroken(f"rank {rank}: ranks {', '.join(map(str, missing))} did not come") from None


def _pass_on(dist: Any, x: Any, y: Any, rank: int, world: int) -> None:
    pending = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, y, (rank - 1) % world)])
    for work in pending:
        work.wait()


def _timed(work: Any, device: Any) -> float:
    """Bytes of one message over the seconds that `work` takes."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return ELEMENTS * 4 / (time.perf_counter() - begin)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.1, deadline - time.monotonic()))


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
