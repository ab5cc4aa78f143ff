"""In which order messages are rendered, and which call each tool result answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chat.messages import Call, read_calls, read_name
from chat.types import ChatError


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str | None]]:
    """(index, matched tool name) of each message in rendering order.

    A run of consecutive results is put into the order of the calls, and takes their names, when every result of the run has the id of
    a call of the most recent assistant message; otherwise the run stays as it is, unmatched.
    """
    calls: dict[str, tuple[int, Call]] = {}
    run: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            run.append(i)
            continue
        yield from _ordered(run, messages, calls)
        run = []
        yield i, None
        if message["role"] == "assistant":
            calls = {}
            for position, call in enumerate(read_calls(message, f"messages[{i}]")):
                if call.id is not None:
                    calls.setdefault(call.id, (position, call))
    yield from _ordered(run, messages, calls)


def result_id(message: Mapping[str, Any], path: str) -> str:
    """`tool_call_id`, or `id` where that is absent; "" for none."""
    return read_name(message, "tool_call_id", path) or read_name(message, "id", path)


def result_name(message: Mapping[str, Any], path: str, number: int, calls: Sequence[Call]) -> str:
    """The tool's name of an unmatched result: what the message says, else the name of the `number`-th call (from 1)."""
    name = read_name(message, "tool", path) or read_name(message, "name", path)
    if name:
        return name
    if number > len(calls):
        raise ChatError("no call that this tool result could answer: give it the tool_call_id or name of a call before it", path)
    return calls[number - 1].name


def _ordered(
    run: Sequence[int], messages: Sequence[Mapping[str, Any]], calls: Mapping[str, tuple[int, Call]]
) -> Iterator[tuple[int, str | None]]:
    ids = [result_id(messages[i], f"messages[{i}]") for i in run]
    if all(result in calls for result in ids):
        answered = sorted((calls[result][0], i, calls[result][1].name) for result, i in zip(ids, run, strict=True))
        yield from ((i, name) for _, i, name in answered)
    else:
        yield from ((i, None) for i in run)
