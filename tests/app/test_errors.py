from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException

from app.errors import BodyTooLarge, Unauthorized, UnknownModel, anthropic_error, describe, openai_error, param_path
from chat.types import ChatError
from engine.errors import ContextExceeded, EngineFailure, InvalidRequest, QueueFull, ReplicaLost, ShardLost, Unsupported


@pytest.mark.parametrize(
    ("error", "status", "kind", "anthropic"),
    [
        (InvalidRequest("m", "p", "c"), 400, "invalid_request_error", "invalid_request_error"),
        (ContextExceeded("m"), 400, "invalid_request_error", "invalid_request_error"),
        (Unsupported("m"), 400, "invalid_request_error", "invalid_request_error"),
        (ChatError("m", "messages[0]"), 400, "invalid_request_error", "invalid_request_error"),
        (Unauthorized("m"), 401, "authentication_error", "authentication_error"),
        (UnknownModel("m"), 404, "invalid_request_error", "not_found_error"),
        (HTTPException(405, "m"), 405, "invalid_request_error", "invalid_request_error"),
        (BodyTooLarge("m"), 413, "invalid_request_error", "request_too_large"),
        (QueueFull("m"), 429, "rate_limit_error", "rate_limit_error"),
        (EngineFailure("m"), 503, "service_unavailable", "overloaded_error"),
        (ShardLost("m"), 503, "service_unavailable", "overloaded_error"),
        (ReplicaLost("m"), 503, "service_unavailable", "overloaded_error"),
        (RuntimeError("m"), 500, "server_error", "api_error"),
    ],
)
def test_the_table(error: Exception, status: int, kind: str, anthropic: str) -> None:
    failure = describe(error)
    assert (failure.status, failure.type) == (status, kind)
    assert openai_error(failure)["error"].keys() == {"message", "type", "param", "code"}
    assert anthropic_error(failure)["type"] == "error"
    assert anthropic_error(failure)["error"]["type"] == anthropic


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    assert describe(QueueFull("m", 0.1)).headers["retry-after"] == "1"
    assert describe(QueueFull("m", 4.2)).headers["retry-after"] == "5"


def test_many_wrong_fields_are_one_sentence() -> None:
    class Model(BaseModel):
        a: int
        b: list[int]
        c: int = Field(gt=0)
        d: int

    with pytest.raises(ValidationError) as caught:
        Model.model_validate({"a": "x", "b": [1, "y"], "c": 0})
    failure = describe(caught.value)
    assert failure.param == "a"
    assert failure.message.startswith("a: ")
    assert "b[1]: " in failure.message
    assert failure.message.endswith("(and 1 more)")


def test_paths_are_spelled_as_clients_write_them() -> None:
    assert param_path(("messages", 0, "content", 2, "text")) == "messages[0].content[2].text"
    assert param_path(("logit_bias", "7")) == "logit_bias.7"
    assert param_path(()) == ""
