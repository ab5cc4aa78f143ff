"""What leaves the durable tier when it is cleared up, and what must not."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from cluster.durable import DiskBlobs, manifest_key, object_key
from cluster.durable_records import record_key
from cluster.sweep import GRACE_S, Swept, sweep
from engine.bundle import ObjectRef, RecurrentPart, Schema, Segment, StateBundle, encode_bundle
from engine.session import BundleAt, SessionRecord

SCHEMA = Schema(kda_layers=1, heads=2, head_dim=4, conv_taps=4, mla_layers=1, latent_dim=8, state_dtype="float32", cache_dtype="float32")
NOW = 2e9
TTL_S = 10 * GRACE_S


def ref(name: str) -> ObjectRef:
    return ObjectRef(name=name, digest="", nbytes=1)


class Tier:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = DiskBlobs(root)

    def put(self, key: str, data: bytes, age_s: float) -> None:
        self.blobs.put(key, data)
        os.utime(self.root / key, (NOW - age_s, NOW - age_s))

    def bundle(self, lineage: str, segments: tuple[str, ...], age_s: float) -> None:
        made = StateBundle(
            lineage=lineage,
            position=len(segments),
            fingerprint="f",
            tenant="t",
            schema=SCHEMA,
            recurrent=(RecurrentPart(first=0, last=2, object=ref(f"{lineage}-h")),),
            segments=tuple(Segment(start=i, stop=i + 1, object=ref(name)) for i, name in enumerate(segments)),
        )
        for meta in made.objects:
            self.put(object_key(meta.name), b"x", age_s)
        self.put(manifest_key(lineage), encode_bundle(made), age_s)

    def session(self, name: str, *lineages: str) -> None:
        record = SessionRecord(tenant="t", session=name, bundles=tuple(BundleAt(position=1, lineage=at) for at in lineages))
        self.put(record_key("t", name), msgspec.json.encode(record), 100 * TTL_S)

    def names(self, folder: str) -> set[str]:
        return {key.rpartition("/")[2].partition(".")[0] for key, _ in self.blobs.entries(folder)}


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


def test_what_a_session_names_stays_however_old(tier: Tier) -> None:
    tier.bundle("kept", ("s0", "s1"), 5 * TTL_S)
    tier.session("one", "kept", "not written yet")
    assert sweep(tier.blobs, TTL_S, NOW) == Swept(manifests=0, objects=0)
    assert tier.names("objects") == {"kept-h", "s0", "s1"}


def test_an_old_bundle_that_no_session_names_goes_and_leaves_what_others_share(tier: Tier) -> None:
    tier.bundle("gone", ("s0", "own"), 2 * TTL_S)
    tier.bundle("kept", ("s0",), 2 * TTL_S)
    tier.session("one", "kept")
    assert sweep(tier.blobs, TTL_S, NOW) == Swept(manifests=1, objects=2)
    assert (tier.names("bundles"), tier.names("objects")) == ({"kept"}, {"kept-h", "s0"})
    assert sweep(tier.blobs, TTL_S, NOW) == Swept(manifests=0, objects=0)


def test_one_within_its_time_to_live_stays(tier: Tier) -> None:
    tier.bundle("plain", ("s0",), TTL_S / 2)
    assert sweep(tier.blobs, TTL_S, NOW) == Swept(manifests=0, objects=0)


def test_objects_of_a_bundle_that_is_being_written_stay(tier: Tier) -> None:
    tier.put(object_key("young"), b"x", GRACE_S / 2)
    tier.put(object_key("orphan"), b"x", GRACE_S * 2)
    assert sweep(tier.blobs, TTL_S, NOW) == Swept(manifests=0, objects=1)
    assert tier.names("objects") == {"young"}


def test_a_short_time_to_live_does_not_touch_what_is_being_written(tier: Tier) -> None:
    tier.bundle("fresh", ("s0",), GRACE_S / 2)
    assert sweep(tier.blobs, 1.0, NOW) == Swept(manifests=0, objects=0)


def test_an_empty_tier(tier: Tier) -> None:
    assert sweep(tier.blobs, TTL_S, NOW) == Swept(manifests=0, objects=0)
