"""Objects and manifests on disk or S3: the tier that survives the cluster. Safetensors and JSON only, never pickle.

Layout under the root: `objects/<name>.safetensors`, `bundles/<lineage>.json`, `sessions/<tenant>/<session>.json`. A file appears whole or
not at all: on disk it is written beside its name and renamed, on S3 a PUT is atomic. Only this module and `cluster.weights` know S3.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol
from urllib.parse import urlparse

import numpy as np
from safetensors.numpy import load, save

from engine.errors import ConfigError, DurableError

RETRIES = 3


class Blobs(Protocol):
    """Named bytes. `get` returns None for an absent key; every method raises DurableError when the store fails."""

    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> None: ...
    def entries(self, prefix: str) -> Iterator[tuple[str, float]]:
        """Keys in the folder `prefix`, in order, each with the time of its last change, in seconds since the epoch."""
        ...


class DiskBlobs:
    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"durable store {root}: cannot be made ({error.strerror})") from error

    def put(self, key: str, data: bytes) -> None:
        target = self._root / key
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            fd, scratch = tempfile.mkstemp(dir=target.parent, prefix=".writing-")
            try:
                with os.fdopen(fd, "wb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
                os.replace(scratch, target)
            except BaseException:
                os.unlink(scratch)
                raise
        except OSError as error:
            raise DurableError(f"{target}: {error.strerror}") from error

    def get(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DurableError(f"{self._root / key}: {error.strerror}") from error

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    def entries(self, prefix: str) -> Iterator[tuple[str, float]]:
        folder = self._root / prefix
        for path in sorted(folder.rglob("*")):
            if not path.name.startswith(".writing-"):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    info = path.stat()
                    if S_ISREG(info.st_mode):
                        yield str(path.relative_to(self._root)), info.st_mtime


class S3Blobs:
    """boto3 with its own retries (standard mode: exponential backoff with jitter). `endpoint_url`: any S3-compatible server."""

    def __init__(self, bucket: str, prefix: str, endpoint_url: str | None = None) -> None:
        import boto3
        from botocore.config import Config

        config = Config(retries={"mode": "standard", "max_attempts": RETRIES}, connect_timeout=5, read_timeout=30)
        self._client = boto3.client("s3", endpoint_url=endpoint_url, config=config)
        self._bucket, self._prefix = bucket, prefix.strip("/")

    def put(self, key: str, data: bytes) -> None:
        self._call("put", key, self._client.put_object, Bucket=self._bucket, Key=self._key(key), Body=data)

    def get(self, key: str) -> bytes | None:
        answer = self._call("get", key, self._client.get_object, Bucket=self._bucket, Key=self._key(key))
        if answer is None:
            return None
        from botocore.exceptions import BotoCoreError

        try:
            return answer["Body"].read()
        except (BotoCoreError, OSError) as error:
            raise DurableError(f"s3://{self._bucket}/{self._key(key)}: body cut short: {error}") from error

    def delete(self, key: str) -> None:
        self._call("delete", key, self._client.delete_object, Bucket=self._bucket, Key=self._key(key))

    def entries(self, prefix: str) -> Iterator[tuple[str, float]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._key(prefix) + "/")
        skip = len(self._prefix) + 1 if self._prefix else 0
        for page in self._call("list", prefix, list, pages) or ():
            for item in page.get("Contents", ()):
                yield item["Key"][skip:], item["LastModified"].timestamp()

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _call(self, verb: str, key: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return method(*args, **kwargs)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if verb == "get" and code in ("NoSuchKey", "404"):
                return None
            raise DurableError(f"s3://{self._bucket}/{self._key(key)}: {verb} failed: {code or error}") from error
        except BotoCoreError as error:
            raise DurableError(f"s3://{self._bucket}/{self._key(key)}: {verb} failed: {error}") from error


def open_blobs(url: str, endpoint_url: str | None = None) -> Blobs:
    """`file:///path` or `s3://bucket/prefix`. Raises ConfigError for anything else."""
    scheme, netloc, path = check_url(url)
    return DiskBlobs(Path(path)) if scheme == "file" else S3Blobs(netloc, path, endpoint_url)


def check_url(url: str) -> tuple[str, str, str]:
    """(scheme, bucket, path) of a durable store. Raises ConfigError; connects to nothing."""
    parsed = urlparse(url)
    if not ((parsed.scheme == "file" and parsed.path) or (parsed.scheme == "s3" and parsed.netloc)):
        raise ConfigError(f"durable store {url!r}: expected file:///absolute/path or s3://bucket/prefix")
    return parsed.scheme, parsed.netloc, parsed.path


def manifest_key(lineage: str) -> str:
    return f"bundles/{lineage}.json"


def object_key(name: str) -> str:
    return f"objects/{name}.safetensors"


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """One object as a safetensors file. bf16 travels as uint16, as in the object store; the schema says what it is."""
    return save({name: np.ascontiguousarray(a) for name, a in arrays.items()})


def unpack(raw: bytes) -> dict[str, np.ndarray]:
    """Raises DurableError for what is not a whole safetensors file."""
    try:
        return load(raw)
    except Exception as error:  # safetensors raises its own SafetensorError and plain ValueErrors
        raise DurableError(f"not a whole safetensors object: {error}") from error
