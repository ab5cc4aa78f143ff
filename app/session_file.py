"""A session as one safetensors file: its record and, where there is one, its state, signed. Pure.

The file's metadata hold `manifest` (canonical JSON) and `signature` (HMAC-SHA256 of it). The manifest names the sha256 of every tensor, so
the signature covers the whole file. Tensors are called `OBJECT/ARRAY`, as the bundle names them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from safetensors.numpy import load, save

from app.past import unpack_tokens
from engine.bundle import StateBundle, digest
from engine.errors import ConfigError, InvalidRequest
from engine.lineage import BLOCK, lineage_of
from engine.session import BundleAt, SessionRecord

FORMAT = "k3-session-1"
MIN_KEY_BYTES = 16
Arrays = Mapping[str, Mapping[str, np.ndarray]]  # object → array → data


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    format: str
    fingerprint: str
    record: SessionRecord
    bundle: StateBundle | None
    sha256: dict[str, str]  # tensor → digest of its bytes


def fitting(record: SessionRecord, fingerprint: str, *, block: int = BLOCK, prefixes: tuple[bytes, ...] = ()) -> list[BundleAt]:
    """Those of the record's bundles that are states of its present tokens, longest first. `prefixes`: that all tenants share."""
    lineage = lineage_of(fingerprint, record.tenant, unpack_tokens(record.tokens), block_size=block, prefixes=prefixes)
    return [at for at in record.bundles if at.position <= len(lineage) and lineage.at(at.position).hex() == at.lineage]


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """Writes and reads sessions of one model under one key."""

    key: bytes
    fingerprint: str
    block: int = BLOCK
    prefixes: tuple[bytes, ...] = ()  # that all tenants share

    def fitting(self, record: SessionRecord) -> list[BundleAt]:
        return fitting(record, self.fingerprint, block=self.block, prefixes=self.prefixes)

    def pack(self, record: SessionRecord, bundle: StateBundle | None, arrays: Arrays) -> bytes:
        at = () if bundle is None else (BundleAt(position=bundle.position, lineage=bundle.lineage),)
        tensors = {f"{name}/{part}": np.ascontiguousarray(array) for name, parts in arrays.items() for part, array in parts.items()}
        manifest = msgspec.json.encode(
            Manifest(
                format=FORMAT,
                fingerprint=self.fingerprint,
                record=replace(record, bundles=at),
                bundle=bundle,
                sha256={name: _sha256(array) for name, array in tensors.items()},
            ),
            order="sorted",
        )
        return save(tensors, {"manifest": manifest.decode(), "signature": self._sign(manifest)})

    def unpack(self, raw: bytes, tenant: str) -> tuple[SessionRecord, StateBundle | None, dict[str, dict[str, np.ndarray]]]:
        """Raises InvalidRequest naming the part that is missing, altered, foreign or left over."""
        manifest = self._manifest(_metadata(raw))
        if manifest.format != FORMAT:
            raise _refused(f"format: {manifest.format!r} is not {FORMAT!r}")
        if manifest.fingerprint != self.fingerprint:
            raise _refused(f"fingerprint: made by model {manifest.fingerprint[:12]}, this one is {self.fingerprint[:12]}")
        if manifest.record.tenant != tenant:
            raise _refused("tenant: this session was exported by another tenant")
        tensors = load(raw)
        for name, expected in manifest.sha256.items():
            if name not in tensors:
                raise _refused(f"{name}: missing")
            if _sha256(tensors[name]) != expected:
                raise _refused(f"{name}: its bytes do not match the manifest")
        for name in tensors:
            if name not in manifest.sha256:
                raise _refused(f"{name}: not in the manifest")
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for name, array in tensors.items():
            whole, _, part = name.rpartition("/")
            arrays.setdefault(whole, {})[part] = array
        if manifest.bundle is not None:
            self._check_bundle(manifest.bundle, manifest.record, arrays)
        return manifest.record, manifest.bundle, arrays

    def _sign(self, manifest: bytes) -> str:
        return hmac.new(self.key, manifest, hashlib.sha256).hexdigest()

    def _manifest(self, metadata: Mapping[str, Any]) -> Manifest:
        text, signature = metadata.get("manifest"), metadata.get("signature")
        if not isinstance(text, str) or not isinstance(signature, str):
            raise _refused("manifest: the file holds none: it is no exported session")
        if not hmac.compare_digest(self._sign(text.encode()).encode(), signature.encode()):
            raise _refused("signature: not made with this server's export_key, or the manifest was altered")
        try:
            return msgspec.json.decode(text, type=Manifest)
        except msgspec.DecodeError as error:
            raise _refused(f"manifest: {error}") from None

    def _check_bundle(self, bundle: StateBundle, record: SessionRecord, arrays: Arrays) -> None:
        if fault := bundle.fault(self.fingerprint, bundle.schema):
            raise _refused(f"bundle: {fault}")
        if bundle.tenant not in (record.tenant, "") or self.fitting(record)[:1] != [
            BundleAt(position=bundle.position, lineage=bundle.lineage)
        ]:
            raise _refused("bundle: it is not a state of this session's tokens")
        for meta in bundle.objects:
            if meta.name not in arrays:
                raise _refused(f"{meta.name}: missing")
            if digest(arrays[meta.name]) != meta.digest:
                raise _refused(f"{meta.name}: its bytes do not match the bundle's digest")


def read_export_key(reference: str) -> bytes:
    """`file:PATH` → the key. Raises ConfigError."""
    if not reference.startswith("file:"):
        raise ConfigError("export_key: expected file:PATH, the key itself does not belong into a configuration")
    path = Path(reference.removeprefix("file:"))
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"export_key: cannot read {path}: {error.strerror}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"export_key: {path} holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")
    return key


def _metadata(raw: bytes) -> Mapping[str, Any]:
    """The header's metadata, after checking that every tensor of the header is all there."""
    try:
        [size] = struct.unpack_from("<Q", raw)
        header = orjson.loads(raw[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        ends = {name: int(tensor["data_offsets"][1]) for name, tensor in header.items()}
        assert isinstance(metadata, dict)
    except (struct.error, orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, IndexError, AssertionError):
        raise _refused("header: not a safetensors file, or cut off in its header") from None
    have = len(raw) - 8 - size
    for name in sorted(ends, key=lambda name: ends[name]):
        if ends[name] > have:
            raise _refused(f"{name}: cut off, the file ends {ends[name] - have} bytes before its end")
    return metadata


def _sha256(array: np.ndarray) -> str:
    described = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    described.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return described.hexdigest()


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"the session was not imported: {message}", "file", "invalid_session_file")
