"""What a store does wrong: recovered from without reading twice, or refused with what to check."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from cluster.checkpoint import DIGESTS, Checkpoint, read_checkpoint, tokenizer_folder
from cluster.weight_digests import ALGORITHMS
from cluster.weight_reader import LoadSettings, sole_reader
from cluster.weight_source import FolderSource, S3Source, StoredFile, open_source
from engine.errors import CheckpointError, ConfigError
from tests.cluster.s3 import BUCKET, Fault, Request, Store, running_store
from tests.model.golden import DATA

FOLDER = DATA / "tiny-a" / "model"
FILE = "model-00001-of-000003.safetensors"
SETTINGS = LoadSettings(threads=2, patience_s=2.0)


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with running_store() as store:
        store.upload(FOLDER, "model")
        yield store


@pytest.fixture
def store(running: Store) -> Iterator[Store]:
    """Sound, with an empty log."""
    running.proxy.fault = lambda _: None
    running.proxy.log.clear()
    yield running
    running.proxy.fault = lambda _: None


@pytest.fixture(scope="module")
def found(running: Store) -> Checkpoint:
    return read_checkpoint(f"s3://{BUCKET}/model", running.proxy.url)


def source(store: Store, bucket: str = BUCKET, prefix: str = "model", patience_s: float = 2.0, silence_s: float = 1.0) -> S3Source:
    return S3Source(bucket, prefix, store.proxy.url, patience_s=patience_s, connections=2, silence_s=silence_s)


def read_all(checkpoint: Checkpoint, settings: LoadSettings = SETTINGS) -> int:
    """Loads into nothing: bytes that arrived."""
    total = 0
    for arrived in sole_reader(checkpoint, settings).arrivals():
        if arrived is not None:
            total += arrived.block.nbytes
            arrived.release()
    return total


def first_time(fault: Fault) -> Callable[[Request], Fault | None]:
    """The first request of every range goes wrong."""
    seen: Counter[tuple[str, int]] = Counter()

    def decide(request: Request) -> Fault | None:
        if request.method != "GET":
            return None
        seen[request.path, request.start] += 1
        return fault if seen[request.path, request.start] == 1 else None

    return decide


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503),
        Fault(status=500),
        Fault(status=429),
        Fault(after=70_001),
        Fault(after=70_001, reset=True),
        Fault(after=0),
        Fault(drip=(50_000, 0.01)),
    ],
    ids=["503", "500", "429", "truncated", "reset", "empty", "drip"],
)
def test_a_range_that_fails_is_asked_for_again_from_where_it_broke(fault: Fault, store: Store) -> None:
    start, stop = 1_001, 501_001
    buffer = bytearray(stop - start)
    reader = source(store)
    file = reader.stat(FILE)
    assert file is not None
    store.proxy.fault = first_time(fault)
    reader.fill(file, start, memoryview(buffer))
    assert buffer == (FOLDER / FILE).read_bytes()[start:stop]
    # A reset may take with it what was on its way; a chunk is all that may be lost.
    assert store.proxy.log.nbytes() <= stop - start + (fault.after or 0)
    if fault.status is not None or fault.after == 0:
        assert len(store.proxy.log.requests) == 3  # HEAD, GET, GET


def test_a_load_through_a_store_that_fails_every_range_once(store: Store, found: Checkpoint) -> None:
    expected = read_all(read_checkpoint(str(FOLDER)))
    store.proxy.fault = first_time(Fault(status=503))
    assert read_all(found) == expected == store.proxy.log.nbytes()


def test_a_store_that_stays_away_ends_the_load_when_patience_ends(store: Store, found: Checkpoint) -> None:
    store.proxy.fault = lambda _: Fault(status=503)
    with pytest.raises(CheckpointError, match=rf"s3://{BUCKET}/model/model-0000.*not a byte in .* s; the last attempt ended with: 503"):
        read_all(found, LoadSettings(threads=2, patience_s=0.3))


def test_nobody_listens() -> None:
    with running_store() as gone:
        where = gone.proxy.url
        reader = S3Source(BUCKET, "model", where, patience_s=0.3, connections=1)
        gone.proxy.close()
        with pytest.raises(CheckpointError, match=f"at {where}: not a byte in .*Could not connect"):
            reader.stat(FILE)


def test_an_object_that_changes_while_it_is_read(store: Store, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "model")
    checkpoint = read_checkpoint(store.upload(tmp_path / "model", "changing"), store.proxy.url)
    content = bytearray((tmp_path / "model" / FILE).read_bytes())
    content[-1] ^= 1
    (tmp_path / "model" / FILE).write_bytes(content)
    store.upload(tmp_path / "model", "changing")
    with pytest.raises(CheckpointError, match=f"s3://{BUCKET}/changing/{FILE}.*changed while it was read"):
        read_all(checkpoint)


def test_an_object_that_goes_away(store: Store, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(store.upload(FOLDER, "vanishing"), store.proxy.url)
    store.client().delete_object(Bucket=BUCKET, Key=f"vanishing/{FILE}")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"s3://{BUCKET}/vanishing/{FILE}.*there is no such object"):
        read_all(checkpoint)


def test_a_missing_shard_file_is_told_before_anything_is_read(store: Store) -> None:
    store.upload(FOLDER, "partial")
    store.client().delete_object(Bucket=BUCKET, Key=f"partial/{FILE}")  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=f"s3://{BUCKET}/partial/{FILE}: the file is missing"):
        read_checkpoint(f"s3://{BUCKET}/partial", store.proxy.url)


def test_an_absent_prefix_and_an_absent_bucket(store: Store) -> None:
    with pytest.raises(ConfigError, match=f"s3://{BUCKET}/nowhere/config.json"):
        read_checkpoint(f"s3://{BUCKET}/nowhere", store.proxy.url)
    with pytest.raises(ConfigError, match=r"s3://nobucket/model/model-1.*no such bucket"):
        source(store, "nobucket").fill(StoredFile("model-1", 10, '"x"'), 0, memoryview(bytearray(4)))


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "AccessDenied", "credentials may s3:GetObject"),
        (403, "InvalidAccessKeyId", "access key is unknown"),
        (403, "SignatureDoesNotMatch", "secret key is wrong"),
        (400, "ExpiredToken", "token has expired"),
        (301, "PermanentRedirect", "another region"),
        (400, "AuthorizationHeaderMalformed", "wrong region"),
        (404, "NoSuchBucket", "no such bucket"),
    ],
)
def test_what_the_operator_must_mend_is_refused_at_once(status: int, code: str, advice: str, store: Store) -> None:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    reader = source(store)
    file = reader.stat(FILE)
    assert file is not None
    store.proxy.log.clear()
    store.proxy.fault = lambda request: Fault(status=status, body=body) if FILE in request.path else None
    with pytest.raises(ConfigError, match=rf"s3://{BUCKET}/model/{FILE} at http://127.*{advice}"):
        reader.fill(file, 0, memoryview(bytearray(10)))
    assert {r.path for r in store.proxy.log.requests} <= {f"/{BUCKET}/model/{FILE}", f"/{BUCKET}"}  # botocore asks for the region
    assert len(store.proxy.log.requests) <= 3


def test_a_head_without_access(store: Store) -> None:
    store.proxy.fault = lambda _: Fault(status=403)
    with pytest.raises(ConfigError, match=f"s3://{BUCKET}/model/config.json.*access denied"):
        read_checkpoint(f"s3://{BUCKET}/model", store.proxy.url)


def test_no_credentials_at_all(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match=r"s3://weights/model/config.json.*Unable to locate credentials.*check the credentials"):
        read_checkpoint(f"s3://{BUCKET}/model", store.proxy.url)


def test_a_file_on_disk_that_changes(tmp_path: Path) -> None:
    path = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    checkpoint = read_checkpoint(str(path))
    with (path / FILE).open("ab") as f:
        f.write(b"x")
    with pytest.raises(CheckpointError, match=f"{FILE}: the file changed while it was read"):
        read_all(checkpoint)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "file://", "file://host/x", ""])
def test_urls_that_are_not_understood(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a folder, file:///absolute/path or s3://bucket/prefix"):
        open_source(url)


def test_a_folder_by_its_url() -> None:
    opened = open_source(f"file://{FOLDER.resolve()}")
    assert isinstance(opened, FolderSource)
    assert opened.read("config.json") == (FOLDER / "config.json").read_bytes()


def test_the_tokenizer_of_a_bucket_is_kept_on_disk(store: Store, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "tiktoken.model").write_bytes(b"one")
    url = store.upload(files, "words")
    kept = tokenizer_folder(url, store.proxy.url, tmp_path / "cache")
    assert (kept / "tiktoken.model").read_bytes() == b"one"
    store.proxy.log.clear()
    assert tokenizer_folder(url, store.proxy.url, tmp_path / "cache") == kept
    assert store.proxy.log.nbytes() == 0
    (files / "tiktoken.model").write_bytes(b"two")
    store.upload(files, "words")
    assert (tokenizer_folder(url, store.proxy.url, tmp_path / "cache") / "tiktoken.model").read_bytes() == b"two"


def test_no_room_for_the_tokenizer(store: Store, tmp_path: Path) -> None:
    """/dev/full is a disk without room; here a folder that cannot be made stands for one."""
    (tmp_path / "tiktoken.model").write_bytes(b"one")
    url = store.upload(tmp_path, "noroom")
    with pytest.raises(ConfigError, match=r"no copy of s3://weights/noroom's tokenizer can be kept there .*make room"):
        tokenizer_folder(url, store.proxy.url, Path("/dev/full"))


def with_digests(path: Path, algorithm: str) -> None:
    tensors: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as f:
            names = list(f.keys())
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        for name in names:
            start, stop = header[name]["data_offsets"]
            tensors[name] = ALGORITHMS[algorithm](memoryview(raw)[8 + length + start : 8 + length + stop]).hexdigest()
    (path / DIGESTS).write_text(json.dumps({"algorithm": algorithm, "tensors": tensors}))


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_a_flipped_bit_is_found_where_there_are_digests(algorithm: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    with_digests(path, algorithm)
    read_all(read_checkpoint(str(path)))
    with safe_open(path / FILE, framework="np") as f:
        name = next(n for n in f.keys() if ".experts.3.w2.weight_packed" in n)  # noqa: SIM118
    raw = bytearray((path / FILE).read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, _ = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    raw[8 + length + start + 5] ^= 16
    (path / FILE).write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{FILE}: tensor {name} is damaged"):
        read_all(read_checkpoint(str(path)))


@pytest.mark.parametrize("text", ["{", "[]", '{"algorithm": "md5", "tensors": {}}', '{"algorithm": "sha256"}'])
def test_digests_that_are_not_understood(text: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(FOLDER, tmp_path / "model"))
    (path / DIGESTS).write_text(text)
    with pytest.raises(CheckpointError, match=f"{DIGESTS}: expected algorithm"):
        read_all(read_checkpoint(str(path)))


def test_a_budget_too_small_for_two_blocks() -> None:
    with pytest.raises(ConfigError, match="load_buffer_bytes=5000 is too small"):
        sole_reader(read_checkpoint(str(FOLDER)), LoadSettings(buffer_bytes=5000))
