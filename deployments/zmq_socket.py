"""A ZeroMQ socket on the running event loop: messages come to a function, sends never wait.

pyzmq's own asyncio sockets make a future a message, which was a third of what an ingress spent on a token (docs/log.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

BACKLOG = 100_000  # messages toward a peer that does not read before it counts as gone
TURN = 256  # messages read before the loop's other tasks have their turn


class Socket:
    """Create inside the running loop. `on_message` gets the frames of every message; it may send and close."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, on_message: Callable[[list[bytes]], None], backlog: int = BACKLOG
    ) -> None:
        self.raw = context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.setsockopt(zmq.SNDHWM, backlog)
        self.raw.setsockopt(zmq.RCVHWM, backlog)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.raw.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    def send(self, frames: Sequence[bytes]) -> bool:
        """False: the peer's backlog is full."""
        try:
            self.raw.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The file descriptor is edge-triggered and sending looks at the mailbox behind it: what came meanwhile would go unnoticed.
        if self._waiting():
            self._loop.call_soon(self._read)
        return True

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long the context still tries to send what is queued."""
        self._loop.remove_reader(self._fd)
        self.raw.close(linger_ms)

    def _read(self) -> None:
        for _ in range(TURN):
            if self.raw.closed or not self._waiting():
                return
            self._on_message(self.raw.recv_multipart(zmq.NOBLOCK))
        self._loop.call_soon(self._read)

    def _waiting(self) -> bool:
        return bool(int(self.raw.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
