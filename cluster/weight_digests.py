"""Optional digests of a checkpoint's tensors: a flipped bit is found before it is served.

`digests.json` beside the index: `{"algorithm": "xxh3_128" | "sha256", "tensors": {name: hex digest of the tensor's bytes in the file}}`.
A tensor is checked when all of it lies in one block; that is every routed expert and every small tensor. Of those that are cut over shards
or blocks nobody holds the whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from cluster.checkpoint import DIGESTS
from cluster.weight_source import Source
from engine.errors import CheckpointError
from model.checkpoint_check import canonical_name
from model.feed import Block
from model.weights import ELEMENT_BYTES

ALGORITHMS: Mapping[str, Callable[[memoryview], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}


class Digests:
    """Raises CheckpointError for a digests.json that is not understood."""

    def __init__(self, source: Source) -> None:
        where = source.where(DIGESTS)
        try:
            content = json.loads(source.read(DIGESTS))
            self._algorithm = ALGORITHMS[content["algorithm"]]
            self._tensors = {canonical_name(name): str(value).lower() for name, value in content["tensors"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{where}: expected algorithm ({', '.join(ALGORITHMS)}) and tensors (name → hex digest): {error}"
            ) from None

    def check(self, block: Block, data: memoryview, file: str) -> None:
        """Every whole tensor of the block that has a digest. Raises CheckpointError naming file and tensor."""
        for fill in block.fills:
            piece = fill.piece
            expected = self._tensors.get(piece.name)
            if expected is None or piece.padded or fill.first or fill.rows != piece.shape[0]:
                continue
            nbytes = ELEMENT_BYTES[piece.dtype]
            for n in piece.shape:
                nbytes *= n
            found = self._algorithm(data[fill.offset : fill.offset + nbytes]).hexdigest()
            if found != expected:
                raise CheckpointError(f"{file}: tensor {piece.name} is damaged: its digest is {found}, {DIGESTS} says {expected}")
