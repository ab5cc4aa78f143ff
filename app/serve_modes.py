"""Ray's own switches for Serve's fast paths: the one place that touches the environment, because Ray reads them nowhere else.

| mode | what it is | switches |
|---|---|---|
| default | Serve's HTTP proxy in front of every replica | none |
| throughput | direct ingress, one event loop a replica, gRPC between deployments | RAY_SERVE_THROUGHPUT_OPTIMIZED |
| haproxy | the same behind HAProxy instead of Serve's proxy | + RAY_SERVE_ENABLE_HA_PROXY |

They must be set on every node before Ray starts there; `k3 serve`, `make serve` and the manifests do that. What a fast mode changes
for Python clients is in the README ("How Serve is run").
"""

import os
import socket
import sys
from pathlib import Path

from engine.errors import ConfigError

THROUGHPUT = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
HA_PROXY_PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": 9101, "RAY_SERVE_HAPROXY_STATS_PORT": 8404}  # and Ray's defaults
# Ray's name for "not on a cluster": a Ray that is started so listens on the loopback interface only. Its ports run anybody's code.
NO_CLUSTER = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # written by `ray start`
MODES = {"default": {}, "throughput": {THROUGHPUT: "1"}, "haproxy": {THROUGHPUT: "1", HA_PROXY: "1"}}


def switch_on(mode: str, own_ray: bool | None = None) -> None:
    """For this process and the Ray it will start. Settings already in the environment stay as they are.

    `own_ray`: whether it starts one of its own; None: when there is no cluster to join.
    """
    for name, value in MODES[mode].items():
        os.environ.setdefault(name, value)
    if os.environ.get(HA_PROXY) == "1":
        for name, port in HA_PROXY_PORTS.items():
            if name not in os.environ and not _free(port):
                os.environ[name] = str(_free_port())  # another Serve of this machine has it, and HAProxy would not start
    if "ray" not in sys.modules and (cluster_address() is None if own_ray is None else own_ray):
        os.environ.setdefault(*NO_CLUSTER)
    # Ray writes a token file into the home directory unless told.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "5")


def check_free(host: str, port: int) -> None:
    """Raises ConfigError: Serve would log a busy port and go on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port") from None


def running_mode() -> str:
    """The mode this process runs in: what Ray read when it started."""
    if os.environ.get(HA_PROXY) == "1":
        return "haproxy"
    return "throughput" if os.environ.get(THROUGHPUT) == "1" else "default"


def cluster_address() -> str | None:
    """The Ray cluster that this machine's commands join: of RAY_ADDRESS, or started here with `ray start`; None: they start their own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local" or (not address and not CURRENT_CLUSTER.exists()):
        return None
    return address or "auto"


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
