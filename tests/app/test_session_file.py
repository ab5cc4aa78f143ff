"""An exported session comes back as it was, or not at all."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from app.session_file import Arrays, SessionFiles, read_export_key
from engine.bundle import ObjectRef, RecurrentPart, Schema, Segment, StateBundle, digest
from engine.errors import ConfigError
from engine.lineage import BLOCK, Lineage, root
from engine.session import BundleAt
from tests.app.edge import Edge, says
from tests.app.sessions import record, store, tokens
from tests.app.test_sessions import ANSWER, turn, user

KEY = b"0123456789abcdef"
FILES = SessionFiles(KEY, "f00d")
SCHEMA = Schema(kda_layers=1, heads=2, head_dim=4, conv_taps=4, mla_layers=1, latent_dim=8, state_dtype="float32", cache_dtype="float32")
EXPORT, IMPORT = "/v1/sessions/s/export", "/v1/sessions/back/import"


@dataclass
class Shelf:
    """A `BundlePort` in memory."""

    held: dict[str, tuple[StateBundle, Arrays]] = field(default_factory=dict)

    async def read(self, lineage: str) -> tuple[StateBundle, Arrays] | None:
        return self.held.get(lineage)

    async def write(self, bundle: StateBundle, arrays: Arrays) -> None:
        self.held[bundle.lineage] = (bundle, arrays)


def state(ids: tuple[int, ...], position: int, files: SessionFiles = FILES, tenant: str = "") -> tuple[StateBundle, Arrays]:
    """Some state of these tokens."""
    lineage = Lineage(root(files.fingerprint, tenant), BLOCK, ids).at(position).hex()
    rng = np.random.default_rng(position)
    arrays: dict[str, dict[str, np.ndarray]] = {
        f"{lineage}-h0-2": {"kda": rng.random((1, 2, 4, 4), np.float32), "conv": rng.random((1, 3, 2, 4, 3), np.float32)},
        f"{lineage}-t0": {"latents": rng.random((1, position, 8), np.float32)},
    }
    refs = [ObjectRef(name=n, digest=digest(a), nbytes=sum(x.nbytes for x in a.values())) for n, a in arrays.items()]
    bundle = StateBundle(
        lineage=lineage,
        position=position,
        fingerprint=files.fingerprint,
        tenant=tenant,
        schema=SCHEMA,
        recurrent=(RecurrentPart(first=0, last=2, object=refs[0]),),
        segments=(Segment(start=0, stop=position, object=refs[1]),),
    )
    return bundle, arrays


async def exported(edge: Edge, shelf: Shelf) -> bytes:
    """A session of one turn with two states, exported."""
    await turn(edge, user("hi"))
    assert edge.sessions is not None
    ids = tokens(await edge.sessions.get("", "s"))
    for position in (20, len(ids) - 1):
        bundle, arrays = state(ids, position)
        await shelf.write(bundle, arrays)
        await edge.sessions.attach("", "s", BundleAt(position=position, lineage=bundle.lineage))
    response = await edge.http.get(EXPORT)
    assert response.status_code == 200
    return response.content


async def test_there_and_back() -> None:
    there, here = Shelf(), Shelf()
    async with Edge(says(ANSWER), sessions=store(), bundles=there, files=FILES) as edge:
        file = await exported(edge, there)
        assert edge.sessions is not None
        original = await edge.sessions.get("", "s")
    sessions = store()
    async with Edge(says(ANSWER), sessions=sessions, bundles=here, files=FILES) as edge:
        response = await edge.post(IMPORT, file)
        assert response.status_code == 200, response.text
        assert response.json()["position"] == len(tokens(original)) - 1
        back = await record(sessions, "back")
        assert (back.tokens, back.messages, back.ends) == (original.tokens, original.messages, original.ends)
        [(bundle, arrays)] = here.held.values()
        expected, written = there.held[bundle.lineage]
        assert bundle == expected
        assert all(np.array_equal(arrays[n][a], written[n][a]) for n in written for a in written[n])
        await turn(edge, user("more"), session_mode="append", session_id="back")
        assert edge.asked.prompt[: back.num_tokens] == tokens(back)
        assert (await edge.post(IMPORT, file)).status_code == 409


async def test_a_session_without_a_fitting_state_is_exported_without() -> None:
    shelf = Shelf()
    async with Edge(says(ANSWER), sessions=store(), bundles=shelf, files=FILES) as edge:
        await turn(edge, user("hi"))
        assert edge.sessions is not None
        foreign, arrays = state((7,) * 40, 20)
        await shelf.write(foreign, arrays)
        await edge.sessions.attach("", "s", BundleAt(position=20, lineage=foreign.lineage))
        file = (await edge.http.get(EXPORT)).content
        assert load(file) == {}
        response = await edge.post(IMPORT, file)
        assert (response.status_code, response.json()["position"]) == (200, 0)


def parts(file: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    [size] = struct.unpack_from("<Q", file)
    return load(file), json.loads(file[8 : 8 + size])["__metadata__"]


def named(tensors: dict[str, np.ndarray], part: str) -> str:
    return next(name for name in tensors if name.endswith(part))


def without(part: str) -> Callable[[bytes], bytes]:
    def damage(file: bytes) -> bytes:
        tensors, metadata = parts(file)
        del tensors[named(tensors, part)]
        return save(tensors, metadata)

    return damage


def changed(part: str) -> Callable[[bytes], bytes]:
    def damage(file: bytes) -> bytes:
        tensors, metadata = parts(file)
        name = named(tensors, part)
        tensors[name] = tensors[name].copy()
        tensors[name].flat[3] += 1
        return save(tensors, metadata)

    return damage


def swapped(file: bytes) -> bytes:
    tensors, metadata = parts(file)
    kda, conv = named(tensors, "kda"), named(tensors, "conv")
    tensors[kda], tensors[conv] = tensors[conv], tensors[kda]
    return save(tensors, metadata)


def added(file: bytes) -> bytes:
    tensors, metadata = parts(file)
    return save({**tensors, "x/extra": np.zeros(2, np.float32)}, metadata)


def retold(old: str, new: str) -> Callable[[bytes], bytes]:
    def damage(file: bytes) -> bytes:
        tensors, metadata = parts(file)
        assert old in metadata["manifest"]
        return save(tensors, metadata | {"manifest": metadata["manifest"].replace(old, new, 1)})

    return damage


def unsigned(file: bytes) -> bytes:
    tensors, metadata = parts(file)
    return save(tensors, {"manifest": metadata["manifest"]})


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (without("kda"), "/kda: missing"),
        (without("latents"), "/latents: missing"),
        (changed("kda"), "/kda: its bytes"),
        (changed("latents"), "/latents: its bytes"),
        (swapped, "its bytes"),
        (added, "x/extra: not in the manifest"),
        (retold('"turns":1', '"turns":2'), "signature"),
        (retold('"position":', '"position":1'), "signature"),
        (unsigned, "manifest"),
        (lambda file: file[:-40], "cut off"),
        (lambda file: file[:100], "header"),
        (lambda file: b"", "header"),
        (lambda file: b"\xff" * 64, "header"),
        (lambda file: save({"a": np.zeros(2, np.float32)}), "manifest"),
    ],
)
async def test_damage_is_refused_and_named(damage: Callable[[bytes], bytes], part: str) -> None:
    sessions, shelf = store(), Shelf()
    async with Edge(says(ANSWER), sessions=sessions, bundles=shelf, files=FILES) as edge:
        damaged = damage(await exported(edge, shelf))
        shelf.held.clear()
        response = await edge.post(IMPORT, damaged)
        assert response.status_code == 400
        assert part in response.json()["error"]["message"]
        assert shelf.held == {}
        assert (await edge.http.get("/v1/sessions/back")).status_code == 404


def _foreign(change: Callable[[StateBundle], Any]) -> bytes:
    """Well signed, but of a state that is not the session's or not whole."""
    ids = tuple(range(100, 200))
    bundle, arrays = state(ids, 70)
    made = change(bundle)
    signed = _record(ids)
    return FILES.pack(signed, made, arrays)


def _record(ids: tuple[int, ...], tenant: str = "") -> Any:
    from app.past import pack_tokens
    from engine.session import SessionRecord

    return SessionRecord(tenant=tenant, session="s", tokens=pack_tokens(ids))


@pytest.mark.parametrize(
    ("file", "part"),
    [
        (lambda: _foreign(lambda b: replace(b, lineage="00" * 32)), "not a state of this session"),
        (lambda: _foreign(lambda b: replace(b, segments=())), "incomplete"),
        (lambda: _foreign(lambda b: replace(b, recurrent=())), "incomplete"),
        (lambda: _foreign(lambda b: replace(b, fingerprint="beef")), "wrong_fingerprint"),
        (lambda: _foreign(lambda b: replace(b, tenant="other")), "not a state of this session"),
        (lambda: SessionFiles(KEY, "beef").pack(_record((1, 2)), None, {}), "fingerprint"),
        (lambda: SessionFiles(b"another key, also long", "f00d").pack(_record((1, 2)), None, {}), "signature"),
        (lambda: FILES.pack(_record((1, 2), "other"), None, {}), "tenant"),
    ],
)
async def test_what_is_foreign_is_refused(file: Callable[[], bytes], part: str) -> None:
    shelf = Shelf()
    async with Edge(says(ANSWER), sessions=store(), bundles=shelf, files=FILES) as edge:
        response = await edge.post(IMPORT, file())
        assert response.status_code == 400
        assert part in response.json()["error"]["message"]
    assert shelf.held == {}


async def test_a_file_beyond_the_limit_is_not_read() -> None:
    async with Edge(says(ANSWER), sessions=store(), files=FILES, max_import_bytes=100) as edge:
        assert (await edge.post(IMPORT, b"x" * 101)).status_code == 413


def test_the_key_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_export_key(f"file:{tmp_path}/key") == KEY
    (tmp_path / "short").write_bytes(b"short")
    for wrong in ("secret itself", f"file:{tmp_path}/short", f"file:{tmp_path}/none"):
        with pytest.raises(ConfigError, match="export_key"):
            read_export_key(wrong)
