"""Tokens from an engine replica to an ingress: one socket per pair, one message a step for all requests of the pair.

Serve costs about a millisecond a message, so only the call that starts and ends a request goes through Serve. The ingress
listens (`TokenReceiver`); its address and a random stream id travel inside that call; the replica connects back (`TokenSender`).
On the same socket the ingress sends controls: cancel, and pause/resume for a reader that is slower than the engine. Such a reader
gets what has come meanwhile as one chunk, so being behind makes it cheaper, and it catches up.

A stream id is 128 random bits known to the two ends only; frames for unknown ids are dropped. Payloads are typed msgpack.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec
import zmq

from deployments.zmq_socket import BACKLOG, Socket
from engine.errors import ReplicaLost
from engine.types import TokenChunk

logger = logging.getLogger("ray.serve")
HIGH_WATER = 256  # chunks waiting for one reader before its request pauses


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """Where a request's tokens go."""

    endpoint: str  # tcp://host:port of the ingress
    stream: str


class ControlKind(StrEnum):
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class Control:
    kind: ControlKind
    stream: str


@dataclass(frozen=True, slots=True)
class Delivery:
    stream: str
    chunk: TokenChunk


_encoder = msgspec.msgpack.Encoder()
_deliveries = msgspec.msgpack.Decoder(list[Delivery])
_control = msgspec.msgpack.Decoder(Control)


class TokenStream:
    """The ingress's end of one request. `get` returns what has come since the last one; `fail` ends the stream with an error."""

    def __init__(self, receiver: TokenReceiver, address: StreamAddress) -> None:
        self.address = address
        self._receiver = receiver
        self._chunks: deque[TokenChunk] = deque()
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._peer: bytes | None = None  # the replica's socket identity, known from its first message
        self._paused = False
        self._cancelled = False

    async def get(self) -> TokenChunk:
        """Everything that waits, as one chunk; waits for the first. Raises what `fail` was told, after the chunks before it."""
        await self._arrived.wait()
        if not self._chunks:
            assert self._error is not None
            raise self._error
        chunk = _joined(self._chunks)
        self._chunks.clear()
        if self._error is None:
            self._arrived.clear()
        if self._paused:
            self._paused = False
            self._control(ControlKind.RESUME)
        return chunk

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._arrived.set()

    def cancel(self) -> None:
        """Tells the replica, now or as soon as its first message shows who it is."""
        self._cancelled = True
        self._control(ControlKind.CANCEL)

    def close(self) -> None:
        self._receiver.forget(self)

    @property
    def has_peer(self) -> bool:
        return self._peer is not None

    def deliver(self, peer: bytes, chunk: TokenChunk) -> None:
        self._peer = peer
        if self._cancelled:
            self._control(ControlKind.CANCEL)
            return
        self._chunks.append(chunk)
        self._arrived.set()
        if not self._paused and len(self._chunks) >= HIGH_WATER:
            self._paused = True
            self._control(ControlKind.PAUSE)

    def _control(self, kind: ControlKind) -> None:
        if self._peer is not None:
            self._receiver.send(self._peer, Control(kind, self.address.stream))


class TokenReceiver:
    """The listening end, one per ingress process. Create inside the running loop; `close` when done."""

    def __init__(self, host: str) -> None:
        self._context = zmq.Context()
        self._socket = Socket(self._context, zmq.ROUTER, self._on_message)
        port = self._socket.raw.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._streams: dict[str, TokenStream] = {}

    def open(self) -> TokenStream:
        stream = TokenStream(self, StreamAddress(self.endpoint, uuid.uuid4().hex))
        self._streams[stream.address.stream] = stream
        return stream

    def forget(self, stream: TokenStream) -> None:
        self._streams.pop(stream.address.stream, None)

    def send(self, peer: bytes, control: Control) -> None:
        if not self._socket.send([peer, _encoder.encode(control)]):
            logger.warning("could not send %s to an engine replica", control.kind)

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.fail(ReplicaLost("the ingress is shutting down"))
        self._socket.close()
        self._context.term()

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            peer, payload = frames
            deliveries = _deliveries.decode(payload)
        except (ValueError, msgspec.MsgspecError):
            logger.warning("dropped a malformed message on the token channel")
            return
        for delivery in deliveries:
            stream = self._streams.get(delivery.stream)
            if stream is not None:
                stream.deliver(peer, delivery.chunk)
            elif delivery.chunk.finish is None:
                self.send(peer, Control(ControlKind.CANCEL, delivery.stream))  # nobody reads it any more


class TokenSender:
    """The replica's end: one socket per ingress it has met. `on_control` runs in the loop for every control message."""

    def __init__(self, on_control: Callable[[Control], None], backlog: int = BACKLOG) -> None:
        self._context = zmq.Context()
        self._backlog = backlog
        self._on_control = on_control
        self._sockets: dict[str, Socket] = {}

    def send(self, deliveries: list[tuple[StreamAddress, TokenChunk]]) -> list[StreamAddress]:
        """One message to each ingress concerned. Returns the addresses whose ingress takes no more (it is gone): cancel them."""
        by_endpoint: defaultdict[str, list[Delivery]] = defaultdict(list)
        for address, chunk in deliveries:
            by_endpoint[address.endpoint].append(Delivery(address.stream, chunk))
        gone: list[StreamAddress] = []
        for endpoint, batch in by_endpoint.items():
            if not self._connect(endpoint).send([_encoder.encode(batch)]):
                gone += [StreamAddress(endpoint, delivery.stream) for delivery in batch]
        return gone

    async def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger_ms=1000)
        await asyncio.to_thread(self._context.term)

    def _connect(self, endpoint: str) -> Socket:
        socket = self._sockets.get(endpoint)
        if socket is None:
            socket = Socket(self._context, zmq.DEALER, self._on_message, self._backlog)
            socket.raw.connect(endpoint)
            self._sockets[endpoint] = socket
        return socket

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            [payload] = frames
            control = _control.decode(payload)
        except (ValueError, msgspec.MsgspecError):
            logger.warning("dropped a malformed control on the token channel")
            return
        self._on_control(control)


def _joined(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Consecutive chunks of one stream as one: tokens in order, the latest word on everything else."""
    if len(chunks) == 1:
        return chunks[0]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return replace(
        chunks[-1],
        token_ids=tuple([token_id for chunk in chunks for token_id in chunk.token_ids]),
        logprobs=tuple(logprobs) if logprobs else None,
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None),
        usage=next((chunk.usage for chunk in reversed(chunks) if chunk.usage is not None), None),
    )
