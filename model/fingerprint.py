"""The identity of a set of weights: the root of every lineage, equal on every node that serves the same files. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from model.config import ModelConfig
from model.safetensors_header import THREADS, Folder, Stored

SAMPLE = 64 * 1024  # bytes read at either end of a file's data


def checkpoint_fingerprint(config: ModelConfig, folder: Folder, tensors: Iterable[Stored]) -> str:
    """sha256 (hex) over the architecture, every tensor's name, dtype, shape and place, and a sample of every file's bytes.

    Reading 1.56 TB to name it would take longer than loading it: each file gives its first and last 64 KiB of data, which differ
    between any two trainings or quantisations. A flipped byte elsewhere is the business of per-tensor digests, not of identity.
    """
    digest = hashlib.sha256(config.fingerprint().encode())
    by_file: dict[str, list[Stored]] = {}
    for stored in tensors:
        by_file.setdefault(stored.file, []).append(stored)
    files = sorted(by_file)
    for placed in by_file.values():
        placed.sort(key=lambda s: s.start)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="fingerprint") as pool:
        samples = pool.map(lambda file: _ends(folder, file, by_file[file][0].start, by_file[file][-1].stop), files)
        for file, ends in zip(files, samples, strict=True):
            for s in by_file[file]:
                digest.update(f"{s.name} {s.dtype} {s.shape} {s.stop - s.start}\n".encode())
            digest.update(ends)
    return digest.hexdigest()


def _ends(folder: Folder, file: str, first: int, last: int) -> bytes:
    """The first and the last SAMPLE bytes of [first, last); all of it once when they meet."""
    head = min(first + SAMPLE, last)
    return folder.read(file, first, head) + folder.read(file, max(first, last - SAMPLE), last)
