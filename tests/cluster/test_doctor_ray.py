"""Two Ray nodes on this machine: other files, another clock, links between them, and one that has stopped answering."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from app.cli import cli
from cluster.doctor_files import judge_fingerprints
from cluster.doctor_node import NodeAsk, judge_clocks
from cluster.doctor_ray import cluster_links, inspect_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]
GOLDEN = Path(__file__).parent.parent / "data" / "k3" / "tiny-a" / "model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One a node. Each node's processes begin in their own, so a path through /proc/self/cwd is another file on each."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in (first, second):
        shutil.copytree(GOLDEN, folder / "model")
    return first, second


@pytest.fixture(scope="module")
def cluster(folders: tuple[Path, Path]) -> Iterator[Any]:
    options = {"num_cpus": 1, "object_store_memory": 80 << 20}
    before = Path.cwd()
    os.chdir(folders[0])
    both = Cluster(initialize_head=True, head_node_args=options)
    os.chdir(folders[1])
    second = both.add_node(**options)
    os.chdir(before)
    ray.init(address=both.address, namespace="serve", log_to_driver=False)
    yield both, second
    ray.shutdown()
    both.shutdown()


def ask(tmp_path: Path) -> NodeAsk:
    return NodeAsk(model_dir="/proc/self/cwd/model", spill_dir=str(tmp_path))


def test_equal_nodes(cluster: Any, tmp_path: Path) -> None:
    facts = inspect_cluster(ask(tmp_path), limit_s=90)
    assert [(f.check, f.status.value) for f in facts.findings] == [("ray", "ok")]
    assert [f.status.value for f in judge_fingerprints([(n.name, n.fingerprint) for n in facts.nodes])] == ["ok"]
    assert len({n.name for n in facts.nodes}) == 2
    assert all(abs(offset) < 0.5 for _, offset in facts.offsets)
    assert all(n.object_store == 80 << 20 for n in facts.nodes)


def test_a_clock_that_is_off(cluster: Any, tmp_path: Path) -> None:
    facts = inspect_cluster(ask(tmp_path), limit_s=90, clock=lambda: time.time() - 40)
    found = judge_clocks(facts.offsets, "this machine")
    assert [f.status.value for f in found] == ["fail", "fail"]
    assert all("40.0 s ahead of this machine" in f.what for f in found)


def test_links_between_the_nodes(cluster: Any) -> None:
    found = cluster_links("cpu", limit_s=90)
    assert [f.status.value for f in found] == ["ok"], found
    assert found[0].figures["processes"] == 2


def test_other_weights_on_one_node_are_told_with_its_name(cluster: Any, folders: tuple[Path, Path], tmp_path: Path) -> None:
    file = folders[1] / "model" / "model-00003-of-000003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    facts = inspect_cluster(ask(tmp_path), limit_s=90)
    found = judge_fingerprints([(n.name, n.fingerprint) for n in facts.nodes])
    assert [f.status.value for f in found] == ["fail"]
    assert all(n.name in found[0].what for n in facts.nodes)


def test_the_command_looks_at_every_node(cluster: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node has other weights since the last test."""
    monkeypatch.chdir(folders[0])
    both, _ = cluster
    words = ["doctor", "model=/proc/self/cwd/model", "--address", both.address, "--port", "1", "--json"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    found: dict[str, list[dict[str, Any]]] = {}
    for line in result.stdout.splitlines():
        found.setdefault(json.loads(line)["check"], []).append(json.loads(line))
    assert result.exit_code == 1
    assert f"the Ray cluster at {both.address}" in result.stderr
    names = {one["where"] for one in found["files"]}
    assert len(names) == 2
    assert {
        check: [one["status"] for one in found[check]] for check in ("files", "clock", "ray", "fingerprint", "configuration", "links")
    } == {
        "files": ["ok", "ok"],
        "clock": ["ok", "ok"],
        "ray": ["ok"],
        "fingerprint": ["fail"],
        "configuration": ["ok"],
        "links": ["ok"],
    }
    assert "golden" not in found, "other tokens are no news then"


def test_a_node_that_has_stopped_is_told_in_time(cluster: Any, tmp_path: Path) -> None:
    """Last: its raylet never runs again."""
    _, second = cluster
    second_name = next(n for n in ray.nodes() if n["NodeID"] == second.node_id)["NodeID"][:6]
    raylet = next(p for p in second.all_processes["raylet"]).process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        facts = inspect_cluster(ask(tmp_path), limit_s=12)
        links = cluster_links("cpu", limit_s=12)
        assert time.monotonic() - begin < 60
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert len(facts.nodes) == 1
    silent = [f for f in facts.findings if f.status.value == "fail"]
    assert [second_name in f.where for f in silent] == [True]
    assert links[0].status.value == "fail"
