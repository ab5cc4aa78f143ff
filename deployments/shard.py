"""A Ray actor around one `ModelRunner`: one accelerator's experts, heads, pages and slots.

Concurrency groups: `step` has one thread, so steps run in the order they were sent; `control` stays free for pings and for the
abort that unblocks a rank whose peer died inside a collective (a ring all-reduce would otherwise wait for the transport's timeout).
"""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import ray

from deployments.spec import ShardSpec
from engine.errors import ShardLost

logger = logging.getLogger("ray.serve")
KEEPALIVE = b"-"  # no plan is this short


@ray.remote(concurrency_groups={"step": 1, "control": 2}, max_restarts=0)
class Shard:
    """Lifecycle: `endpoint` on rank 0 → `join` on all → `load` on all → `follow` on ranks > 0, `step` on rank 0 → `abort` or `stop`."""

    def __init__(self, spec: ShardSpec, rank: int) -> None:
        import torch  # the replica that declares this actor never imports torch

        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._rank = rank
        self._mesh = None
        self._runner = None
        self._aborted = False

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return os.getpid()

    def endpoint(self) -> str:
        """A free address on this node for the ranks' rendezvous."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, url: str) -> None:
        from deployments.lockstep import Lockstep
        from model.parallel import connect

        spec = self._spec
        self._mesh = connect(
            url,
            rank=self._rank,
            world=spec.shards,
            tp=spec.tp,
            backend="nccl" if spec.device == "cuda" else "gloo",
            timeout=spec.step_timeout_s,
        )
        self._lockstep = Lockstep(self._mesh.links)

    def load(self) -> float:
        """Reads this rank's part of the checkpoint; seconds it took."""
        import torch

        from model.runner import build_runner

        spec, begin = self._spec, time.monotonic()
        self._runner = build_runner(
            spec.model_dir,
            self._mesh,
            device=torch.device(spec.device),
            dtype=getattr(torch, spec.dtype),
            page_size=spec.page_size,
            num_pages=spec.num_pages,
            num_slots=spec.num_slots,
            matchers=_matchers(spec) if self._rank % spec.tp == 0 else None,
        )
        return time.monotonic() - begin

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
        self.abort()
        return ShardLost(f"shard {self._rank} of {self._spec.shards} failed: {type(error).__name__}: {error}")


def _matchers(spec: ShardSpec) -> Callable[[str], Any] | None:
    """Grammars at work, for the rank that samples. Built at start: it takes seconds for a vocabulary of 163,840."""
    from chat.matcher import MatcherFactory
    from chat.tokenizer import Tokenizer

    if spec.tokenizer_dir is None:
        return None
    return MatcherFactory(Tokenizer.from_dir(spec.tokenizer_dir), spec.vocab_size).create
