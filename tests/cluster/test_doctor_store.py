"""The durable store's check on a disk and on a real S3 server (moto's), and what it says of each way to be wrong."""

from __future__ import annotations

import http.client
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from cluster.doctor import Finding, in_child
from cluster.doctor_files import check_files
from cluster.doctor_node import NodeAsk, inspect_node
from cluster.doctor_store import check_store

GOLDEN = Path(__file__).parent.parent / "data" / "k3" / "tiny-a" / "model"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="sessions")
    yield f"http://{host}:{port}"
    demand_credentials(host, port, after="inf")
    server.stop()


def demand_credentials(host: str, port: int, after: str) -> None:
    """moto checks credentials from then on."""
    connection = http.client.HTTPConnection(host, port)
    connection.request("POST", "/moto-api/reset-auth", after)
    assert connection.getresponse().status == 200
    connection.close()


def one(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_store_that_works_is_left_as_it_was(s3: str) -> None:
    found = check_store("s3://sessions/deep/er", s3, "n1")
    assert [(f.check, f.status.value, f.where) for f in found] == [("durable store", "ok", "n1"), ("clock", "ok", "n1")]
    assert "ranged GET" in found[0].what
    assert found[0].figures["get_bytes_per_s"] > 0
    assert "Contents" not in boto3.client("s3", endpoint_url=s3).list_objects_v2(Bucket="sessions")


@pytest.mark.parametrize(("skew", "status"), [(0.0, "ok"), (60.0, "warn"), (-3600.0, "fail")])
def test_a_clock_that_is_wrong(s3: str, skew: float, status: str) -> None:
    clock = check_store("s3://sessions", s3, clock=lambda: time.time() + skew)[1]
    assert (clock.check, clock.status.value) == ("clock", status)
    assert clock.figures["skew_s"] == pytest.approx(skew, abs=3)


def test_a_bucket_that_is_absent(s3: str) -> None:
    found = one(check_store("s3://nowhere", s3))
    assert (found.status.value, found.figures["step"]) == ("fail", "HEAD bucket")
    assert "create the bucket" in found.fix


def test_credentials_that_are_wrong(s3: str) -> None:
    host, port = s3.removeprefix("http://").split(":")
    demand_credentials(host, int(port), after="0")
    found = one(check_store("s3://sessions", s3))
    assert found.status.value == "fail"
    assert "credentials" in found.fix


def test_no_credentials_at_all(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    found = one(check_store("s3://sessions", s3))
    assert "Unable to locate credentials" in found.what
    assert "credentials" in found.fix


def test_an_endpoint_that_is_dead(s3: str) -> None:
    found = one(check_store("s3://sessions", "http://127.0.0.1:9"))
    assert (found.status.value, found.figures["step"]) == ("fail", "HEAD bucket")
    assert "127.0.0.1:9" in found.what
    assert "can be reached" in found.fix


def test_a_folder(tmp_path: Path) -> None:
    found = one(check_store(f"file://{tmp_path}/store", None))
    assert found.status.value in ("ok", "warn")  # warn: less than 10 GiB free here
    assert not [p for p in (tmp_path / "store").rglob("*") if p.is_file()]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = one(check_store(f"file://{tmp_path}/file/store", None))
    assert found.status.value == "fail"
    assert "cannot be made" in found.what


def check_where_files_stay_small(folder: str) -> list[Finding]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    return check_store(f"file://{folder}/store", None)


def test_a_folder_that_takes_no_more(tmp_path: Path) -> None:
    found = one(in_child(check_where_files_stay_small, str(tmp_path), limit_s=60))
    assert found.status.value == "fail"
    assert "File too large" in found.what
    assert not [p for p in (tmp_path / "store").rglob("*") if p.is_file()]


def test_a_url_that_is_none() -> None:
    assert "file:///absolute/path or s3://" in one(check_store("gs://x", None)).what


def test_a_store_that_never_answers_is_told_in_time(s3: str, tmp_path: Path) -> None:
    """It accepts connections and says nothing."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        ask = NodeAsk(model_dir=str(GOLDEN), spill_dir=str(tmp_path), durable_url="s3://b", durable_endpoint_url=endpoint, limit_s=3)
        facts = inspect_node("n1", ask, lambda: None)
    assert [(f.check, f.status.value) for f in facts.findings] == [("files", "ok"), ("durable store", "fail")]
    assert "no answer within 3 s" in facts.findings[1].what


# -- a model that lies in a store


def upload(endpoint: str, cut: dict[str, int], skip: str = "") -> str:
    """tiny-a, files cut to so many bytes, one left out."""
    client = boto3.client("s3", endpoint_url=endpoint)
    for file in GOLDEN.iterdir():
        if file.name != skip:
            client.put_object(Bucket="sessions", Key=f"model/{file.name}", Body=file.read_bytes()[: cut.get(file.name)])
    return "s3://sessions/model"


def test_a_model_in_a_store_has_the_fingerprint_of_its_files(s3: str) -> None:
    findings, fingerprint = check_files(upload(s3, {}), "n1", s3)
    assert [f.status.value for f in findings] == ["ok"]
    assert fingerprint == check_files(GOLDEN)[1]


def test_an_object_that_is_cut_or_missing_or_out_of_reach(s3: str) -> None:
    name = "model-00002-of-000003.safetensors"
    cut, none = check_files(upload(s3, {name: 900_000}), "n1", s3)
    assert (cut[0].status.value, none) == ("fail", None)
    assert name in cut[0].what
    boto3.client("s3", endpoint_url=s3).delete_object(Bucket="sessions", Key=f"model/{name}")
    missing, _ = check_files("s3://sessions/model", "n1", s3)
    assert f"{name}: the file is missing" in missing[0].what
    dead, _ = check_files("s3://sessions/model", "n1", "http://127.0.0.1:9")
    assert dead[0].status.value == "fail"
    assert "127.0.0.1:9" in dead[0].what
