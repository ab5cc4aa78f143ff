"""What `k3 doctor` says, and how its checks are kept from hanging: a finding is what, why it matters and the fix; a check has a time limit.

Checks that only read run in threads (`together`), those that use torch, NCCL or Ray in processes of their own (`in_child`), which are
killed when their time is over. Whoever runs checks one after the other adds up their limits; nothing else can make it longer.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.errors import EngineFailure

WHY: Mapping[str, str] = {
    "configuration": "what cannot run is better refused here than after the weights are loaded",
    "files": "a shard that is cut short or absent stops the load after minutes, or worse, is read as garbage",
    "fingerprint": "nodes with other weights give other tokens, and states of one are useless to the other",
    "software": "actors of one cluster pickle to each other: other versions fail in the middle of a start, or compute otherwise",
    "accelerators": "every shard needs an accelerator of its own that the driver and torch both see",
    "memory": "weights, pages and slots are allocated at start; what does not fit ends the start",
    "object store": "states that leave the shards live there; what exceeds it is spilled to disk",
    "disk": "Ray spills and logs there; a full disk stops whole nodes",
    "limits": "every connection and every mapped file takes a descriptor",
    "clock": "leases of sessions, expiry and S3 signatures compare times of different machines",
    "ports": "Serve logs a busy port and goes on, so the service would be up and unreachable",
    "ray": "shards, replicas and states are Ray actors; nothing is placed on a node that does not answer",
    "links": "every layer sums over the shards: an unreachable or slow pair of processes stops or slows all of them",
    "durable store": "sessions that must outlive the cluster are written there behind the turns",
    "golden": "equal tokens are the only proof that files, kernels and sharding together compute this model",
    "server": "a server that does not answer gets no traffic",
}


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`check` is a key of WHY; `where` a node, a folder or an address; `figures` numbers for programs, units in their names."""

    check: str
    status: Status
    what: str
    where: str = ""
    fix: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.check not in WHY:
            raise ValueError(f"no reason is known for the check {self.check!r}")
        if bool(self.fix) != (self.status is not Status.OK):
            raise ValueError(f"{self.check}: a fix is given exactly when something is wrong")

    @property
    def why(self) -> str:
        return WHY[self.check]


def ok(check: str, what: str, where: str = "", **figures: float | str) -> Finding:
    return Finding(check=check, status=Status.OK, what=what, where=where, figures=figures)


def warn(check: str, what: str, fix: str, where: str = "", **figures: float | str) -> Finding:
    return Finding(check=check, status=Status.WARN, what=what, where=where, fix=fix, figures=figures)


def fail(check: str, what: str, fix: str, where: str = "", **figures: float | str) -> Finding:
    return Finding(check=check, status=Status.FAIL, what=what, where=where, fix=fix, figures=figures)


class CheckHung(EngineFailure):
    """A check did not end within its time."""


class CheckFailed(EngineFailure):
    """A process that ran a check raised, or died."""


def together(checks: Mapping[str, Callable[[], Sequence[Finding]]], limit_s: float, where: str = "") -> list[Finding]:
    """Runs all checks (keys of WHY) side by side and returns their findings in the order given, within `limit_s`."""
    done: dict[str, queue.SimpleQueue[list[Finding]]] = {}
    for name, check in checks.items():
        done[name] = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(name, check, where, done[name]), daemon=True, name=f"doctor {name}").start()
    deadline = time.monotonic() + limit_s
    findings: list[Finding] = []
    for name, answer in done.items():
        try:
            findings += answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            findings.append(_hung(name, limit_s, where))
    return findings


def in_child(function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """`function(*args)` in a new process, killed after `limit_s`. Raises CheckHung, CheckFailed with what the process raised, in words."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise CheckHung(f"no answer within {limit_s:.0f} s")
        fine, value = ours.recv()
    except EOFError:
        process.join(5)
        raise CheckFailed(f"the process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join(5)
    if not fine:
        raise CheckFailed(value)
    return value


def size(nbytes: float) -> str:
    """`1.56 TB`, decimal."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _answer(name: str, check: Callable[[], Sequence[Finding]], where: str, answer: queue.SimpleQueue[list[Finding]]) -> None:
    try:
        answer.put(list(check()))
    except Exception as error:  # a check that breaks is a finding, never the end of the others
        answer.put([fail(name, f"the check broke off: {_words(error)}", "mend what it names, then run it again", where)])


def _hung(name: str, limit_s: float, where: str) -> Finding:
    return fail(name, f"no answer within {limit_s:.0f} s", "see what hangs (a dead mount, a dead peer), or give it more --timeout", where)


def _child(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = (True, function(*args))
    except Exception as error:
        answer = (False, _words(error))
    pipe.send(answer)


def _words(error: Exception) -> str:
    """One line, without a stack trace."""
    text = " ".join(str(error).strip().splitlines()[-1:])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
