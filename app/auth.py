"""API keys: who may come in, and as which tenant."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from app.errors import Unauthorized
from engine.errors import ConfigError

FILE = "file:"


class ApiKeys:
    """Knows keys by their digests only. Without keys the service is open and everybody is one tenant."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def from_config(cls, entries: Iterable[str]) -> ApiKeys:
        """Entries are keys or `file:PATH` (one key a line, `#` begins a comment). Raises ConfigError for an unreadable or empty file."""
        keys: list[str] = []
        for entry in entries:
            keys += _read(Path(entry.removeprefix(FILE))) if entry.startswith(FILE) else [entry]
        return cls(keys)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The caller's tenant, a name that does not give the key away. Raises Unauthorized.

        Both spellings are read: `Authorization: Bearer KEY` and `x-api-key: KEY`. Comparing takes the same time whatever is sent.
        """
        if not self._digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        sent = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not sent:
            raise Unauthorized("no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        digest = _digest(sent)
        if not any([hmac.compare_digest(digest, known) for known in self._digests]):
            raise Unauthorized("unknown API key")
        return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"api_keys: cannot read {path}: {error.strerror}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"api_keys: {path} holds no key")
    return keys
