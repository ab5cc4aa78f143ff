"""A checkpoint's files as one node sees them: every size against its header, the index, the architecture, the fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.checkpoint import read_config
from cluster.doctor import Finding, fail, ok, size
from cluster.weight_source import FolderSource, open_source
from engine.errors import CheckpointError, ConfigError
from model.checkpoint_check import check_checkpoint
from model.fingerprint import checkpoint_fingerprint
from model.safetensors_header import read_header

COPY_AGAIN = "copy the file again from where it came from, and compare its size with the origin's"
PATIENCE_S = 10.0  # of an object store that does not answer
SHOWN = 20  # faulty files told one by one


def check_files(model: str | Path, where: str = "", endpoint_url: str | None = None) -> tuple[list[Finding], str | None]:
    """Findings, and the fingerprint when the files can be served. Only headers and 128 KiB of each file are read."""
    folder = str(model)
    try:
        source = open_source(folder, endpoint_url, patience_s=PATIENCE_S)
        config = read_config(source)
    except ConfigError as error:
        return [fail("files", str(error), "name a folder or s3:// prefix with K3's config.json, readable on every node", where)], None
    except OSError as error:
        return [fail("files", f"{error.filename or folder}: {error.strerror}", "make it readable for the user who serves", where)], None
    try:
        tensors = check_checkpoint(source, config)
        fingerprint = checkpoint_fingerprint(config, source, tensors.values())
    except ConfigError as error:
        faults = _faulty_headers(source, where) if isinstance(source, FolderSource) else []
        told = any(str(error) == f.what for f in faults)
        return [*([] if told else [fail("files", str(error), COPY_AGAIN, where)]), *faults], None
    except OSError as error:
        return [fail("files", f"{error.filename or folder}: {error.strerror}", "make it readable for the user who serves", where)], None
    sizes = {stored.file: 0 for stored in tensors.values()}
    for stored in tensors.values():
        sizes[stored.file] += stored.stop - stored.start
    total = sum(sizes.values())
    what = f"{folder}: {len(sizes)} files, {len(tensors):,} tensors, {size(total)}; every size fits its header"
    return [ok("files", what, where, files=len(sizes), tensors=len(tensors), bytes=total)], fingerprint


def judge_fingerprints(seen: Sequence[tuple[str, str | None]]) -> list[Finding]:
    """(node, fingerprint) of all nodes: equal everywhere, and the odd ones named. Nodes without one have their finding already."""
    by_print: dict[str, list[str]] = {}
    for node, fingerprint in seen:
        if fingerprint is not None:
            by_print.setdefault(fingerprint, []).append(node)
    if not by_print:
        return []
    ranked = sorted(by_print.items(), key=lambda item: -len(item[1]))
    usual, nodes = ranked[0]
    if len(ranked) == 1:
        return [ok("fingerprint", f"{usual[:16]} on {_count(len(nodes))}", fingerprint=usual)]
    return [
        fail(
            "fingerprint",
            f"{other[:16]} on {', '.join(odd)}, but {usual[:16]} on {', '.join(nodes)}",
            "give every node the same files: compare config.json, the index and the sizes, then copy what differs",
            ", ".join(odd),
        )
        for other, odd in ranked[1:]
    ]


def _count(nodes: int) -> str:
    return "one node" if nodes == 1 else f"all of {nodes} nodes"


def _faulty_headers(source: FolderSource, where: str) -> list[Finding]:
    """Every file that is not whole, not only the first."""
    faults = []
    for file in sorted(source.root.glob("*.safetensors")):
        try:
            for _ in read_header(source, file.name):
                pass
        except CheckpointError as error:
            faults.append(fail("files", str(error), COPY_AGAIN, where))
        except OSError as error:
            faults.append(fail("files", f"{file}: {error.strerror}", "make it readable for the user who serves", where))
    if len(faults) > SHOWN:
        faults[SHOWN:] = [fail("files", f"{len(faults) - SHOWN} more files are faulty", COPY_AGAIN, where)]
    return faults
