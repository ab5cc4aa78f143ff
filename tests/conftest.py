"""What holds for every test. Ray's own switches (no token file in the home directory, quick drains) are set before anybody imports Ray."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")

# Tests interrupt servers as Ctrl-C does; the children of a suite that runs in the background would inherit that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, so that a change is what makes a run fail; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("suite", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("suite")
