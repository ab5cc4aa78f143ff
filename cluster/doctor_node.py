"""What a node is, as plain values measured there, and what is wrong with a set of nodes: `inspect_node` looks, `judge_…` decide."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

from cluster.doctor import Finding, fail, ok, size, together, warn
from cluster.doctor_files import check_files
from cluster.doctor_store import check_store, judge_skew

PACKAGES = ("torch", "ray", "numpy", "safetensors", "msgspec", "pyzmq")
OURS = ("app", "chat", "engine", "model", "kernels", "cluster", "deployments", "autoscaling")
SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits")
MIB = 2**20
USED_SHARE = 0.05  # of an accelerator's memory: more is somebody else's work
OPEN_FILES = 16_384
LOW_DISK_SHARE, LOW_DISK_BYTES = 0.05, 5 * 2**30  # Ray itself refuses work on a node whose disk is 95 % full
SKEW_WARN_S, SKEW_FAIL_S = 0.5, 5.0  # a session's lease lasts 15 s


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAsk:
    """What every node is asked. Plain values: they travel to it."""

    model_dir: str  # a folder, file:///path or s3://bucket/prefix
    model_endpoint_url: str | None = None
    spill_dir: str  # where Ray logs and spills
    durable_url: str | None = None
    durable_endpoint_url: str | None = None
    limit_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """Of one node. Sizes in bytes."""

    names: tuple[str, ...] = ()
    memory: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    driver: str = ""
    problem: str = ""  # why the driver's tool did not answer; empty: it did, or there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    name: str
    software: tuple[tuple[str, str], ...]  # (package, version), the interpreter and our own code among them
    accelerators: Accelerators
    memory: int
    disk_free: int  # of the spill folder
    disk_total: int
    open_files: int
    fingerprint: str | None
    findings: tuple[Finding, ...]  # of the checks that ran on the node
    object_store: int | None = None  # bytes; None: no Ray runs here yet
    ray_gpus: int | None = None  # accelerators that Ray would give to actors here


def inspect_node(name: str, ask: NodeAsk, run_smi: Callable[[], str | None] | None = None) -> NodeFacts:
    """Looks at this machine. `run_smi`: see `nvidia_smi`."""
    fingerprint: list[str | None] = [None]

    def files() -> list[Finding]:
        findings, fingerprint[0] = check_files(ask.model_dir, name, ask.model_endpoint_url)
        return findings

    def store() -> list[Finding]:
        return check_store(ask.durable_url, ask.durable_endpoint_url, name) if ask.durable_url is not None else []

    findings = together({"files": files, "durable store": store}, ask.limit_s, name)
    disk = shutil.disk_usage(_existing(Path(ask.spill_dir)))
    return NodeFacts(
        name=name,
        software=software(),
        accelerators=read_accelerators(run_smi or nvidia_smi),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        disk_free=disk.free,
        disk_total=disk.total,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        fingerprint=fingerprint[0],
        findings=tuple(findings),
    )


def nvidia_smi() -> str | None:
    """The accelerators' listing; None when the tool is not installed. Raises CalledProcessError, TimeoutExpired."""
    if shutil.which(SMI[0]) is None:
        return None
    return subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=True).stdout


def read_accelerators(run_smi: Callable[[], str | None]) -> Accelerators:
    """`name, MiB, MiB in use, driver` a line."""
    try:
        listing = run_smi()
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().splitlines()
        return Accelerators(problem=said[0] if said else f"{SMI[0]} ended with {error.returncode}")
    except subprocess.TimeoutExpired:
        return Accelerators(problem=f"{SMI[0]} did not answer")
    if listing is None:
        return Accelerators()
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines() if line.strip()]
    try:
        return Accelerators(
            names=tuple(row[0] for row in rows),
            memory=tuple(int(row[1]) * MIB for row in rows),
            used=tuple(int(row[2]) * MIB for row in rows),
            driver=rows[0][3] if rows else "",
        )
    except (ValueError, IndexError):
        return Accelerators(problem=f"{SMI[0]} said: {listing.strip().splitlines()[0]}")


def software() -> tuple[tuple[str, str], ...]:
    """Versions of what nodes must share. `code` is a digest of this project's own source."""
    versions = [("python", platform.python_version())]
    for package in PACKAGES:
        try:
            versions.append((package, version(package)))
        except PackageNotFoundError:
            versions.append((package, "absent"))
    return (*versions, ("code", code_digest()))


def code_digest() -> str:
    digest = xxhash.xxh3_64()
    for package in OURS:
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# -- what is wrong with a set of nodes


def judge_software(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Equal versions everywhere; those of the majority are taken as meant."""
    findings = []
    usual: dict[str, str] = {}
    for package, _ in nodes[0].software:
        seen = Counter(dict(n.software).get(package, "absent") for n in nodes)
        usual[package] = seen.most_common(1)[0][0]
        for n in nodes:
            found = dict(n.software).get(package, "absent")
            if found == "absent":
                findings.append(fail("software", f"{package} is not installed", "install the project here, from its lock file", n.name))
            elif found != usual[package]:
                what = f"{package} {found} here, {usual[package]} on most nodes"
                findings.append(fail("software", what, "give all nodes the same image or lock file, and restart Ray there", n.name))
    return findings or [ok("software", ", ".join(f"{p} {v}" for p, v in usual.items() if p in ("python", "torch", "ray", "code")))]


def judge_accelerators(nodes: Sequence[NodeFacts], *, need: int, device: str) -> list[Finding]:
    """`need`: shards of all replicas, each with an accelerator of its own; `device`: auto | cpu | cuda, as configured."""
    findings: list[Finding] = []
    for n in nodes:
        a = n.accelerators
        if a.problem:
            findings.append(
                fail("accelerators", a.problem, "reinstall the driver or restart the node; `nvidia-smi` must list them", n.name)
            )
        if a.names and device != "cpu" and dict(n.software).get("torch", "").endswith("+cpu"):
            fix = "install torch from the index for this driver's CUDA or ROCm"
            findings.append(fail("accelerators", f"{len(a.names)} are there, but torch is built for the CPU alone", fix, n.name))
        if n.ray_gpus is not None and n.ray_gpus != len(a.names):
            what = f"Ray counts {n.ray_gpus} accelerators, the driver {len(a.names)}"
            findings.append(warn("accelerators", what, "restart Ray there, with --num-gpus or without CUDA_VISIBLE_DEVICES", n.name))
        for place, (memory, used) in enumerate(zip(a.memory, a.used, strict=True)):
            if used > USED_SHARE * memory and device != "cpu":
                what = f"accelerator {place} ({a.names[place]}): {size(used)} of {size(memory)} are in use"
                findings.append(warn("accelerators", what, "end what runs there: `nvidia-smi` lists the processes", n.name))
    drivers = Counter(n.accelerators.driver for n in nodes if n.accelerators.driver)
    if len(drivers) > 1:
        usual = drivers.most_common(1)[0][0]
        for n in nodes:
            if n.accelerators.driver not in ("", usual):
                what = f"driver {n.accelerators.driver} here, {usual} on most nodes"
                findings.append(warn("accelerators", what, "install one driver version everywhere: NCCL is tested with equal ones", n.name))
    kinds = Counter(name for n in nodes for name in n.accelerators.names)
    count = sum(kinds.values())
    listed = ", ".join(f"{c} x {name}" for name, c in kinds.most_common()) or "none"
    if device == "cuda" and count < need:
        fix = "add nodes, or lower ep, tp or replicas" if count else "serve with device=cpu, or install the driver"
        findings.append(fail("accelerators", f"{listed}: {need} are needed, one for each shard", fix, accelerators=count))
    elif device == "auto" and 0 < count < need:
        fix = "add nodes, lower ep, tp or replicas, or say device=cpu"
        findings.append(warn("accelerators", f"{listed}: {need} shards are more, so device=auto takes the CPU", fix, accelerators=count))
    if len(kinds) > 1 and device != "cpu":
        findings.append(warn("accelerators", f"{listed}: unequal ones wait for the slowest", "use equal ones in one replica"))
    if findings:
        return findings
    uses = "CPU" if device == "cpu" or not count else f"driver {', '.join(drivers)}"
    return [
        ok(
            "accelerators",
            f"{listed}; {need} shards on the {uses}" if uses == "CPU" else f"{listed}, {uses}; {need} shards",
            accelerators=count,
        )
    ]


def judge_memory(nodes: Sequence[NodeFacts], *, shard_bytes: int, shards: int, device: str) -> list[Finding]:
    """What the fullest shard allocates, against every accelerator (`device` cuda) or all shards against the nodes' memory (cpu)."""
    if device == "cpu":
        need, there = shard_bytes * shards, sum(n.memory for n in nodes)
        what = f"{shards} shards of up to {size(shard_bytes)}, {size(there)} of memory"
        if need > there:
            return [fail("memory", what, "lower cache_bytes or max_batched_tokens, or spread the shards over more nodes")]
        return [ok("memory", what, shard_bytes=shard_bytes)]
    findings = []
    smallest = min(memory for n in nodes for memory in n.accelerators.memory)
    for n in nodes:
        for place, (memory, used) in enumerate(zip(n.accelerators.memory, n.accelerators.used, strict=True)):
            what = f"a shard needs {size(shard_bytes)}; accelerator {place} has {size(memory)}, {size(used)} of it in use"
            if shard_bytes > memory:
                findings.append(fail("memory", what, "raise ep or tp, or lower cache_bytes: `k3 plan` finds what fits", n.name))
            elif shard_bytes > memory - used:
                findings.append(fail("memory", what, "end what runs there: `nvidia-smi` lists the processes", n.name))
    return findings or [
        ok("memory", f"a shard needs {size(shard_bytes)}, the smallest accelerator has {size(smallest)}", shard_bytes=shard_bytes)
    ]


def judge_disks(nodes: Sequence[NodeFacts], *, store_bytes: int, spill_dir: str) -> list[Finding]:
    """The states' budget against the object store, and what exceeds that against the disk that Ray spills to."""
    findings: list[Finding] = []
    for n in nodes:
        free, beside = n.disk_free, max(0, store_bytes - (n.object_store or 0))
        if free < max(LOW_DISK_BYTES, LOW_DISK_SHARE * n.disk_total):
            what = f"{spill_dir}: {size(free)} of {size(n.disk_total)} are free"
            findings.append(fail("disk", what, "make room, or start Ray with another --temp-dir", n.name, free_bytes=free))
        elif beside > free - LOW_DISK_BYTES:
            store = "no object store yet" if n.object_store is None else f"an object store of {size(n.object_store)}"
            what = f"store_bytes is {size(store_bytes)}; {store}, and {size(free)} of disk to spill to"
            fix = "lower store_bytes, make room, or start Ray with a larger --object-store-memory"
            findings.append(fail("object store", what, fix, n.name, store_bytes=store_bytes, free_bytes=free))
        elif beside and n.object_store is not None:
            what = f"store_bytes {size(store_bytes)}, object store {size(n.object_store)}: the rest is spilled to disk"
            findings.append(ok("object store", what, n.name, store_bytes=store_bytes, object_store_bytes=n.object_store))
        else:
            what = f"{spill_dir}: {size(free)} free; store_bytes {size(store_bytes)}"
            findings.append(ok("disk", what, n.name, free_bytes=free))
        if n.open_files < OPEN_FILES:
            what = f"{n.open_files:,} open files are allowed"
            findings.append(warn("limits", what, f"raise it to at least {OPEN_FILES:,} (ulimit -n) before Ray starts", n.name))
    return findings


def judge_clocks(offsets: Sequence[tuple[str, float]], against: str) -> list[Finding]:
    """(node, its clock minus the one of `against`, seconds)."""
    return [judge_skew(offset, against, name, SKEW_WARN_S, SKEW_FAIL_S) for name, offset in offsets]


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not path.exists():
        path = path.parent
    return path
