"""A checkpoint as it was found at start: its architecture, its identity, and where each tensor lies. Read once, passed to every shard."""

from __future__ import annotations

import hashlib
import os
import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from cluster.weight_source import FolderSource, Source, StoredFile, open_source
from engine.errors import CheckpointError, ConfigError
from model.checkpoint_check import check_checkpoint
from model.config import ModelConfig
from model.fingerprint import checkpoint_fingerprint
from model.weights import named_specs

CONFIG = "config.json"
DIGESTS = "digests.json"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`places`: by number of the tensor in `model.weights.all_specs`, the file (uint16) and the first byte there (uint64), packed:
    5 MB for the released checkpoint's 497,052 text tensors."""

    url: str
    endpoint_url: str | None
    config: ModelConfig
    fingerprint: str  # hex digest of the weights' identity
    files: tuple[StoredFile, ...]
    places: tuple[bytes, bytes] = field(repr=False)
    digests: bool  # whether digests.json is there (`cluster.weight_digests`)

    def open(self, *, patience_s: float = 60.0, connections: int = 16) -> Source:
        """The files, from any process."""
        return open_source(self.url, self.endpoint_url, patience_s=patience_s, connections=connections)

    def table(self) -> tuple[array[int], array[int]]:
        """File and first byte of every tensor, by number."""
        files, starts = array("H"), array("Q")
        files.frombytes(self.places[0])
        starts.frombytes(self.places[1])
        return files, starts


def read_config(source: Source) -> ModelConfig:
    """Raises ConfigError when config.json is absent or is not that of a K3."""
    if source.size(CONFIG) is None:
        raise ConfigError(f"{source.where(CONFIG)}: cannot be read (no such file); a checkpoint with config.json was expected")
    return ModelConfig.from_json(source.read(CONFIG), source.where(CONFIG))


def read_checkpoint(url: str, endpoint_url: str | None = None, *, patience_s: float = 60.0) -> Checkpoint:
    """Reads config.json, the index and every header, and checks them. Raises ConfigError, CheckpointError naming file and tensor."""
    source = open_source(url, endpoint_url, patience_s=patience_s)
    config = read_config(source)
    tensors = check_checkpoint(source, config)
    names = sorted({stored.file for stored in tensors.values()})
    number = {name: i for i, name in enumerate(names)}
    files, starts = array("H"), array("Q")
    for name, _ in named_specs(config):
        stored = tensors[name]
        files.append(number[stored.file])
        starts.append(stored.start)
    return Checkpoint(
        url=url,
        endpoint_url=endpoint_url,
        config=config,
        fingerprint=checkpoint_fingerprint(config, source, tensors.values()),
        files=tuple(_found(source, name) for name in names),
        places=(files.tobytes(), starts.tobytes()),
        digests=source.size(DIGESTS) is not None,
    )


def has_tokenizer(url: str, endpoint_url: str | None = None) -> bool:
    return open_source(url, endpoint_url).size(TOKENIZER_FILES[0]) is not None


def tokenizer_folder(url: str, endpoint_url: str | None = None, cache: Path | None = None) -> Path:
    """A folder on this machine with the tokenizer at `url`. Copies of an object store's are kept in `cache` (the machine's folder for
    temporary files) under their ETags. Raises ConfigError when there is no room for them."""
    source = open_source(url, endpoint_url)
    if isinstance(source, FolderSource):
        return source.root
    found = [file for name in TOKENIZER_FILES if (file := source.stat(name)) is not None]
    identity = hashlib.sha256("\n".join([url, str(endpoint_url), *(f"{f.name} {f.tag}" for f in found)]).encode()).hexdigest()[:24]
    target = (cache or Path(tempfile.gettempdir()) / f"k3-serve-{os.getuid()}") / identity
    try:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in found:
            copy = target / file.name
            if not copy.exists():
                _keep(copy, source.read(file.name))
    except OSError as error:
        raise ConfigError(
            f"{target}: no copy of {url}'s tokenizer can be kept there ({error.strerror}): make room, or name a local one with tokenizer="
        ) from error
    return target


def _keep(target: Path, data: bytes) -> None:
    """Whole or not at all, whoever else writes it."""
    descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as f:
            f.write(data)
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise


def _found(source: Source, name: str) -> StoredFile:
    found = source.stat(name)
    if found is None:
        raise CheckpointError(f"{source.where(name)}: the file is missing")
    return found
