"""The identity of a set of weights: the root of every lineage, equal on every node that serves the same files. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from model.config import ModelConfig
from model.safetensors_header import Stored

SAMPLE = 64 * 1024  # bytes read at either end of a file's data


def checkpoint_fingerprint(config: ModelConfig, tensors: Iterable[Stored]) -> str:
    """sha256 (hex) over the architecture, every tensor's name, dtype, shape and place, and a sample of every file's bytes.

    Reading 1.56 TB to name it would take longer than loading it: each file gives its first and last 64 KiB of data, which differ
    between any two trainings or quantisations. A flipped byte elsewhere is the business of per-tensor digests, not of identity.
    """
    digest = hashlib.sha256(config.fingerprint().encode())
    by_file: dict[Path, list[Stored]] = {}
    for stored in tensors:
        by_file.setdefault(stored.file, []).append(stored)
    for file in sorted(by_file, key=lambda path: path.name):
        placed = sorted(by_file[file], key=lambda s: s.start)
        for s in placed:
            digest.update(f"{s.name} {s.dtype} {s.shape} {s.stop - s.start}\n".encode())
        first, last = placed[0].start, placed[-1].stop
        with file.open("rb") as f:
            f.seek(first)
            digest.update(f.read(min(SAMPLE, last - first)))
            f.seek(max(first, last - SAMPLE))
            digest.update(f.read(last - max(first, last - SAMPLE)))
    return digest.hexdigest()
