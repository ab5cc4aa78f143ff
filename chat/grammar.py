"""What a reply must look like → a constraint that travels with the request to the rank that samples (`chat.matcher` enforces it there).

The grammar begins where the think channel is left, whatever way, and covers the rest of the turn: `‹response›`, the answer, the tools
channel, `‹/message›`, the end. So thinking stays free, a call cannot be written into it, and a reply always ends.
"""

from __future__ import annotations

from llguidance import LLMatcher

from chat.constraint import Constraint
from chat.lark import COMPACT, Lark, close, json_value
from chat.matcher import MatcherFactory
from chat.messages import is_prefill, read_text
from chat.response_format import ResponseFormat, read_response_format
from chat.schema import check_schema
from chat.tokenizer import Tokenizer
from chat.tool_grammar import tools_channel
from chat.tools import Tool, ToolChoice, read_tool_choice, read_tools
from chat.types import Channel, ChatError, Conversation

_SCHEMA_PATH = "response_format.json_schema.schema"


def constraint_for(conversation: Conversation, opened: Channel, *, parallel_tool_calls: bool = True) -> Constraint | None:
    """What `response_format`, `tool_choice` and strict tools demand of the reply; None = nothing.

    `opened` is the prompt's open channel. Raises `ChatError` with the keyword of a schema that is unsatisfiable or unsupported.
    """
    form = read_response_format(conversation.response_format)
    tools = read_tools(conversation)
    choice = read_tool_choice(conversation.tool_choice, tools)
    callable_tools = _callable(tools, choice)
    forced = choice.mode == "required"
    free = form.kind == "text" and not forced and not any(tool.strict for tool in callable_tools)
    if free and (parallel_tool_calls or not callable_tools):
        return None
    lark = Lark()
    content = _content(lark, form)
    channel = ""
    if callable_tools:
        several = parallel_tool_calls and choice.name is None
        channel = tools_channel(lark, callable_tools, forced=forced, several=several)
    answer = _answer(content, channel, forced=forced, json=form.kind != "text")
    if opened == "response":
        prefix = "" if form.kind == "text" else _begun(conversation)
        constraint = Constraint(lark.grammar(answer), "now", prefix)
    else:
        channels = f'<|open|> "response" <|sep|> {lark.rule(answer)}'
        if channel:
            channels += f" | {channel} {close('message')}"
        # The channel's close tag may be missing: opening the next one implies it.
        constraint = Constraint(lark.grammar(f"({close('think')})? ({channels})"), "think_left")
    _check(constraint, conversation)
    return constraint


def _answer(content: str, tools: str, *, forced: bool, json: bool) -> str:
    """The turn from inside the response channel. A call may stand in for an answer in JSON. `tools` is the channel's rule, "" = none."""
    respond = close("response")
    if not tools:
        turn = f"{content} {respond}"
    elif forced:
        turn = f"{content}{'?' if json else ''} {respond} {tools}"
    elif json:
        turn = f"({content} {respond} {tools}? | {respond} {tools})"
    else:
        turn = f"{content} {respond} {tools}?"
    return f"{turn} {close('message')}"


def _callable(tools: list[Tool], choice: ToolChoice) -> list[Tool]:
    if choice.mode == "none":
        return []
    return [tool for tool in tools if choice.name in (None, tool.name)]


def _content(lark: Lark, form: ResponseFormat) -> str:
    if form.kind == "text":
        return lark.terminal("/(?s:.*)/")
    if form.kind == "json_object":
        return lark.rule(json_value({"type": "object"}, COMPACT))
    if not form.strict:  # the schema is advice then, but the answer is still JSON
        return lark.rule(json_value({}, COMPACT))
    assert form.schema is not None
    check_schema(form.schema, _SCHEMA_PATH)
    return lark.rule(json_value(form.schema, COMPACT))


def _begun(conversation: Conversation) -> str:
    """The answer's text in a message that the reply continues."""
    last = len(conversation.messages) - 1
    return read_text(conversation.messages[last], f"messages[{last}]") if is_prefill(conversation) else ""


def _check(constraint: Constraint, conversation: Conversation) -> None:
    if error := LLMatcher.validate_grammar(constraint.grammar):
        raise ChatError(f"this request's schemas cannot be enforced together: {error[:300]}")
    # A grammar speaks of text, so any vocabulary can tell whether a text begins it.
    if constraint.prefix and MatcherFactory(Tokenizer.tiny()).create(constraint.to_json()).error:
        raise ChatError(
            "the content to be continued does not begin a reply of the asked response_format",
            f"messages[{len(conversation.messages) - 1}].content",
        )
