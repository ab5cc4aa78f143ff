"""Did the client send K3's thinking back? And what to do when it did not.

K3 was trained with all earlier reasoning in its context. A client that drops it costs quality and the prefix cache, silently, so every
request gets a verdict. Where the server knows the turns itself (a session), its own messages are the truth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from chat.messages import read_calls, read_reasoning, read_text
from chat.types import ChatError

Message = Mapping[str, Any]


class HistoryPolicy(StrEnum):
    ACCEPT = "accept"  # render what came, as the reference does: an empty think channel where reasoning is missing
    REPAIR = "repair"  # put the server's own reasoning back where it knows the turn
    REJECT = "reject"  # refuse a history that is not complete


class HistoryState(StrEnum):
    COMPLETE = "complete"
    MISSING = "missing"
    ALTERED = "altered"


class HistoryRejected(ChatError):
    """The policy is `reject` and the thinking did not come back whole."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`state` and `turn` name the first fault: the assistant's turn from 1, and its message's index."""

    state: HistoryState = HistoryState.COMPLETE
    turn: int | None = None
    message: int | None = None
    missing: tuple[int, ...] = ()  # indices of all messages without their reasoning
    altered: tuple[int, ...] = ()  # … with another reasoning than the server's


def judge(messages: Sequence[Message], own: Sequence[Message] = ()) -> Verdict:
    """`own` are the assistant messages that the server produced, in order; () = it knows none.

    A turn is the server's own as long as content and calls agree with it; from the first that does not (an edit, a fork, a cut
    history) only presence can be judged. A turn without `own` is complete when a reasoning field is there, even an empty one: some
    replies have no reasoning.
    """
    missing: list[int] = []
    altered: list[int] = []
    turns = _turns(messages)
    known = _known(messages, turns, own)
    for i in turns:
        reasoning = read_reasoning(messages[i], f"messages[{i}]")
        if i in known:
            expected = read_reasoning(known[i], f"messages[{i}]")
            if reasoning != expected:
                (altered if reasoning else missing).append(i)
        elif messages[i].get("reasoning_content") is None and messages[i].get("reasoning") is None:
            missing.append(i)
    if not missing and not altered:
        return Verdict()
    first = min(missing + altered)
    state = HistoryState.MISSING if first in missing else HistoryState.ALTERED
    return Verdict(state, turns.index(first) + 1, first, tuple(missing), tuple(altered))


def apply_policy(policy: HistoryPolicy, messages: Sequence[Message], own: Sequence[Message] = ()) -> tuple[Sequence[Message], Verdict]:
    """The messages to render and the verdict on what the client sent. Nothing is changed in place.

    Only for thinking requests: without thinking no reasoning is rendered. Raises `HistoryRejected` where the policy is `reject`.
    """
    verdict = judge(messages, own)
    if verdict.state is HistoryState.COMPLETE or policy is HistoryPolicy.ACCEPT:
        return messages, verdict
    if policy is HistoryPolicy.REJECT:
        raise HistoryRejected(
            f"the reasoning of assistant turn {verdict.turn} is {verdict.state}: send every reply back with its reasoning_content",
            f"messages[{verdict.message}].reasoning_content",
        )
    known = _known(messages, _turns(messages), own)
    return [_with_reasoning(m, known[i]) if i in known else m for i, m in enumerate(messages)], verdict


def _turns(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant's finished turns; a message to be continued is not one."""
    return [i for i, m in enumerate(messages) if m.get("role") == "assistant" and m.get("partial") is not True]


def _known(messages: Sequence[Message], turns: Sequence[int], own: Sequence[Message]) -> dict[int, Message]:
    known: dict[int, Message] = {}
    for i, mine in zip(turns, own, strict=False):
        if _said(messages[i], f"messages[{i}]") != _said(mine, f"messages[{i}]"):
            break
        known[i] = mine
    return known


def _said(message: Message, path: str) -> tuple[str, list[tuple[str, str]]]:
    """What a turn said aloud: content and calls, without ids and without the spelling of arguments."""
    calls = read_calls(message, path)
    return read_text(message, path), [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in calls]


def _with_reasoning(message: Message, own: Message) -> Message:
    rest = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
    return {**rest, "reasoning_content": read_reasoning(own, "messages")}
