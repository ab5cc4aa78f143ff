"""The durable tier on a disk and on a real S3 server (moto's): whole or absent, and every failure says which key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from cluster.durable import Blobs, DiskBlobs, S3Blobs, open_blobs, pack, unpack
from engine.bundle import digest
from engine.errors import ConfigError, DurableError
from tests.cluster.s3 import BUCKET, Fault, Proxy, Request, Store, running_store


@pytest.fixture(scope="module")
def s3(request: pytest.FixtureRequest) -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="sessions")
    yield endpoint
    server.stop()
    patch.undo()


@pytest.fixture(params=["disk", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> Blobs:
    if request.param == "disk":
        return open_blobs(f"file://{tmp_path}/store")
    return open_blobs(f"s3://sessions/{tmp_path.name}/deep", s3)


def test_put_get_list_delete(blobs: Blobs) -> None:
    assert blobs.get("objects/a") is None
    blobs.put("objects/a", b"one")
    blobs.put("objects/b", b"two")
    blobs.put("bundles/c", b"three")
    blobs.put("objects/a", b"newer")
    assert blobs.get("objects/a") == b"newer"
    assert [key for key, _ in blobs.entries("objects")] == ["objects/a", "objects/b"]
    blobs.delete("objects/a")
    blobs.delete("objects/a")
    assert blobs.get("objects/a") is None
    assert [key for key, _ in blobs.entries("objects")] == ["objects/b"]


def test_arrays_survive_with_dtype_shape_and_digest(blobs: Blobs) -> None:
    rng = np.random.default_rng(0)
    arrays = {"kda": rng.standard_normal((2, 3, 4, 4)).astype(np.float32), "conv": rng.integers(0, 2**16, (2, 3), dtype=np.uint16)}
    blobs.put("objects/x", pack(arrays))
    raw = blobs.get("objects/x")
    assert raw is not None
    back = unpack(raw)
    assert digest(back) == digest(arrays)
    assert {k: (v.dtype, v.shape) for k, v in back.items()} == {k: (v.dtype, v.shape) for k, v in arrays.items()}


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\xff" * 64], ids=["cut", "empty", "noise"])
def test_a_damaged_object_is_refused(damage: object) -> None:
    raw = pack({"latents": np.zeros((4, 8), np.float32)})
    with pytest.raises(DurableError, match="safetensors"):
        unpack(damage(raw))  # type: ignore[operator]


def test_a_flipped_byte_changes_the_digest() -> None:
    a = {"kda": np.zeros((2, 2), np.float32)}
    b = {"kda": a["kda"].copy()}
    b["kda"].view(np.uint8)[0, 3] = 1
    assert digest(a) != digest(b)
    assert digest(a) != digest({"kda": a["kda"].reshape(4)}), "the shape counts"


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path / "store")
    (tmp_path / "store" / "objects").write_text("a file where a folder should be")
    with pytest.raises(DurableError, match="objects"):
        blobs.put("objects/a", b"x")
    assert not list((tmp_path / "store").glob(".writing-*"))


def test_an_s3_server_that_is_down() -> None:
    blobs = S3Blobs("sessions", "", "http://127.0.0.1:9")
    with pytest.raises(DurableError, match="s3://sessions/objects/a: put failed"):
        blobs.put("objects/a", b"x")


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with running_store() as running:
        yield running


@pytest.fixture
def faulty(store: Store, tmp_path: Path) -> Iterator[tuple[Proxy, S3Blobs]]:
    """An S3 server behind a proxy that misbehaves when told to."""
    yield store.proxy, S3Blobs(BUCKET, tmp_path.name, store.proxy.url)
    store.proxy.fault = lambda _: None


def times(count: int, fault: Fault) -> Callable[[Request], Fault | None]:
    """That fault for the next requests, then none."""
    left = iter([fault] * count)
    return lambda _: next(left, None)


@pytest.mark.parametrize("status", [500, 502, 503])
def test_two_failures_are_retried(faulty: tuple[Proxy, S3Blobs], status: int) -> None:
    proxy, blobs = faulty
    proxy.fault = times(2, Fault(status=status))
    blobs.put("objects/a", b"one")
    proxy.fault = times(2, Fault(status=status))
    assert blobs.get("objects/a") == b"one"


@pytest.mark.parametrize("status", [500, 403])
def test_a_server_that_goes_on_failing_is_an_error_and_nothing_is_there(faulty: tuple[Proxy, S3Blobs], status: int) -> None:
    proxy, blobs = faulty
    proxy.fault = lambda _: Fault(status=status)
    for call in (lambda: blobs.put("objects/a", b"one"), lambda: blobs.get("objects/a"), lambda: list(blobs.entries("objects"))):
        with pytest.raises(DurableError, match=f"s3://{BUCKET}/"):
            call()
    proxy.fault = lambda _: None
    assert blobs.get("objects/a") is None


@pytest.mark.parametrize("reset", [False, True])
def test_a_body_that_ends_early_is_an_error(faulty: tuple[Proxy, S3Blobs], *, reset: bool) -> None:
    proxy, blobs = faulty
    blobs.put("objects/a", bytes(200_000))
    proxy.fault = lambda _: Fault(after=100_000, reset=reset)
    with pytest.raises(DurableError, match="cut short"):
        blobs.get("objects/a")


def test_a_slow_server_is_waited_for(faulty: tuple[Proxy, S3Blobs]) -> None:
    proxy, blobs = faulty
    data = bytes(range(256)) * 40
    blobs.put("objects/a", data)
    proxy.fault = lambda _: Fault(drip=(1024, 0.02))
    assert blobs.get("objects/a") == data


def test_a_bucket_that_is_absent(s3: str) -> None:
    with pytest.raises(DurableError, match="NoSuchBucket"):
        S3Blobs("nowhere", "", s3).put("objects/a", b"x")


@pytest.mark.parametrize("url", ["/plain/path", "file://", "s3://", "gs://bucket/x", ""])
def test_urls_that_are_not_understood(url: str) -> None:
    with pytest.raises(ConfigError, match="file:///absolute/path or s3://bucket/prefix"):
        open_blobs(url)
