"""Links between real processes on this machine, one that never comes, and judgements over figures."""

from __future__ import annotations

import socket
import time

import pytest

from cluster.doctor import CheckFailed, in_child
from cluster.doctor_links import LinkFacts, judge_links, links_here, measure_links


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_two_processes_meet_and_are_measured() -> None:
    found = links_here(("cpu", "cpu"), limit_s=90)
    assert [(f.check, f.status.value) for f in found] == [("links", "ok")]
    assert found[0].figures["processes"] == 2
    assert found[0].figures["all_reduce_bytes_per_s"] > 0
    assert "gloo" in found[0].what


def test_a_rank_that_never_comes_is_named_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(CheckFailed, match="rank 0: ranks 1, 2 did not come"):
        in_child(measure_links, 0, 3, free_url(), "cpu", 3.0, limit_s=90)
    assert time.monotonic() - begin < 90


def test_a_rank_0_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckFailed, match=r"rank 1 cannot reach rank 0 at tcp://127\.0\.0\.1:9"):
        in_child(measure_links, 1, 2, "tcp://127.0.0.1:9", "cpu", 3.0, limit_s=90)


def test_slow_neighbours_are_told() -> None:
    facts = [LinkFacts(rank=r, ring=40e9 if r != 2 else 3e9, reduce=30e9) for r in range(4)]
    found = judge_links(facts, ["a", "a", "b", "b"], "NCCL")
    assert [(f.status.value, f.where) for f in found] == [("ok", ""), ("warn", "b")]
    assert "rank 2 → b: 3 GB/s, the median is 40 GB/s" in found[1].what
