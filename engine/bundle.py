"""`StateBundle`: a conversation at one position, as an immutable, content-addressed value.

A bundle names objects, it does not hold them. Three kinds of object make it up, each a small set of named arrays:

* *recurrent parts*: KDA recurrent and convolution state, valid at exactly `position`, cut by heads as the exporting shards had them;
* *segments*: runs of MLA latents, immutable, named by the lineage at their end and so shared by every bundle that passes there;
* the *tail*: the latents between the last full segment and `position`, rewritten by the next bundle.

The wire layout is logical: arrays carry their head range and token range, so a bundle written by 8 shards loads on 1, 4 or 64.
Digests are xxh3 over the bytes; they are checked by whoever reads an object, before the first step that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

LAYOUT = "k3-1"  # of the arrays below; another layout has another tag and is refused
WIDTH = {"float32": 4, "bfloat16": 2}  # bytes of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Logical, unsharded shapes. `latents` [mla_layers, tokens, latent_dim]; `kda` [kda_layers, heads, K, V] and
    `conv` [kda_layers, 3 (q, k, v), heads, K, taps - 1], both cut over heads."""

    layout: str = LAYOUT
    kda_layers: int
    heads: int
    head_dim: int
    conv_taps: int
    mla_layers: int
    latent_dim: int
    state_dtype: str  # dtype of `kda`
    cache_dtype: str  # dtype of `conv` and `latents`

    @property
    def head_bytes(self) -> int:
        """Of the recurrent and convolution state of one head, all layers."""
        kda = self.kda_layers * self.head_dim**2 * WIDTH[self.state_dtype]
        return kda + self.kda_layers * 3 * self.head_dim * (self.conv_taps - 1) * WIDTH[self.cache_dtype]

    @property
    def token_bytes(self) -> int:
        """Of the latents of one token, all layers."""
        return self.mla_layers * self.latent_dim * WIDTH[self.cache_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRef:
    """One stored object. `digest`: xxh3-128 of its arrays, hex."""

    name: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPart:
    """Heads [first, last) of the recurrent state: arrays `kda` and `conv`."""

    first: int
    last: int
    object: ObjectRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, stop) of the latents: array `latents`."""

    start: int
    stop: int
    object: ObjectRef


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPart:
    """What one shard is asked to export: the recurrent state of its heads from a slot, or a run of latents from pages."""

    name: str
    nbytes: int  # of the arrays
    epoch: int  # of the shard group that wrote them: another one's slots and pages hold something else
    heads: tuple[int, int] | None = None  # [first, last) of all heads: a recurrent part
    slot: int = -1
    pages: tuple[int, ...] = ()  # cover tokens [start, stop), the page of `start` first: a segment
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBundle:
    lineage: str  # hex of engine.lineage at `position`
    position: int
    fingerprint: str
    tenant: str
    schema: Schema
    recurrent: tuple[RecurrentPart, ...]
    segments: tuple[Segment, ...]  # contiguous from 0 to position; the last may be an open tail
    anchor: str = ""  # hex of engine.lineage after the last full block: how a prompt finds bundles whose position it does not know
    parent: str | None = None  # lineage of the bundle that this one extends

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        return (*(p.object for p in self.recurrent), *(s.object for s in self.segments))

    @property
    def nbytes(self) -> int:
        return sum(o.nbytes for o in self.objects)

    def fault(self, fingerprint: str, schema: Schema) -> str | None:
        """Why this bundle may not be resumed by a model of that identity; None when it may. Says nothing of the objects' bytes."""
        if self.fingerprint != fingerprint:
            return f"wrong_fingerprint: made by model {self.fingerprint[:12]}, this one is {fingerprint[:12]}"
        if self.schema != schema:
            return f"wrong_schema: {self.schema} is not {schema}"
        at = 0
        for segment in self.segments:
            if segment.start != at or segment.stop <= segment.start:
                return f"incomplete: latents jump from {at} to {segment.start}"
            at = segment.stop
        if at != self.position:
            return f"incomplete: latents end at {at}, the state is at {self.position}"
        at = 0
        for part in sorted(self.recurrent, key=lambda p: p.first):
            if part.first != at or part.last <= part.first:
                return f"incomplete: recurrent heads jump from {at} to {part.first}"
            at = part.last
        if at != schema.heads:
            return f"incomplete: recurrent heads end at {at} of {schema.heads}"
        return None


def overlapping(parts: Iterable[RecurrentPart], first: int, last: int) -> list[RecurrentPart]:
    """The parts that hold heads of [first, last), in order."""
    return sorted((p for p in parts if p.first < last and first < p.last), key=lambda p: p.first)


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes, in the order of the names."""
    h = xxhash.xxh3_128()
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        h.update(f"{name} {a.dtype.str} {a.shape}".encode())
        h.update(a.reshape(-1).view(np.uint8).data)
    return h.hexdigest()


_encoder = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder(StateBundle)


def encode_bundle(bundle: StateBundle) -> bytes:
    """Canonical JSON: equal bundles give equal bytes."""
    return _encoder.encode(bundle)


def decode_bundle(raw: bytes) -> StateBundle:
    """Raises ValueError (msgspec.ValidationError) naming the wrong field."""
    return _decoder.decode(raw)
