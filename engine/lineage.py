"""The stable name of a token prefix: a chained hash that does not depend on the process, the replica, the batch or the sharding.

    root         = sha256(len(fingerprint) fingerprint len(tenant) tenant)          lengths are little-endian u64
    chain(0)     = root
    chain(i)     = sha256(chain(i - 1) || ids of block i)                           ids are little-endian u32
    lineage(p)   = chain(p // B)                          when p is a multiple of the block size B
                 = sha256(chain(p // B) || ids of the tail)  otherwise

The fingerprint covers everything that determines a state but the tokens (weights, architecture), the tenant keeps the prefixes of one
tenant out of reach of another. Equal lineages mean equal states, so the hash also names stored states and latents.

A prefix that the operator marked as shared has one name for all tenants, block by block; what comes behind its last full block S has not:

    chain(0)     = sha256(len(fingerprint) fingerprint)
    chain(S + 1) = sha256(chain(S) || root || ids of block S + 1)                    likewise the tail behind S
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

BLOCK = 64  # tokens; the same everywhere, whatever the page size: lineages of replicas, stores and clusters must agree


def root(fingerprint: str, tenant: str) -> bytes:
    """The lineage of the empty prefix: 32 bytes."""
    return _parts(fingerprint, tenant)


def public_root(fingerprint: str) -> bytes:
    """What the names of shared prefixes begin with."""
    return _parts(fingerprint)


def _parts(*parts: str) -> bytes:
    h = sha256()
    for part in map(str.encode, parts):
        h.update(struct.pack("<Q", len(part)))
        h.update(part)
    return h.digest()


class Lineage:
    """The token ids of one sequence and the lineage of each of its prefixes. `ids` may grow at the end; each block is hashed once."""

    __slots__ = ("_chain", "_root", "block_size", "ids", "shared")

    def __init__(self, root: bytes, block_size: int, ids: Iterable[int], *, public: bytes = b"", prefixes: Sequence[bytes] = ()) -> None:
        """`ids` are in [0, 2**32); anything else raises OverflowError or TypeError.

        `prefixes`: those that all tenants share, as little-endian u32; `public` is their root.
        """
        self.block_size = block_size
        self.ids = array("I", ids)
        self.shared = max((self._begins_with(prefix) for prefix in prefixes), default=0)  # tokens that all tenants share: full blocks
        self._root = root
        self._chain = [public if self.shared else root]

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
                chain.append(sha256(self._link(len(chain) - 1) + raw[at : at + width]).digest())
        return chain[i]

    def at(self, position: int) -> bytes:
        """The lineage of the first `position` tokens."""
        if position > len(self.ids):
            raise IndexError(f"position {position} is past the {len(self.ids)} known ids")
        blocks, tail = divmod(position, self.block_size)
        chain = self.block(blocks)
        return sha256(self._link(blocks) + self._bytes(position - tail, position)).digest() if tail else chain

    def _link(self, i: int) -> bytes:
        """What the hash behind block `i` begins with."""
        return self._chain[i] + self._root if self.shared and i * self.block_size == self.shared else self._chain[i]

    def _begins_with(self, prefix: bytes) -> int:
        count = len(prefix) // 4 // self.block_size * self.block_size
        return count if self._bytes(0, count) == prefix[: 4 * count] else 0

    def _bytes(self, start: int, stop: int) -> bytes:
        ids = self.ids[start:stop]
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()


def lineage_of(fingerprint: str, tenant: str, ids: Iterable[int], *, block_size: int = BLOCK, prefixes: Sequence[bytes] = ()) -> Lineage:
    """As everybody who serves that model names it. `prefixes`: see `Lineage`."""
    return Lineage(root(fingerprint, tenant), block_size, ids, public=public_root(fingerprint), prefixes=prefixes)
