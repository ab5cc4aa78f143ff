from __future__ import annotations

from typing import Any

import pytest

from chat.options import read_options
from chat.types import ChatError
from tests.chat.conftest import goldens


@pytest.mark.parametrize("case", goldens("options"))
def test_golden(case: dict[str, Any]) -> None:
    if "error" in case["expected"]:
        with pytest.raises(ChatError) as error:
            read_options(case["request_fields"])
        assert error.value.param in ("reasoning_effort", "thinking.type")
    else:
        options = read_options(case["request_fields"])
        assert {"thinking": options.thinking, "effort": options.effort} == case["expected"]


@pytest.mark.parametrize(
    ("request_fields", "thinking", "effort"),
    [
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True, "max"),
        ({"thinking": {"effort": "none"}}, False, None),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, False, None),
        ({"thinking": None, "reasoning_effort": None, "chat_template_kwargs": None}, True, "max"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking_effort": "high"}}, True, "low"),
    ],
)
def test_precedence(request_fields: dict[str, Any], thinking: bool, effort: str | None) -> None:
    options = read_options(request_fields)
    assert (options.thinking, options.effort) == (thinking, effort)


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"thinking": True}, "thinking"),
        ({"thinking": {"effort": 3}}, "thinking.effort"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"thinking_effort": "much"}}, "chat_template_kwargs.thinking_effort"),
    ],
)
def test_the_offending_field_is_named(request_fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ChatError) as error:
        read_options(request_fields)
    assert error.value.param == param
