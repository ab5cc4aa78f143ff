"""`k3 serve` as a newcomer starts it: its own Ray, the fast mode, the embedded model; and what is left when it stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent
READY = re.compile(r"ready in \d+ s: (?P<url>http://[\d.:]+)/v1 serves kimi-k3 .*haproxy mode.*Ray is at (?P<ray>[\d.:]+),")
GIB = 2**30
LISTENING = "0A"  # in /proc/net/tcp
RAY_CORE = {"gcs_server", "raylet"}


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[str]
    url: str
    ray: str


@contextmanager
def k3_serve(*words: str) -> Iterator[Started]:
    """Yields once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "serve", "--port", str(free_port()), *words],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": "local"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    impatience = threading.Timer(240, process.kill)
    impatience.start()
    said = ""
    try:
        for line in process.stderr:
            said += line
            if ready := READY.search(line):
                yield Started(process, ready["url"], ready["ray"])
                return
        raise AssertionError(f"k3 serve ended with {process.wait()}: {said}")
    finally:
        impatience.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=90)


def family(pid: int) -> set[int]:
    """A process and everything below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it just ended
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def open_ports(pids: set[int]) -> set[int]:
    """TCP ports that these processes listen on and that other machines can reach."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(descriptor))
            except OSError:
                continue
    ports = set()
    for line in [*Path("/proc/net/tcp").read_text().splitlines()[1:], *Path("/proc/net/tcp6").read_text().splitlines()[1:]]:
        local, state, inode = (line.split()[place] for place in (1, 3, 9))
        address, port = local.split(":")
        if state == LISTENING and f"socket:[{inode}]" in sockets and not address.endswith("0100007F"):
            ports.add(int(port, 16))
    return ports


def resident_bytes(pids: set[int]) -> int:
    pages = [int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) for pid in pids if (Path("/proc") / str(pid)).exists()]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def test_from_start_to_stop() -> None:
    with k3_serve("max_running=8") as started:
        assert httpx.get(f"{started.url}/health", timeout=10).json()["serve_mode"] == "haproxy"
        command = [sys.executable, "-m", "app", "chat", "--url", f"{started.url}/v1", "--max-tokens", "8", "Hello"]
        chat = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        assert "8 completion tokens" in chat.stderr
        # a Python program, in the fast mode and without any switch of its own
        example = [sys.executable, ROOT / "examples" / "handle.py", "--address", started.ray]
        said = subprocess.run(example, capture_output=True, text=True, timeout=120, check=True).stdout
        assert "completion_tokens=8" in said
        members = family(started.process.pid)
        core = {pid for pid in members if (Path("/proc") / str(pid) / "comm").read_text().strip() in RAY_CORE}
        assert len(core) == len(RAY_CORE)
        assert not open_ports(core), "whoever reaches these may run code"
        assert len(members) > 5, "Ray, Serve, two shards"
        assert resident_bytes(members) < 6 * GIB
    assert started.process.returncode == 0
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "app", "serve", "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
