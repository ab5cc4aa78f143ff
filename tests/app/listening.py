"""An `Edge` on a real port, for clients that cannot be given a transport: other processes, the command line, other HTTP libraries."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.app.edge import Edge


@contextmanager
def listening(edge: Edge) -> Iterator[str]:
    """Serves from a thread; yields http://127.0.0.1:PORT."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(edge.api, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started:
            assert time.monotonic() < deadline, "uvicorn did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
