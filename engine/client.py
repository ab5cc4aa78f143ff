"""How the ingress sees an engine: one protocol for the routed real thing and for a fake in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.types import GenerateRequest, TokenChunk


class EngineClient(Protocol):
    """`stream` yields chunks until one with `finish` set; closing the generator earlier cancels the request.

    Raises `InvalidRequest`, `QueueFull` before the first chunk; `EngineFailure` at any time. At least one chunk precedes
    any token's visibility; a chunk may be empty of tokens.
    """

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]: ...
