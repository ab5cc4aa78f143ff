"""A Ray actor around one `ModelRunner`: one accelerator's experts, heads, pages and slots.

Concurrency groups: `step` has one thread, so steps run in the order they were sent; `state` has one of its own, so that bundles go out
and come in beside the steps; `control` stays free for pings and for the abort that unblocks a rank whose peer died inside a collective (a
ring all-reduce would otherwise wait for the transport's timeout).
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import ray

from cluster.checkpoint import tokenizer_folder
from cluster.weight_reader import Progress
from deployments.spec import ShardSpec
from deployments.weight_desk import take_seat
from engine.bundle import ExportPart, ObjectRef, StateBundle, digest, overlapping
from engine.errors import ShardLost

logger = logging.getLogger("ray.serve")
KEEPALIVE = b"-"  # no plan is this short


@ray.remote(concurrency_groups={"step": 1, "state": 1, "control": 2}, max_restarts=0)  # type: ignore[call-overload]  # Ray's stubs
class Shard:
    """Lifecycle: `load` on all → `endpoint` on rank 0 → `join` on all → `follow` on ranks > 0, `step` on rank 0 → `abort` or `stop`.

    A shard that outlives its group goes from `leave` and `reset` to `join` again,
    with its weights, at another address and in the next epoch.
    """

    def __init__(self, spec: ShardSpec, rank: int) -> None:
        import torch  # the replica that declares this actor never imports torch

        from deployments.lockstep import Lockstep
        from model.parallel import Mesh

        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._rank = rank
        self._mesh = Mesh(rank=rank, world=spec.shards, tp=spec.tp)
        self._lockstep = Lockstep(self._mesh.links)
        self._progress = Progress()
        self._runner: Any = None
        self._aborted = False
        self._epoch = 0

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return os.getpid()

    def endpoint(self) -> str:
        """A free address on this node for the ranks' rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def idle(self) -> None:
        """Returns when nothing that takes its turn with `join` and `load` runs here any more."""

    def join(self, url: str, epoch: int) -> None:
        self._epoch = epoch
        self._mesh.join(url, backend="nccl" if self._spec.device == "cuda" else "gloo", timeout=self._spec.step_timeout_s)
        self._aborted = False

    @ray.method(concurrency_group="control")
    def lacks_weights(self) -> str | None:
        """The id of its node; None when it has its weights."""
        return None if self._runner is not None else ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Of `load`."""
        return self._progress

    def load(self, desk: Any, build: Callable[..., Any] | None = None) -> tuple[float, int]:
        """Reads this rank's part of the checkpoint: seconds it took, bytes of weights. Nothing when it has them already.

        `desk`: its node's `WeightDesk`. `build` stands in for `deployments.load.build_runner`, and then there is none: benchmarks inject
        a runner that computes nothing.
        """
        if self._runner is not None:
            return 0.0, 0
        import torch

        from deployments.load import build_runner

        spec, begin = self._spec, time.monotonic()
        if build is None:
            checkpoint, reader = take_seat(desk, self._rank, spec, self._progress)
            build = partial(build_runner, reader=reader, config=checkpoint.config)
        self._runner = build(
            spec.model_dir,
            self._mesh,
            device=torch.device(spec.device),
            dtype=getattr(torch, spec.dtype),
            page_size=spec.page_size,
            num_pages=spec.num_pages,
            num_slots=spec.num_slots,
            matchers=_matchers(spec) if self._rank % spec.tp == 0 else None,
        )
        return time.monotonic() - begin, sum(p.numel() * p.element_size() for p in self._runner.model.parameters())

    @ray.method(concurrency_group="step")
    def step(self, payload: bytes) -> bytes:
        """Rank 0: hands the encoded plan to all ranks, runs it, returns the encoded result of all groups."""
        from deployments.wire import decode_plan, encode_result

        try:
            self._lockstep.send(payload)
            return encode_result(self._runner.run(decode_plan(payload)))
        except Exception as error:
            raise self._fail(error) from None

    @ray.method(concurrency_group="step")
    def follow(self) -> None:
        """Ranks > 0: runs the plans that rank 0 sends until an empty message says stop."""
        from deployments.wire import decode_plan

        try:
            while payload := self._lockstep.receive():
                if payload != KEEPALIVE:
                    self._runner.run(decode_plan(payload))
        except Exception as error:
            raise self._fail(error) from None

    @ray.method(concurrency_group="step")
    def keepalive(self) -> None:
        """Rank 0, when idle: a word to the followers, so that their wait for the next plan never times out in silence."""
        try:
            self._lockstep.send(KEEPALIVE)
        except Exception as error:
            raise self._fail(error) from None

    @ray.method(concurrency_group="step")
    def stop(self) -> None:
        """Rank 0: releases the followers."""
        self._lockstep.send(b"")

    @ray.method(concurrency_group="step")
    def leave(self) -> None:
        """A survivor: returns when no step runs here any more."""
        self.abort()  # type: ignore[operator]  # Ray's stubs take a decorated method for a remote one

    @ray.method(concurrency_group="state")
    def reset(self, epoch: int) -> None:
        """A survivor: forgets rows and states, after the export or import under way; others of the old epoch are refused from now on."""
        self._epoch = epoch
        if self._runner is not None:
            self._runner.reset()

    @ray.method(concurrency_group="state", num_returns=2)
    def export(self, part: ExportPart) -> tuple[dict[str, np.ndarray], ObjectRef]:
        """The arrays of one stored object, and its name, digest and size. What it reads is pinned, so steps go on meanwhile."""
        from model.bundle_io import export_latents, export_recurrent

        if part.epoch != self._epoch:
            raise ShardLost(f"{part.name} was written by another shard group")
        with self._beside_the_steps():
            if part.heads is not None:
                arrays = export_recurrent(self._runner.pools, part.slot)
            else:
                arrays = export_latents(self._runner.pools, part.pages, part.start, part.stop)
        return arrays, ObjectRef(name=part.name, digest=digest(arrays), nbytes=sum(a.nbytes for a in arrays.values()))

    @ray.method(concurrency_group="state")
    def restore(
        self, epoch: int, bundle: StateBundle, refs: dict[str, list[Any]], slot: int, pages: Sequence[int], timeout_s: float
    ) -> str | None:
        """Copies a bundle's objects, digests checked, into a reserved slot and pages. Returns why it could not, in one word, or None."""
        from model.bundle_io import import_latents, import_recurrent

        if epoch != self._epoch:
            return "stale"
        pools, size = self._runner.pools, self._spec.page_size
        heads = pools.kda.shape[2]
        first = self._mesh.tp_rank * heads
        try:
            taken = 0
            for part in overlapping(bundle.recurrent, first, first + heads):
                arrays = _checked(part.object, refs, timeout_s)
                with self._beside_the_steps():
                    taken += import_recurrent(pools, slot, first, part.first, arrays)
            if taken != heads:
                return "incomplete"
            for segment in bundle.segments:
                arrays = _checked(segment.object, refs, timeout_s)
                with self._beside_the_steps():
                    import_latents(pools, pages[segment.start // size : -(-segment.stop // size)], segment.start, arrays)
        except _Unusable as fault:
            return str(fault)
        except (ValueError, KeyError, RuntimeError):  # arrays that are not of the pools' shapes
            logger.exception("bundle %s does not fit shard %d", bundle.lineage, self._rank)
            return "wrong_schema"
        return None

    @contextmanager
    def _beside_the_steps(self) -> Iterator[None]:
        """On CUDA a stream of its own, behind the steps submitted so far; done when left."""
        if self._spec.device != "cuda":
            yield
            return
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Destroys the process groups, so that every peer blocked on this rank gets an error within milliseconds. Idempotent."""
        if self._mesh is not None and not self._aborted:
            self._aborted = True
            self._mesh.close()

    def _fail(self, error: Exception) -> ShardLost:
        """The first survivor that sees an error takes its group down; the error travels with its cause in words."""
        logger.exception("shard %d of %d failed", self._rank, self._spec.shards)
        traceback.clear_frames(error.__traceback__)  # they hold the groups, whose sockets must close now
        self.abort()  # type: ignore[operator]  # Ray's stubs take a decorated method for a remote one
        return ShardLost(f"shard {self._rank} of {self._spec.shards} failed: {type(error).__name__}: {error}")


def _matchers(spec: ShardSpec) -> Callable[[str], Any] | None:
    """Grammars at work, for the rank that samples. Built at start: it takes seconds for a vocabulary of 163,840."""
    from chat.matcher import MatcherFactory
    from chat.tokenizer import Tokenizer

    if spec.tokenizer_dir is None:
        return None
    return MatcherFactory(Tokenizer.from_dir(tokenizer_folder(spec.tokenizer_dir, spec.model_endpoint_url)), spec.vocab_size).create


class _Unusable(Exception):
    """Why a stored object cannot be used, in one word."""


def _checked(meta: ObjectRef, refs: dict[str, list[Any]], timeout_s: float) -> dict[str, np.ndarray]:
    """An object's arrays (read-only views into the object store), digest checked. Raises _Unusable."""
    if meta.name not in refs:
        raise _Unusable("incomplete")
    try:
        arrays = ray.get(refs[meta.name][0], timeout=timeout_s)
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("object %s is lost: %s", meta.name, type(error).__name__)
        raise _Unusable("lost") from None
    if digest(arrays) != meta.digest:
        raise _Unusable("digest")
    return arrays
