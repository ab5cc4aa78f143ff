"""Clears the durable tier up: what no session and no bundle names any more goes.

Deleting a session removes its manifests; the objects that they named may be shared with forks and with other conversations of the same
beginning, so they go when no manifest names them. Manifests of bundles that no stored session knows go after their time to live. What is
young stays in any case: a bundle is written objects first, manifest last.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cluster.durable import Blobs, manifest_key, object_key
from engine.bundle import decode_bundle

GRACE_S = 3600.0  # a bundle is written within this


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    manifests: int
    objects: int


class _At(msgspec.Struct):
    lineage: str


class _Known(msgspec.Struct):
    """The part of a session record that is read here."""

    bundles: tuple[_At, ...] = ()


def sweep(blobs: Blobs, ttl_s: float, now: float, grace_s: float = GRACE_S) -> Swept:
    """Reads every record and manifest once. Raises DurableError; running it again goes on."""
    known: set[str] = set()
    for key, _ in blobs.entries("sessions"):
        if (raw := blobs.get(key)) is not None:
            known.update(at.lineage for at in msgspec.json.decode(raw, type=_Known).bundles)
    named: set[str] = set()
    manifests = objects = 0
    for key, changed in blobs.entries("bundles"):
        lineage = key.rpartition("/")[2].removesuffix(".json")
        raw = blobs.get(key)
        if raw is None:
            continue
        if lineage not in known and now - changed > max(ttl_s, grace_s):
            blobs.delete(manifest_key(lineage))
            manifests += 1
        else:
            named.update(object_key(meta.name) for meta in decode_bundle(raw).objects)
    for key, changed in blobs.entries("objects"):
        if key not in named and now - changed > grace_s:
            blobs.delete(key)
            objects += 1
    return Swept(manifests=manifests, objects=objects)
