"""`k3 doctor`'s findings, its limits of time, files on a disk and judgements over plain facts."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.doctor import WHY, CheckFailed, CheckHung, Finding, Status, fail, in_child, ok, size, together
from cluster.doctor_files import check_files, judge_fingerprints
from cluster.doctor_node import (
    Accelerators,
    NodeAsk,
    NodeFacts,
    inspect_node,
    judge_accelerators,
    judge_clocks,
    judge_disks,
    judge_memory,
    judge_software,
    read_accelerators,
)

GOLDEN = Path(__file__).parent.parent / "data" / "k3" / "tiny-a" / "model"
GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


def statuses(findings: list[Finding]) -> list[str]:
    return [f.status.value for f in findings]


# -- findings and time


def test_a_finding_has_its_reason_and_a_fix_exactly_when_something_is_wrong() -> None:
    assert fail("files", "gone", "copy it").why == WHY["files"]
    with pytest.raises(ValueError, match="a fix"):
        fail("files", "gone", "")
    with pytest.raises(ValueError, match="a fix"):
        Finding(check="files", status=Status.OK, what="fine", fix="nothing to do")
    with pytest.raises(ValueError, match="no reason"):
        ok("weather", "fine")


def test_a_check_that_hangs_or_breaks_is_a_finding_and_the_others_are_told() -> None:
    begin = time.monotonic()
    found = together(
        {"disk": lambda: time.sleep(60) or [], "files": lambda: [ok("files", "whole")], "clock": lambda: [1 / 0]},  # type: ignore[list-item]
        limit_s=0.5,
        where="here",
    )
    assert time.monotonic() - begin < 30
    assert [(f.check, f.status.value) for f in found] == [("disk", "fail"), ("files", "ok"), ("clock", "fail")]
    assert "no answer within" in found[0].what
    assert "ZeroDivisionError: division by zero" in found[2].what


def test_a_process_that_hangs_is_killed_and_one_that_dies_is_told() -> None:
    assert in_child(divmod, 7, 2, limit_s=60) == (3, 1)
    with pytest.raises(CheckHung, match="no answer within 2 s"):
        in_child(time.sleep, 600, limit_s=2)
    with pytest.raises(CheckFailed, match="ZeroDivisionError"):
        in_child(divmod, 1, 0, limit_s=60)
    with pytest.raises(CheckFailed, match="exit code 7"):
        in_child(os._exit, 7, limit_s=60)


def test_sizes_are_read_at_a_glance() -> None:
    assert [size(n) for n in (0, 999, 7_200_000, 1_560_860_324_864)] == ["0 B", "999 B", "7.2 MB", "1.561 TB"]


# -- files


def test_whole_files_have_a_fingerprint(model: Path) -> None:
    findings, fingerprint = check_files(model, "n1")
    assert statuses(findings) == ["ok"]
    assert findings[0].figures["files"] == 3
    assert fingerprint is not None
    assert check_files(GOLDEN)[1] == fingerprint, "the folder's name does not count"


def test_every_truncated_shard_is_named(model: Path) -> None:
    for number in (1, 3):
        file = model / f"model-0000{number}-of-000003.safetensors"
        os.truncate(file, file.stat().st_size - 5)
    findings, fingerprint = check_files(model, "n1")
    assert fingerprint is None
    assert statuses(findings) == ["fail", "fail"]
    assert ["model-00001" in findings[0].what, "model-00003" in findings[1].what] == [True, True]
    assert all("truncated at" in f.what and f.where == "n1" for f in findings)


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model-00002-of-000003.safetensors").unlink()
    findings, _ = check_files(model)
    assert statuses(findings) == ["fail"]
    assert "model-00002-of-000003.safetensors: the file is missing" in findings[0].what


def test_a_missing_index_entry_and_config_are_named(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("language_model.lm_head.weight", "language_model.other.weight"))
    assert "lm_head.weight" in check_files(model)[0][0].what
    (model / "config.json").write_text("{}")
    assert "text_config: expected an object" in check_files(model)[0][0].what


def test_an_absent_folder_is_told(tmp_path: Path) -> None:
    findings, fingerprint = check_files(tmp_path / "nowhere")
    assert (statuses(findings), fingerprint) == (["fail"], None)
    assert "nowhere" in findings[0].what


def test_fingerprints_that_differ_name_the_odd_node() -> None:
    assert statuses(judge_fingerprints([("a", "x"), ("b", "x"), ("c", None)])) == ["ok"]
    found = judge_fingerprints([("a", "x" * 64), ("b", "y" * 64), ("c", "x" * 64)])
    assert [(f.status.value, f.where) for f in found] == [("fail", "b")]
    assert judge_fingerprints([("a", None)]) == []


# -- nodes


def test_this_machine_is_looked_at(model: Path, tmp_path: Path) -> None:
    ask = NodeAsk(model_dir=str(model), spill_dir=str(tmp_path / "not" / "yet"), durable_url=f"file://{tmp_path}/store")
    facts = inspect_node("here", ask, lambda: "H200, 143771, 12, 570.1\nH200, 143771, 90000, 570.1\n")
    assert facts.fingerprint == check_files(model)[1]
    assert [(f.check, f.status.value) for f in facts.findings] == [("files", "ok"), ("durable store", "ok")]
    assert facts.accelerators.memory == (143771 * 2**20,) * 2
    assert dict(facts.software)["ray"]
    assert facts.disk_total > facts.disk_free > 0


def node(name: str = "a", **changes: object) -> NodeFacts:
    base = NodeFacts(
        name=name,
        software=(("python", "3.12.1"), ("torch", "2.13"), ("code", "c0de")),
        accelerators=Accelerators(),
        memory=64 * GIB,
        disk_free=500 * GIB,
        disk_total=1000 * GIB,
        open_files=65_536,
        fingerprint="x",
        findings=(),
        object_store=20 * GIB,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def gpus(*used: int, name: str = "H200", driver: str = "570.1") -> Accelerators:
    return Accelerators(names=(name,) * len(used), memory=(141 * GIB,) * len(used), used=used, driver=driver)


def test_other_versions_are_told_by_node() -> None:
    nodes = [node("a"), node("b"), node("c", software=(("python", "3.12.1"), ("torch", "absent"), ("code", "dead")))]
    found = judge_software(nodes)
    assert [(f.status.value, f.where, f.what.split()[0]) for f in found] == [("fail", "c", "torch"), ("fail", "c", "code")]
    assert statuses(judge_software(nodes[:2])) == ["ok"]


@pytest.mark.parametrize(
    ("accelerators", "need", "device", "expected"),
    [
        (gpus(0, 0), 2, "cuda", ["ok"]),
        (gpus(0, 0), 4, "cuda", ["fail"]),
        (gpus(0, 0), 4, "auto", ["warn"]),
        (gpus(0, 90 * GIB), 2, "auto", ["warn"]),
        (gpus(0, 90 * GIB), 2, "cpu", ["ok"]),
        (Accelerators(), 2, "auto", ["ok"]),
        (Accelerators(), 2, "cuda", ["fail"]),
        (Accelerators(problem="Driver/library version mismatch"), 2, "auto", ["fail"]),
    ],
)
def test_accelerators(accelerators: Accelerators, need: int, device: str, expected: list[str]) -> None:
    assert statuses(judge_accelerators([node(accelerators=accelerators)], need=need, device=device)) == expected


def test_unequal_drivers_and_accelerators_are_told() -> None:
    nodes = [node("a", accelerators=gpus(0)), node("b", accelerators=gpus(0)), node("c", accelerators=gpus(0, name="H100", driver="550"))]
    found = judge_accelerators(nodes, need=3, device="cuda")
    assert [(f.status.value, f.where) for f in found] == [("warn", "c"), ("warn", "")]


def test_accelerators_that_torch_or_ray_do_not_see() -> None:
    cpu_build = node(accelerators=gpus(0), software=(("torch", "2.13.0+cpu"),))
    assert "torch is built for the CPU alone" in judge_accelerators([cpu_build], need=1, device="auto")[0].what
    assert statuses(judge_accelerators([cpu_build], need=1, device="cpu")) == ["ok"]
    found = judge_accelerators([node(accelerators=gpus(0, 0), ray_gpus=1)], need=1, device="cuda")
    assert [(f.status.value, f.what) for f in found] == [("warn", "Ray counts 1 accelerators, the driver 2")]


@pytest.mark.parametrize(
    ("shard", "device", "expected"),
    [(100, "cuda", ["ok"]), (100, "cpu", ["fail"]), (10, "cpu", ["ok"]), (142, "cuda", ["fail", "fail"]), (110, "cuda", ["fail"])],
)
def test_memory_of_a_shard(shard: int, device: str, expected: list[str]) -> None:
    nodes = [node(accelerators=gpus(0, 40 * GIB if shard == 110 else 0))]
    assert statuses(judge_memory(nodes, shard_bytes=shard * GIB, shards=2, device=device)) == expected


def broken_smi() -> str:
    raise subprocess.CalledProcessError(18, ["nvidia-smi"], "Failed to initialize NVML: Driver/library version mismatch\n")


def test_a_driver_that_does_not_answer() -> None:
    assert "version mismatch" in read_accelerators(broken_smi).problem
    assert "No devices" in read_accelerators(lambda: "No devices were found\n").problem
    assert read_accelerators(lambda: None) == Accelerators()


def test_budgets_of_object_store_and_disk() -> None:
    def judged(store: int, **changes: object) -> list[Finding]:
        return judge_disks([node(**changes)], store_bytes=store, spill_dir="/tmp/ray")

    assert [(f.check, f.status.value) for f in judged(2 * GIB)] == [("disk", "ok")]
    assert [(f.check, f.status.value) for f in judged(100 * GIB)] == [("object store", "ok")]  # spilled
    assert [(f.check, f.status.value) for f in judged(600 * GIB)] == [("object store", "fail")]
    assert [(f.check, f.status.value) for f in judged(2 * GIB, disk_free=3 * GIB)] == [("disk", "fail")]
    assert [(f.check, f.status.value) for f in judged(0, open_files=1024)] == [("disk", "ok"), ("limits", "warn")]


def test_clocks_that_differ() -> None:
    assert statuses(judge_clocks([("a", 0.01), ("b", -0.7), ("c", 90.0)], "this machine")) == ["ok", "warn", "fail"]
    assert judge_clocks([("b", -0.7)], "this machine")[0].what == "0.7 s behind this machine"
