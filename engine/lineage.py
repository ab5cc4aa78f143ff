"""The stable name of a token prefix: a chained hash that does not depend on the process, the replica, the batch or the sharding.

    root         = sha256(len(fingerprint) fingerprint len(tenant) tenant)          lengths are little-endian u64
    chain(0)     = root
    chain(i)     = sha256(chain(i - 1) || ids of block i)                           ids are little-endian u32
    lineage(p)   = chain(p // B)                          when p is a multiple of the block size B
                 = sha256(chain(p // B) || ids of the tail)  otherwise

The fingerprint covers everything that determines a state but the tokens (weights, architecture), the tenant keeps the prefixes of one
tenant out of reach of another. Equal lineages mean equal states, so the hash also names stored states and latents.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256

BLOCK = 64  # tokens; the same everywhere, whatever the page size: lineages of replicas, stores and clusters must agree


def root(fingerprint: str, tenant: str) -> bytes:
    """The lineage of the empty prefix: 32 bytes."""
    h = sha256()
    for part in (fingerprint.encode(), tenant.encode()):
        h.update(struct.pack("<Q", len(part)))
        h.update(part)
    return h.digest()


class Lineage:
    """The token ids of one sequence and the lineage of each of its prefixes. `ids` may grow at the end; each block is hashed once."""

    __slots__ = ("_chain", "block_size", "ids")

    def __init__(self, root: bytes, block_size: int, ids: Iterable[int]) -> None:
        """`ids` are in [0, 2**32); anything else raises OverflowError or TypeError."""
        self.block_size = block_size
        self.ids = array("I", ids)
        self._chain = [root]

    def __len__(self) -> int:
        return len(self.ids)

    def block(self, i: int) -> bytes:
        """The lineage after `i` full blocks; block(0) is the root."""
        chain = self._chain
        if i >= len(chain):
            if i * self.block_size > len(self.ids):
                raise IndexError(f"block {i} of {self.block_size} ids is not complete: {len(self.ids)} ids are known")
            raw = memoryview(self._bytes((len(chain) - 1) * self.block_size, i * self.block_size))
            width = 4 * self.block_size
            for at in range(0, len(raw), width):
                chain.append(sha256(chain[-1] + raw[at : at + width]).digest())
        return chain[i]

    def at(self, position: int) -> bytes:
        """The lineage of the first `position` tokens."""
        if position > len(self.ids):
            raise IndexError(f"position {position} is past the {len(self.ids)} known ids")
        blocks, tail = divmod(position, self.block_size)
        chain = self.block(blocks)
        return sha256(chain + self._bytes(position - tail, position)).digest() if tail else chain

    def _bytes(self, start: int, stop: int) -> bytes:
        ids = self.ids[start:stop]
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()
