"""Where the tensors of a safetensors checkpoint lie, from its index and headers alone. Torch-free.

Format: 8 bytes little-endian header length, that many bytes of JSON (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # the format's own limit, in bytes
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16}
BITS |= {"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64}
THREADS = 16  # headers read at a time: on an object store each is two round trips


class Folder(Protocol):
    """Where the files of a checkpoint lie, by their names there. Safe to use from several threads."""

    def where(self, file: str) -> str:
        """The full name, for messages."""
        ...

    def size(self, file: str) -> int | None:
        """Bytes; None when there is no such file."""
        ...

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of [start, stop), which must be there."""
        ...


@dataclass(slots=True)
class Stored:
    """A tensor in a file: its name there, and its bytes at [start, stop) of the file."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_directory(folder: Folder) -> Iterator[Stored]:
    """Every tensor of a checkpoint, file by file. Raises `CheckpointError` when index and files disagree."""
    if folder.size(INDEX) is None:
        if folder.size(SINGLE) is None:
            raise CheckpointError(f"{folder.where('')}: neither {INDEX} nor {SINGLE} is there; a safetensors checkpoint was expected")
        yield from read_header(folder, SINGLE)
        return
    weight_map = _weight_map(folder)
    files, unread = sorted(set(weight_map.values())), dict(weight_map)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="headers") as pool:
        sizes = dict(zip(files, pool.map(folder.size, files), strict=True))
        absent = {file for file, size in sizes.items() if size is None}
        if absent:
            name, file = next((n, f) for n, f in weight_map.items() if f in absent)
            raise CheckpointError(f"{folder.where(file)}: the file is missing; {INDEX} places tensor {name} there")
        for file, header in zip(files, pool.map(lambda f: list(read_header(folder, f)), files), strict=True):
            for stored in header:
                place = weight_map.get(stored.name)
                if place != file:
                    where = "does not name it" if place is None else f"places it in {place}"
                    raise CheckpointError(f"{folder.where(file)}: holds tensor {stored.name}, but {INDEX} {where}")
                unread.pop(stored.name, None)
            yield from header
    if unread:
        name, file = next(iter(unread.items()))
        raise CheckpointError(f"{folder.where(file)}: tensor {name} is absent, but {INDEX} places it there ({len(unread)} such tensors)")


def read_header(folder: Folder, name: str) -> Iterator[Stored]:
    """The tensors of one file, its size checked against its header."""
    file, size = folder.where(name), folder.size(name) or 0
    length = int.from_bytes(folder.read(name, 0, 8), "little") if size >= 8 else 0
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise CheckpointError(f"{file}: truncated or not safetensors: {size} bytes, its header alone should take {length}")
    raw = folder.read(name, 8, 8 + length)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {tensor: msgspec.json.decode(value, type=_Entry) for tensor, value in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{file}: its header is not that of a safetensors file ({e})") from e
    data = 8 + length
    end = 0
    for tensor, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        bits = BITS.get(entry.dtype)
        if bits is None:
            raise CheckpointError(f"{file}: tensor {tensor} has the unknown dtype {entry.dtype}")
        if start != end or (stop - start) * 8 != math.prod(entry.shape) * bits:
            raise CheckpointError(f"{file}: tensor {tensor} {entry.dtype} {list(entry.shape)} does not fit its bytes [{start}, {stop})")
        end = stop
        if data + stop > size:
            raise CheckpointError(f"{file}: truncated at {size} bytes; tensor {tensor} ends at {data + stop}")
        yield Stored(name, tensor, entry.dtype, entry.shape, data + start, data + stop)
    if data + end != size:
        raise CheckpointError(f"{file}: {size - data - end} bytes after the last tensor; the file is damaged")


def _weight_map(folder: Folder) -> dict[str, str]:
    index = folder.where(INDEX)
    try:
        weight_map: Any = json.loads(folder.read(INDEX), object_pairs_hook=_unique).get("weight_map")
    except ValueError as e:
        raise CheckpointError(f"{index}: {e}") from e
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) and "/" not in f for f in weight_map.values()):
        raise CheckpointError(f"{index}: expected an object weight_map from tensor name to file name")
    return weight_map


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Plain JSON parsing keeps the last of two equal keys; here that would hide a fault."""
    result = dict(pairs)
    if len(result) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{name} appears twice")
    return result
