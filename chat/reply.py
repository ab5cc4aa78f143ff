"""A whole reply, collected from the same deltas that a stream sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chat.parse import OutputParser
from chat.tokenizer import Tokenizer
from chat.types import (
    Channel,
    ChatDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. `arguments` is the text of one strict JSON object. Ids are given by whoever answers the client."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def collect(deltas: Iterable[ChatDelta]) -> Reply:
    """Joins deltas; a call that did not end is dropped."""
    reasoning: list[str] = []
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    ended: list[int] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(index, name):
                names[index], arguments[index] = name, []
            case ToolCallArguments(index, fragment):
                arguments[index].append(fragment)
            case ToolCallEnd(index):
                ended.append(index)
    calls = tuple(ToolCall(names[i], "".join(arguments[i])) for i in ended)
    return Reply("".join(reasoning), "".join(content), calls)


def parse(ids: Sequence[int], tokenizer: Tokenizer, *, opened: Channel, tools: bool = True) -> Reply:
    """The reply that `ids` spell, when all of them are at hand."""
    parser = OutputParser(tokenizer, opened=opened, tools=tools)
    return collect([*parser.push(ids), *parser.finish()])
