"""The ingress's `EngineClient` over Serve: a routed unary call per request, tokens by the token channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.token_channel import TokenReceiver
from engine.errors import EngineFailure, K3Error, QueueFull, ReplicaLost
from engine.types import GenerateRequest, TokenChunk

LAST_CHUNK_S = 5.0  # the call returned: its last chunk is already on the wire


class RoutedEngineClient:
    """Create inside the ingress's event loop."""

    def __init__(self, handle: DeploymentHandle, host: str) -> None:
        self._handle = handle
        self._receiver = TokenReceiver(host)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `engine.client.EngineClient`. A replica that dies raises ReplicaLost at once."""
        stream = self._receiver.open()
        handle = self._handle.options(session_id=request.session) if request.session else self._handle
        response = handle.generate.remote(request, stream.address)
        call = asyncio.ensure_future(_outcome(response))
        call.add_done_callback(lambda done: _settle(done, stream))
        finished = False
        try:
            while not finished:
                chunk = await stream.get()
                finished = chunk.finish is not None
                yield chunk
        finally:
            if not finished:
                stream.cancel()
                if not stream.has_peer:
                    response.cancel()  # still queued in Serve
            stream.close()

    async def close(self) -> None:
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
