"""Ray's own switches for Serve's fast paths: the one place that touches the environment, because Ray reads them nowhere else.

| mode | what it is | switches |
|---|---|---|
| default | Serve's HTTP proxy in front of every replica | none |
| throughput | direct ingress, one event loop a replica, gRPC between deployments | RAY_SERVE_THROUGHPUT_OPTIMIZED |
| haproxy | the same behind HAProxy instead of Serve's proxy | + RAY_SERVE_ENABLE_HA_PROXY |

They must be set on every node before Ray starts there; `k3 serve`, `make serve` and the manifests do that. What a fast mode changes
for Python clients is in the README ("Python clients").
"""

import os

THROUGHPUT = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
MODES = {"default": {}, "throughput": {THROUGHPUT: "1"}, "haproxy": {THROUGHPUT: "1", HA_PROXY: "1"}}


def switch_on(mode: str) -> None:
    """For this process and the Ray it will start. Settings already in the environment stay as they are."""
    for name, value in MODES[mode].items():
        os.environ.setdefault(name, value)
    # Ray writes a token file into the home directory unless told; a laptop's local cluster listens on loopback only.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "5")


def running_mode() -> str:
    """The mode this process runs in: what Ray read when it started."""
    if os.environ.get(HA_PROXY) == "1":
        return "haproxy"
    return "throughput" if os.environ.get(THROUGHPUT) == "1" else "default"
