from __future__ import annotations

from typing import Any

import pytest

from chat.history import HistoryPolicy, HistoryState, Verdict, apply_policy, judge
from chat.types import ChatError

USER = {"role": "user", "content": "q"}


def turn(content: str = "a", reasoning: str | None = "r", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **more}


def calls(arguments: str, id: str) -> list[dict[str, Any]]:
    return [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}]


def test_nothing_to_judge() -> None:
    assert judge([USER]) == Verdict()
    assert judge([USER, turn(reasoning=None, partial=True)]) == Verdict()


@pytest.mark.parametrize("reasoning", ["r", "", " \n"])
def test_a_field_that_came_back_is_complete(reasoning: str) -> None:
    assert judge([USER, turn(reasoning=reasoning), USER]).state is HistoryState.COMPLETE


def test_the_alias_counts() -> None:
    assert judge([USER, {"role": "assistant", "content": "a", "reasoning": "r"}]).state is HistoryState.COMPLETE


def test_missing_names_the_first_turn_and_lists_all() -> None:
    messages = [USER, turn(), USER, turn(reasoning=None), USER, {"role": "assistant", "content": "x"}]
    assert judge(messages) == Verdict(HistoryState.MISSING, turn=2, message=3, missing=(3, 5))


def test_against_the_servers_own_turns() -> None:
    own = [turn(), turn(reasoning="long"), turn(reasoning="")]
    assert judge([USER, *own], own).state is HistoryState.COMPLETE
    assert judge([turn(), turn(reasoning="longer"), turn(reasoning="")], own) == Verdict(HistoryState.ALTERED, 2, 1, altered=(1,))
    assert judge([turn(reasoning=""), turn(reasoning="longer")], own) == Verdict(HistoryState.MISSING, 1, 0, (0,), (1,))
    assert judge([turn(), turn(reasoning="long"), turn(reasoning=None)], own).state is HistoryState.COMPLETE


def test_after_an_edit_only_presence_can_be_judged() -> None:
    own = [turn("a", "r1"), turn("b", "r2")]
    assert judge([turn("edited", "mine"), turn("b", "other")], own).state is HistoryState.COMPLETE
    assert judge([turn("edited", None), turn("b", "other")], own) == Verdict(HistoryState.MISSING, 1, 0, missing=(0,))


def test_repair_restores_the_servers_reasoning_and_keeps_the_rest() -> None:
    own = [turn("", "r1", tool_calls=calls('{"a": 1, "b": 2}', "mine")), turn("b", "r2")]
    client: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls('{"b":2,"a":1}', "theirs")},
        {"role": "tool", "tool_call_id": "theirs", "content": "x"},
        {"role": "assistant", "content": "b", "reasoning": "altered"},
    ]
    before = [dict(m) for m in client]
    repaired, verdict = apply_policy(HistoryPolicy.REPAIR, client, own)
    assert verdict == Verdict(HistoryState.MISSING, 1, 1, missing=(1,), altered=(3,))
    assert client == before
    assert repaired[1] == {**client[1], "reasoning_content": "r1"}
    assert repaired[3] == {"role": "assistant", "content": "b", "reasoning_content": "r2"}
    assert judge(repaired, own).state is HistoryState.COMPLETE


def test_repair_leaves_an_edited_turn_to_the_client() -> None:
    messages = [turn("edited", None)]
    repaired, verdict = apply_policy(HistoryPolicy.REPAIR, messages, [turn("a", "r")])
    assert list(repaired) == messages
    assert verdict.state is HistoryState.MISSING


def test_accept_renders_what_came() -> None:
    messages = [turn(reasoning=None)]
    assert apply_policy(HistoryPolicy.ACCEPT, messages, [turn()]) == (messages, Verdict(HistoryState.MISSING, 1, 0, missing=(0,)))


def test_reject_names_the_turn() -> None:
    assert apply_policy(HistoryPolicy.REJECT, [turn()], [turn()])[1].state is HistoryState.COMPLETE
    with pytest.raises(ChatError, match="turn 1 is missing") as error:
        apply_policy(HistoryPolicy.REJECT, [USER, turn(reasoning=None)])
    assert error.value.param == "messages[1].reasoning_content"
