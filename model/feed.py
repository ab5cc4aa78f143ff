"""What the loader is fed: pieces of a checkpoint in host memory, and the rows of tensors that lie in them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.weights import TensorSlice


@dataclass(slots=True)
class Fill:
    """Rows of one tensor inside a block. A row is a tensor's entry along dim 0; of a padded tensor one value."""

    piece: TensorSlice
    first: int  # the tensor's row that comes first
    rows: int
    offset: int  # bytes from the start of the block


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive bytes of a file that are read at once, and what one process takes from them."""

    number: int
    file: int
    start: int
    stop: int
    fills: Sequence[Fill]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Arrived:
    """A block that lies in host memory from `data[0]` on, until `release` is called: then the memory is used again."""

    block: Block
    data: memoryview
    release: Callable[[], None]


class Feed(Protocol):
    """All the blocks that one process needs, in the order in which they arrive. Raises `CheckpointError` for what cannot be read."""

    def arrivals(self) -> Iterator[Arrived | None]:
        """None: nothing is there at the moment, and what arrived and is not released may be what is missing. Ends when all are released."""
        ...

    def memory(self) -> memoryview:
        """All the host memory in which blocks arrive: to be pinned."""
        ...
