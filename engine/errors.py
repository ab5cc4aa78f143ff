"""The drawn exception tree. Core errors know no HTTP: `app.errors` is the one table from here to a status code.

    K3Error
     ├─ InvalidRequest        the client's fault; the message says which field and what was expected
     │   ├─ ContextExceeded   prompt (+ max_tokens) longer than the context or the page pool
     │   └─ Unsupported       a valid request that this engine or checkpoint cannot serve
     ├─ UnknownSession        no such session of this tenant
     │   ├─ UnknownMark       the session is there, the mark is not
     │   └─ UnknownResponse   a response that was never stored, or whose conversation is gone
     ├─ SessionBusy           another turn of the session is running
     │   └─ SessionExists     the name is taken
     ├─ QueueFull             come back later; carries retry_after seconds
     ├─ ConfigError           refused at start: configuration, topology
     │   └─ CheckpointError   refused at start: names file and tensor
     └─ EngineFailure         the server's fault
         ├─ StoreFull         the state tier has no room; the session goes on without a new bundle
         ├─ DurableError      disk or S3 failed; says which key
         ├─ ShardLost         a shard died or hung; its group failed
         ├─ ReplicaLost       the engine replica went away mid-stream
         └─ InvariantBroken   an owner's books are wrong: a bug, found before it could reach a stream

Every error is picklable with its fields (they cross Ray).
"""

from __future__ import annotations


class K3Error(Exception):
    """Root. `str(error)` is fit to be shown to a client or an operator: no secrets, no stack trace."""


class InvalidRequest(K3Error):
    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.param, self.code)


class ContextExceeded(InvalidRequest):
    def __init__(self, message: str, param: str | None = "messages", code: str | None = "context_length_exceeded") -> None:
        super().__init__(message, param, code)


class Unsupported(InvalidRequest):
    pass


class UnknownSession(K3Error):
    pass


class UnknownMark(UnknownSession):
    pass


class UnknownResponse(UnknownSession):
    pass


class NoOpenAnswer(K3Error):
    pass


class SessionBusy(K3Error):
    pass


class SessionExists(SessionBusy):
    pass


class QueueFull(K3Error):
    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.retry_after)


class ConfigError(K3Error):
    pass


class CheckpointError(ConfigError):
    pass


class EngineFailure(K3Error):
    pass


class ShardLost(EngineFailure):
    pass


class ReplicaLost(EngineFailure):
    pass


class InvariantBroken(EngineFailure):
    pass


class StoreFull(EngineFailure):
    pass


class DurableError(EngineFailure):
    pass
