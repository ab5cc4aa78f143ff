"""Ranged reads of a checkpoint's files, from a folder or an S3 bucket, that survive a slow or failing store but no changed file.

A range is asked for again, from the byte after the last that arrived, until nothing arrives for `patience_s`: a slow store slows a
load, it never ends one. What no repetition mends (access, names, region, an object that changed) is refused at once, in words.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from engine.errors import CheckpointError, ConfigError

BACKOFF_S = 0.1  # before the second attempt; doubles up to BACKOFF_MAX_S, each drawn between nothing and this
BACKOFF_MAX_S = 10.0
CHUNK = 1 << 18  # bytes of a body taken at a time: a broken connection loses no more
SILENCE_S = 30.0  # without a byte on a connection: ask on another one
CHANGED = "the object changed while it was read; load again, and replace checkpoints under a new name"
ADVICE = {  # S3 error code -> what to check
    "NoSuchBucket": "there is no such bucket at this endpoint: check the name, model_endpoint_url and the region",
    "NoSuchKey": "there is no such object: check the prefix, and that the upload was complete",
    "404": "there is no such object: check the bucket and the prefix",
    "AccessDenied": "access denied: check that the credentials may s3:GetObject there",
    "403": "access denied: check that the credentials may s3:GetObject there",
    "InvalidAccessKeyId": "the access key is unknown at this endpoint: check the credentials and model_endpoint_url",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy altered the request: check the credentials",
    "ExpiredToken": "the session token has expired: renew the credentials",
    "InvalidToken": "the session token is wrong: renew the credentials",
    "PermanentRedirect": "the bucket lies in another region: set AWS_DEFAULT_REGION or the profile's region",
    "301": "the bucket lies in another region: set AWS_DEFAULT_REGION or the profile's region",
    "AuthorizationHeaderMalformed": "signed for the wrong region: set AWS_DEFAULT_REGION or the profile's region",
    "IllegalLocationConstraintException": "the bucket lies in another region: set AWS_DEFAULT_REGION or the profile's region",
    "InvalidRange": CHANGED,
    "416": CHANGED,
    "PreconditionFailed": CHANGED,
    "412": CHANGED,
}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as it was when its header was read. `tag`: the ETag on S3; empty for a file on disk, whose copies differ by node."""

    name: str
    size: int
    tag: str


class Source(Protocol):
    """A checkpoint's files; satisfies `model.safetensors_header.Folder`. Safe to use from several threads."""

    def where(self, file: str) -> str: ...
    def stat(self, file: str) -> StoredFile | None:
        """None: no such file."""
        ...

    def size(self, file: str) -> int | None: ...
    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes: ...
    def fill(self, file: StoredFile, start: int, buffer: memoryview, arrived: Callable[[int], None] = lambda _: None) -> None:
        """Reads [start, start + len(buffer)) of the file as it was at `stat`. `arrived` is told the bytes as they come.

        Raises CheckpointError naming the file when it is not that file any more, or nothing comes.
        """
        ...


def open_source(url: str, endpoint_url: str | None = None, *, patience_s: float = 60.0, connections: int = 16) -> Source:
    """A folder's path, `file:///path` or `s3://bucket/prefix`. Connects to nothing. Raises ConfigError for another url."""
    parsed = urlparse(url)
    if parsed.scheme == "s3" and parsed.netloc:
        return S3Source(parsed.netloc, parsed.path, endpoint_url, patience_s=patience_s, connections=connections)
    if parsed.scheme == "file" and parsed.path and not parsed.netloc:
        return FolderSource(Path(parsed.path))
    if "://" in url or not url:
        raise ConfigError(f"model {url!r}: expected a folder, file:///absolute/path or s3://bucket/prefix")
    return FolderSource(Path(url))


class FolderSource:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen: dict[str, int] = {}  # time of last change when first read here

    def where(self, file: str) -> str:
        return str(self.root / file)

    def stat(self, file: str) -> StoredFile | None:
        path = self.root / file
        return StoredFile(file, path.stat().st_size, "") if path.is_file() else None

    def size(self, file: str) -> int | None:
        found = self.stat(file)
        return found.size if found else None

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        found = self.stat(file)
        if found is None:
            raise CheckpointError(f"{self.where(file)}: the file is missing")
        buffer = bytearray((found.size if stop is None else stop) - start)
        self.fill(found, start, memoryview(buffer))
        return bytes(buffer)

    def fill(self, file: StoredFile, start: int, buffer: memoryview, arrived: Callable[[int], None] = lambda _: None) -> None:
        path = self.where(file.name)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                now = os.fstat(descriptor)
                if now.st_size != file.size or self._seen.setdefault(file.name, now.st_mtime_ns) != now.st_mtime_ns:
                    raise CheckpointError(f"{path}: the file changed while it was read ({file.size} bytes before, {now.st_size} now)")
                while buffer:
                    count = os.preadv(descriptor, [buffer[:CHUNK]], start)
                    if count == 0:
                        raise CheckpointError(f"{path}: ends at byte {start}, {len(buffer)} more were expected")
                    arrived(count)
                    start, buffer = start + count, buffer[count:]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class S3Source:
    """boto3 for signing and transport, any S3-compatible server; the repetitions are ours, since only we know how far a range came."""

    def __init__(
        self, bucket: str, prefix: str, endpoint_url: str | None, *, patience_s: float, connections: int, silence_s: float = SILENCE_S
    ) -> None:
        import boto3
        from botocore.config import Config

        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=min(silence_s, patience_s),
            max_pool_connections=connections,
            tcp_keepalive=True,
        )
        self._client = boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
        self._bucket, self._prefix = bucket, prefix.strip("/")
        self._at = f" at {endpoint_url}" if endpoint_url else ""
        self._patience_s = patience_s
        self._stats: dict[str, StoredFile | None] = {}
        self._lock = threading.Lock()

    def where(self, file: str) -> str:
        return f"s3://{self._bucket}/{self._key(file)}"

    def stat(self, file: str) -> StoredFile | None:
        """Asked once for each name: what the header was read from is what is loaded."""
        with self._lock:
            if file in self._stats:
                return self._stats[file]
        answer = self._persist(file, lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(file)))
        found = StoredFile(file, answer["ContentLength"], answer["ETag"]) if answer is not None else None
        with self._lock:
            return self._stats.setdefault(file, found)

    def size(self, file: str) -> int | None:
        found = self.stat(file)
        return found.size if found else None

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        found = self.stat(file)
        if found is None:
            raise CheckpointError(f"{self.where(file)}: {ADVICE['NoSuchKey']}")
        buffer = bytearray((found.size if stop is None else stop) - start)
        self.fill(found, start, memoryview(buffer))
        return bytes(buffer)

    def fill(self, file: StoredFile, start: int, buffer: memoryview, arrived: Callable[[int], None] = lambda _: None) -> None:
        patience = _Patience(self._patience_s)
        while buffer:
            count, fault = self._body(file, start, buffer, arrived)
            start, buffer = start + count, buffer[count:]
            if fault is not None:
                patience.spend(self.where(file.name) + self._at, fault, count)

    def _body(self, file: StoredFile, start: int, buffer: memoryview, arrived: Callable[[int], None]) -> tuple[int, Exception | None]:
        """One request: how many bytes came, and what ended it early."""
        from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

        count = 0
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._key(file.name), Range=f"bytes={start}-{start + len(buffer) - 1}", IfMatch=file.tag
            )
            body = answer["Body"]
            try:
                if answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and (start or len(buffer) != file.size):
                    raise ConfigError(f"{self.where(file.name)}{self._at}: the server does not answer ranged requests")
                while count < len(buffer):
                    taken = body.readinto(buffer[count : count + CHUNK])
                    if not taken:
                        return count, EOFError(f"the body ended {len(buffer) - count} bytes early")
                    count += taken
                    arrived(taken)
            finally:
                if count < len(buffer):
                    body.close()  # its connection is of no more use
            return count, None
        except ClientError as error:
            return count, self._bearable(file.name, error)
        except (HTTPClientError, ConnectionError, OSError) as error:
            return count, error
        except Exception as error:
            if not _broken_body(error):
                raise self._refused(file.name, error) from error
            return count, error

    def _persist(self, file: str, ask: Callable[[], Any]) -> Any:
        """The answer of a request that has no body; None when there is no such object."""
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

        patience = _Patience(self._patience_s)
        while True:
            try:
                return ask()
            except ClientError as error:
                if _code(error) in ("404", "NoSuchKey"):
                    return None
                fault: Exception = self._bearable(file, error)
            except (HTTPClientError, ConnectionError) as error:
                fault = error
            except BotoCoreError as error:
                raise self._refused(file, error) from error
            patience.spend(self.where(file) + self._at, fault, 0)

    def _bearable(self, file: str, error: Any) -> Exception:
        """The error when asking again may help. Raises ConfigError with what to check otherwise."""
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = _code(error)
        if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "InternalError", "408"):
            return Exception(f"{status} {code}")
        if code == "400":  # a HEAD tells no more: the same for a wrong region, a malformed key and an expired token
            advice = "bad request: check the region, the credentials and model_endpoint_url"
        else:
            advice = ADVICE.get(code, f"refused with {status} {code}: {error.response.get('Error', {}).get('Message', '')}")
        raise (CheckpointError if advice is CHANGED else ConfigError)(f"{self.where(file)}{self._at}: {advice}")

    def _refused(self, file: str, error: Exception) -> ConfigError:
        return ConfigError(f"{self.where(file)}{self._at}: {error}; check the credentials, the region and model_endpoint_url")

    def _key(self, file: str) -> str:
        return f"{self._prefix}/{file}" if self._prefix else file


class _Patience:
    """How long one range is asked for again: until nothing came for so long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._quiet_since = time.monotonic()
        self._attempt = 0

    def spend(self, where: str, fault: Exception, came: int) -> None:
        """Sleeps before the next attempt. Raises CheckpointError when patience is at its end."""
        if came:
            self._quiet_since, self._attempt = time.monotonic(), 0
        quiet = time.monotonic() - self._quiet_since
        if quiet >= self._limit_s:
            raise CheckpointError(f"{where}: not a byte in {quiet:.0f} s; the last attempt ended with: {fault}")
        delay = random.random() * min(BACKOFF_MAX_S, BACKOFF_S * 2**self._attempt)
        time.sleep(min(delay, self._limit_s - quiet))
        self._attempt += 1


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _broken_body(error: Exception) -> bool:
    """Transport errors that botocore lets through as they are."""
    from http.client import HTTPException

    from botocore.exceptions import IncompleteReadError, ResponseStreamingError
    from urllib3.exceptions import HTTPError

    return isinstance(error, HTTPException | HTTPError | IncompleteReadError | ResponseStreamingError)
