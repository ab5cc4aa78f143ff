"""The one table from exceptions to HTTP status and error body, in the shapes of the OpenAI and the Anthropic API.

    K3Error (engine.errors)
     └─ InvalidRequest
         ├─ UnknownModel      404  the model name is not served here
         └─ BodyTooLarge      413  refused before it was read
    Unauthorized (K3Error)    401  no key, or one we do not know

Core packages know no HTTP; nothing else in `app` knows a status code.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from chat.types import ChatError
from engine.errors import (
    EngineFailure,
    InvalidRequest,
    K3Error,
    NoOpenAnswer,
    QueueFull,
    SessionBusy,
    SessionExists,
    UnknownMark,
    UnknownResponse,
    UnknownSession,
)

logger = logging.getLogger("ray.serve")


class UnknownModel(InvalidRequest):
    def __init__(self, message: str, param: str | None = "model", code: str | None = "model_not_found") -> None:
        super().__init__(message, param, code)


class BodyTooLarge(InvalidRequest):
    def __init__(self, message: str, param: str | None = None, code: str | None = "request_too_large") -> None:
        super().__init__(message, param, code)


class Unauthorized(K3Error):
    pass


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as a client sees it. `type` is OpenAI's word; `openai_error` and `anthropic_error` give the bodies."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def describe(error: BaseException) -> Failure:
    """What to tell the client. Anything unforeseen is logged under an id, and only that id leaves the house."""
    match error:
        case Unauthorized():
            return Failure(401, "authentication_error", str(error), code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        case UnknownModel():
            return Failure(404, "invalid_request_error", str(error), error.param, error.code)
        case BodyTooLarge():
            return Failure(413, "invalid_request_error", str(error), error.param, error.code)
        case InvalidRequest():
            return Failure(400, "invalid_request_error", str(error), error.param, error.code)
        case ChatError():
            message = f"{error.param}: {error}" if error.param else str(error)
            return Failure(400, "invalid_request_error", message, error.param)
        case ValidationError():
            return _invalid_fields(error)
        case UnknownMark():
            return Failure(404, "invalid_request_error", str(error), "mark", "mark_not_found")
        case UnknownResponse():
            return Failure(404, "invalid_request_error", str(error), "previous_response_id", "response_not_found")
        case UnknownSession():
            return Failure(404, "invalid_request_error", str(error), "session_id", "session_not_found")
        case NoOpenAnswer():
            return Failure(404, "invalid_request_error", str(error), "session_id", "no_open_answer")
        case SessionExists():
            return Failure(409, "conflict_error", str(error), "session_id", "session_exists")
        case SessionBusy():
            return Failure(409, "conflict_error", str(error), "session_id", "session_busy")
        case QueueFull():
            return Failure(
                429, "rate_limit_error", str(error), code="queue_full", headers={"retry-after": str(max(1, math.ceil(error.retry_after)))}
            )
        case EngineFailure():
            return Failure(503, "service_unavailable", str(error), code="engine_failure", headers={"retry-after": "5"})
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            return Failure(error.status_code, kind, str(error.detail), headers=error.headers or {})
        case ClientDisconnect():
            return Failure(499, "invalid_request_error", "the client went away")
        case _:
            incident = f"err_{secrets.token_hex(8)}"
            logger.error("internal error %s", incident, exc_info=error)
            return Failure(500, "server_error", f"internal error; the server's log has it under {incident}", code=incident)


def _invalid_fields(error: ValidationError) -> Failure:
    """pydantic's list of errors as one sentence; `param` is the first one's path as the client wrote it. Strict types and no unions
    in the wire models keep it to one problem a field."""
    problems = [(param_path(item["loc"]), item["msg"].removeprefix("Value error, ")) for item in error.errors(include_url=False)]
    shown = "; ".join(f"{path}: {message}" if path else message for path, message in problems[:3])
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return Failure(400, "invalid_request_error", shown + more, problems[0][0] or None)


def param_path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def openai_error(failure: Failure) -> dict[str, Any]:
    return {"error": {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}}


def anthropic_error(failure: Failure) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(failure.status, "api_error" if failure.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
