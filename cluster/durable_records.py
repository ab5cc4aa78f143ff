"""Session records in the durable tier, written behind: the newest version of each, one after the other, so that none overtakes another."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec

from cluster.durable import Blobs
from engine.errors import DurableError
from engine.session import SessionRecord

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SessionRecord).decode


class DurableRecords:
    """Use inside one event loop. Failures to write are counted, not raised: the next version of the record is another attempt."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._dirty: dict[tuple[str, str], SessionRecord | None] = {}  # None = to be deleted
        self._writer: asyncio.Task[None] | None = None
        self.failures = 0

    async def read(self, tenant: str, session: str) -> SessionRecord | None:
        """Raises DurableError. None also for one that is about to be written: memory knows better."""
        key = (tenant, session)
        if key in self._dirty:
            return None
        raw = await asyncio.to_thread(self._blobs.get, record_key(tenant, session))
        return None if raw is None or key in self._dirty else _decode(raw)

    def write(self, tenant: str, session: str, record: SessionRecord | None) -> None:
        """Later. None deletes."""
        self._dirty[tenant, session] = record
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def flush(self) -> None:
        """Waits until everything is written, or failed to be."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait([self._writer])

    async def _write(self) -> None:
        while self._dirty:
            key, record = next(iter(self._dirty.items()))
            try:
                if record is None:
                    await asyncio.to_thread(self._blobs.delete, record_key(*key))
                else:
                    await asyncio.to_thread(self._blobs.put, record_key(*key), _encode(record))
            except DurableError:
                self.failures += 1
            if self._dirty.get(key) is record:
                del self._dirty[key]


def record_key(tenant: str, session: str) -> str:
    """Names come from clients: hashed, so that no name can be a path."""
    return f"sessions/{hashlib.sha256(tenant.encode()).hexdigest()[:32]}/{hashlib.sha256(session.encode()).hexdigest()}.json"
