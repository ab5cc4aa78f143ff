"""The durable store before traffic: can this node write, read a part back, and delete there; how fast; and do the clocks agree?"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from cluster.doctor import Finding, fail, ok, size, warn
from cluster.durable import DiskBlobs, check_url
from engine.errors import ConfigError, DurableError

PROBE_BYTES = 4 * 2**20  # written and partly read back
RANGE = (1_000_000, 1_999_999)  # inclusive, as HTTP has it
LOW_DISK = 10 * 2**30
SKEW_WARN_S, SKEW_FAIL_S = 5.0, 300.0  # a Date header has seconds; S3 refuses signatures that are 900 s off
CONNECT_S, READ_S = 3, 10

# what S3 answers → what to do about it
FIXES = {
    "NoSuchBucket": "create the bucket, or correct durable_url",
    "404": "create the bucket, or correct durable_url",
    "InvalidAccessKeyId": "give every node working credentials (AWS profile, environment or instance role)",
    "SignatureDoesNotMatch": "the secret key is wrong: give every node working credentials",
    "AccessDenied": "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject under the prefix",
    "403": "give every node working credentials that may list, get, put and delete under the prefix",
    "301": "the bucket is in another region: set the region, or durable_endpoint_url to the bucket's own endpoint",
    "PermanentRedirect": "the bucket is in another region: set the region, or durable_endpoint_url to the bucket's own endpoint",
    "RequestTimeTooSkewed": "synchronise this node's clock (chrony, ntpd)",
}


def check_store(url: str, endpoint_url: str | None, where: str = "", clock: Callable[[], float] = time.time) -> list[Finding]:
    """Leaves nothing behind. `clock`: seconds since the epoch on this node."""
    try:
        scheme, bucket, path = check_url(url)
    except ConfigError as error:
        return [fail("durable store", str(error), "correct durable_url", where)]
    if scheme == "file":
        return _check_disk(Path(path), where)
    return _check_s3(bucket, path.strip("/"), endpoint_url, where, clock)


def _check_disk(root: Path, where: str) -> list[Finding]:
    key, data = f"doctor/{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
    begin = time.monotonic()
    try:
        blobs = DiskBlobs(root)
        blobs.put(key, data)
        same = blobs.get(key) == data
        blobs.delete(key)
    except (ConfigError, DurableError, OSError) as error:
        return [fail("durable store", str(error), "make the folder writable for the user who serves, with room in it", where)]
    rate = 2 * PROBE_BYTES / (time.monotonic() - begin)
    if not same:
        return [fail("durable store", f"{root}: what was read is not what was written", "replace the disk or the file system", where)]
    free = shutil.disk_usage(root).free
    if free < LOW_DISK:
        return [warn("durable store", f"{root}: {size(free)} are free", "make room, or choose another folder", where, free_bytes=free)]
    what = f"{root}: written, read and deleted at {size(rate)}/s; {size(free)} free"
    return [ok("durable store", what, where, bytes_per_s=rate, free_bytes=free)]


def _check_s3(bucket: str, prefix: str, endpoint_url: str | None, where: str, clock: Callable[[], float]) -> list[Finding]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    name = f"s3://{bucket}/{prefix}" + (f" at {endpoint_url}" if endpoint_url else "")
    key = "/".join(part for part in (prefix, "doctor", secrets.token_hex(8)) if part)
    data = secrets.token_bytes(PROBE_BYTES)
    first, last = RANGE
    step = "connect"
    try:
        client = _client(endpoint_url)
        step = "HEAD bucket"
        head = client.head_bucket(Bucket=bucket)
        now = clock()
        step, begin = "PUT", time.monotonic()
        client.put_object(Bucket=bucket, Key=key, Body=data)
        wrote = time.monotonic() - begin
        step, begin = "ranged GET", time.monotonic()
        part = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={first}-{last}")["Body"].read()
        read = time.monotonic() - begin
        step = "DELETE"
        client.delete_object(Bucket=bucket, Key=key)
    except ClientError as error:
        answer: Any = error.response
        code = str(answer.get("Error", {}).get("Code") or answer.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        fix = FIXES.get(code, f"see what the store means by {code}, and whether credentials and region are right")
        return [fail("durable store", f"{name}: {step} was refused: {code}", fix, where, step=step, code=code)]
    except (NoCredentialsError, NoRegionError) as error:
        return [fail("durable store", f"{name}: {error}", "give every node credentials and a region", where, step=step)]
    except (BotoCoreError, OSError) as error:
        fix = "see that the endpoint runs and can be reached from this node (address, port, firewall, TLS)"
        return [fail("durable store", f"{name}: {step} failed: {error}", fix, where, step=step)]
    if part != data[first : last + 1]:
        fix = "use a store that honours Range, as resumed and partial reads need it"
        return [
            fail("durable store", f"{name}: a ranged GET gave {len(part):,} other bytes than were written", fix, where, step="ranged GET")
        ]
    out, back = len(data) / wrote, len(part) / read
    what = f"{name}: HEAD, PUT ({size(out)}/s), ranged GET ({size(back)}/s), DELETE"
    findings = [ok("durable store", what, where, put_bytes_per_s=out, get_bytes_per_s=back)]
    date = head["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date is not None:
        findings.append(judge_skew(now - parsedate_to_datetime(date).timestamp(), "the S3 server", where, SKEW_WARN_S, SKEW_FAIL_S))
    return findings


def judge_skew(skew_s: float, against: str, where: str, warn_s: float, fail_s: float) -> Finding:
    """`skew_s`: this clock minus the other one."""
    what = f"{abs(skew_s):,.1f} s {'ahead of' if skew_s >= 0 else 'behind'} {against}"
    if abs(skew_s) < warn_s:
        return ok("clock", what, where, skew_s=skew_s)
    return (fail if abs(skew_s) >= fail_s else warn)("clock", what, "synchronise the clocks (chrony, ntpd)", where, skew_s=skew_s)


def _client(endpoint_url: str | None) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(retries={"mode": "standard", "max_attempts": 1}, connect_timeout=CONNECT_S, read_timeout=READ_S)
    return boto3.Session().client("s3", endpoint_url=endpoint_url, config=config)  # its own: credentials are read now
