"""One plan from rank 0 to all ranks of a replica: a broadcast among the ranks, whatever their number.

The message rides the host-side (gloo) group. Small plans, the usual case in decode, travel in the header's own buffer: one
collective a step. Larger ones (a prompt of many tokens) take a second broadcast of the exact size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from model.parallel import Links

INLINE_BYTES = 32 * 1024  # 256 decoding rows; a second collective costs more than these bytes
LENGTH_BYTES = 8


class Lockstep:
    """`send` on rank 0, `receive` on every other rank, in the same order. Raises RuntimeError when a rank is gone."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._buffer = torch.zeros(LENGTH_BYTES + INLINE_BYTES, dtype=torch.uint8)

    def send(self, payload: bytes) -> None:
        group = self._links.control
        if group is None:
            return
        size = len(payload)
        self._buffer[:LENGTH_BYTES] = torch.frombuffer(bytearray(size.to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if size else None
        if body is not None and size <= INLINE_BYTES:
            self._buffer[LENGTH_BYTES : LENGTH_BYTES + size] = body
        dist.broadcast(self._buffer, src=0, group=group)
        if body is not None and size > INLINE_BYTES:
            dist.broadcast(body, src=0, group=group)

    def receive(self) -> bytes:
        group = self._links.control
        assert group is not None, "a single rank has nobody to follow, and a lost group sends nothing"
        dist.broadcast(self._buffer, src=0, group=group)
        size = int.from_bytes(self._buffer[:LENGTH_BYTES].numpy().tobytes(), "little")
        if size <= INLINE_BYTES:
            return self._buffer[LENGTH_BYTES : LENGTH_BYTES + size].numpy().tobytes()
        body = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(body, src=0, group=group)
        return body.numpy().tobytes()
