"""The ingress's `EngineClient` over Serve: a routed unary call per request, tokens by the token channel."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.token_channel import TokenReceiver
from engine.errors import EngineFailure, K3Error, QueueFull, ReplicaLost, ShardLost
from engine.types import GenerateRequest, TokenChunk

logger = logging.getLogger("ray.serve")
RETRY_S = 0.2  # before a stream is sent elsewhere
LAST_CHUNK_S = 5.0  # the call returned: its last chunk is already on the wire


class RoutedEngineClient:
    """Create inside the ingress's event loop. `failover_s`: how long a stream whose replica died waits for another one."""

    def __init__(self, handle: DeploymentHandle, host: str, failover_s: float = 300.0) -> None:
        self._handle = handle
        self._receiver = TokenReceiver(host)
        self._failover_s = failover_s
        self._closed = False
        self.moved = 0  # streams that went on elsewhere

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `engine.client.EngineClient`. When the replica is lost, the stream goes on at another one from what was passed on so far.

        Raises ReplicaLost when no other one took it within `failover_s`.
        """
        passed = list(request.generated)
        current, admitted, deadline = request, request.admitted, 0.0
        while True:
            progress = False
            try:
                async with aclosing(self._attempt(current, deadline - time.monotonic() if deadline else None)) as chunks:
                    async for chunk in chunks:
                        progress = progress or bool(chunk.token_ids)
                        if chunk.usage is not None:
                            admitted, first = admitted or chunk.usage.admission, admitted is None
                            if not first and chunk.finish is None:
                                chunk = replace(chunk, usage=None)  # told already
                        passed += chunk.token_ids
                        yield chunk
                        if chunk.finish is not None:
                            return
                return
            except (ReplicaLost, ShardLost, QueueFull) as lost:
                if self._closed or (isinstance(lost, QueueFull) and current is request):
                    raise
                now = time.monotonic()
                deadline = now + self._failover_s if progress or not deadline else deadline
                if now >= deadline:
                    raise
                logger.warning("request %s goes on elsewhere after %d tokens: %s", request.request_id, len(passed), lost)
                self.moved += 1
                current = replace(request, generated=tuple(passed), admitted=admitted)
                await asyncio.sleep(RETRY_S)

    async def _attempt(self, request: GenerateRequest, patience_s: float | None) -> AsyncGenerator[TokenChunk, None]:
        """The stream at one replica. `patience_s`: longest wait for its first word; None = as long as it takes."""
        stream = self._receiver.open()
        handle = self._handle.options(session_id=request.session) if request.session else self._handle
        response = handle.generate.remote(request, stream.address)
        call = asyncio.ensure_future(_outcome(response))
        call.add_done_callback(lambda done: _settle(done, stream))
        finished = False
        try:
            while not finished:
                try:
                    async with asyncio.timeout(patience_s):
                        chunk = await stream.get()
                except TimeoutError:
                    raise ReplicaLost("no engine replica took the stream in time") from None
                patience_s = None
                finished = chunk.finish is not None
                yield chunk
        finally:
            if not finished:
                stream.cancel()
                if not stream.has_peer:
                    response.cancel()  # still queued in Serve
            stream.close()

    async def close(self) -> None:
        self._closed = True
        await self._receiver.close()


async def _outcome(response: Any) -> K3Error | None:
    """The error of ours that a finished call stands for, None when it went well."""
    try:
        result = await response
    except BackPressureError as error:
        return QueueFull(str(error))
    except (ray.exceptions.RayActorError, DeploymentUnavailableError) as error:
        return ReplicaLost(f"the engine replica went away: {type(error).__name__}")
    except asyncio.CancelledError:
        return None
    except (ray.exceptions.RayError, RayServeException) as error:
        return EngineFailure(f"the engine replica failed: {type(error).__name__}")
    return result if isinstance(result, K3Error) else None


def _settle(call: asyncio.Future[K3Error | None], stream: Any) -> None:
    """Ends a stream whose call ended with an error, or whose last chunk does not come."""
    if call.cancelled():
        return
    error = call.exception() or call.result()
    if error is not None:
        stream.fail(error)
    else:
        asyncio.get_running_loop().call_later(
            LAST_CHUNK_S, stream.fail, ReplicaLost("the last tokens of the stream were lost on their way")
        )
