from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.parse import OutputParser
from chat.reply import Reply, ToolCall, collect, parse
from chat.tokenizer import Tokenizer
from chat.types import Channel, ChatDelta, ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from tests.chat.conftest import goldens

TINY = Tokenizer.tiny()
CASES = goldens("parse")


def chunks(ids: list[int], chunking: str) -> Iterator[list[int]]:
    """Groupings by token; `char:` ones group the text and are for parsers of text, so here they are by token as well."""
    kind, _, number = chunking.partition(":")
    rng = random.Random(number)
    at = 0
    while at < len(ids):
        size = {"all": len(ids), "random": rng.randint(1, 9)}.get(kind) or int(number)
        yield ids[at : at + size]
        at += size


def run(groups: list[list[int]], *, opened: Channel = "think", tools: bool = True) -> list[ChatDelta]:
    parser = OutputParser(TINY, opened=opened, tools=tools)
    deltas = [delta for group in groups for delta in parser.push(group)]
    return deltas + parser.finish()


def joined(deltas: list[ChatDelta]) -> list[ChatDelta]:
    """The deltas of all groups as one push would give them."""
    out: list[ChatDelta] = []
    for delta in deltas:
        match out[-1:], delta:
            case [ReasoningDelta(a)], ReasoningDelta(b):
                out[-1] = ReasoningDelta(a + b)
            case [ContentDelta(a)], ContentDelta(b):
                out[-1] = ContentDelta(a + b)
            case [ToolCallArguments(i, a)], ToolCallArguments(j, b) if i == j:
                out[-1] = ToolCallArguments(i, a + b)
            case _:
                out.append(delta)
    return out


CONTROL = re.compile("[‹«].*?[›»]")


def ids(text: str, tokenizer: Tokenizer = TINY) -> list[int]:
    """`‹tag›` and `‹/tag›` are tags, `«open»` and the like single control tokens, everything else ordinary text."""
    out: list[int] = []
    at = 0
    for match in CONTROL.finditer(text):
        out += tokenizer.encode(text[at : match.start()])
        word = match.group()[1:-1]
        if match.group().startswith("«"):
            out.append(getattr(tokenizer, word))
        else:
            out.append(tokenizer.close if word.startswith("/") else tokenizer.open)
            out += [*tokenizer.encode(word.removeprefix("/")), tokenizer.sep]
        at = match.end()
    return out + tokenizer.encode(text[at:])


def check(case: dict[str, Any], key: str, tokenizer: Tokenizer) -> None:
    request, expected = case["request"], case["expected"]
    tools = request["tools_enabled"] and request["tool_choice"] != "none"
    seen = []
    for chunking in case["chunkings"]:
        parser = OutputParser(tokenizer, opened=request["generation_prefix"], tools=tools)
        deltas = [d for group in chunks(case[key], chunking) for d in parser.push(group)] + parser.finish()
        reply = collect(deltas)
        assert reply.reasoning == (expected["reasoning"] or "")
        assert reply.content == (expected["content"] or "")
        calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in reply.tool_calls]
        assert calls == expected["tool_calls"]
        assert parser.calls == len(calls)
        if partial := expected["partial_tool_call"]:
            unfinished = [d for d in deltas if getattr(d, "index", -1) == len(calls)]
            assert unfinished[0] == ToolCallStart(len(calls), partial["name"])
            assert "".join(d.fragment for d in unfinished if isinstance(d, ToolCallArguments)) == partial["arguments_so_far"]
        seen.append(joined(deltas))
    assert all(deltas == seen[0] for deltas in seen)


@pytest.mark.parametrize("case", CASES)
def test_golden(case: dict[str, Any]) -> None:
    check(case, "ids_tiny", TINY)


@pytest.mark.parametrize("case", CASES)
def test_golden_in_the_published_vocabulary(case: dict[str, Any], published: Tokenizer) -> None:
    check(case, "ids_real", published)


CALL = '‹call tool="f" index="1"›'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # no separator after the tag word, directly followed by the next tag
        ("r«close»think‹response›c‹/response›", Reply("r", "c", ())),
        ("r‹/response›‹tools›" + CALL + "‹/call›‹/tools›", Reply("r", "", (ToolCall("f", "{}"),))),
        ("r‹/message›late", Reply("r", "", ())),
        ("r«end_of_msg»late", Reply("r", "", ())),
        ("‹think›‹think›r‹/think›x‹response›c‹/response›y", Reply("r", "c", ())),
        ("r‹/think›‹response›c‹think›hidden‹/think›‹/response›", Reply("r", "c", ())),
        ('r‹/think›‹response›c‹call tool="f" index="1"›hidden', Reply("r", "c", ())),
        ('r‹/think›‹response›c‹message role="user"›next', Reply("r", "c", ())),
        ("r‹odd›s‹/odd›t‹/think›‹response›‹b›c", Reply("rst", "c", ())),
        ("r«sep»s«media_pad»t", Reply("rst", "", ())),
        ("r‹/think›‹tools›a" + CALL + "b‹/call›c‹/tools›d", Reply("r", "", (ToolCall("f", "{}"),))),
        # a call, argument or value that the next tag closes
        (
            "‹tools›" + CALL + '‹argument key="a" type="number"›1‹argument key="b" type="string"›x‹/call›‹call index="2" tool="g"›‹/tools›',
            Reply("", "", (ToolCall("f", '{"a": 1, "b": "x"}'), ToolCall("g", "{}"))),
        ),
        # the message ends inside a call
        ("‹tools›" + CALL + '‹argument key="a" type="string"›x‹/argument›«end_of_msg»', Reply("", "", ())),
        # a call without a name, and an argument without a key
        ('‹tools›‹call index="1"›‹argument key="a"›x‹/argument›‹/call›‹/tools›', Reply("", "", ())),
        ("‹tools›" + CALL + '‹argument type="string"›x‹/argument›‹/call›', Reply("", "", (ToolCall("f", "{}"),))),
        # the type is a string unless it is said, any other is JSON; what is not strict JSON stays a string
        ("‹tools›" + CALL + '‹argument key="a"›1‹/argument›‹/call›', Reply("", "", (ToolCall("f", '{"a": "1"}'),))),
        ("‹tools›" + CALL + '‹argument key="a" type="x"› [1] ‹/argument›‹/call›', Reply("", "", (ToolCall("f", '{"a": [1]}'),))),
        ("‹tools›" + CALL + '‹argument key="a" type="number"›NaN‹/argument›‹/call›', Reply("", "", (ToolCall("f", '{"a": "NaN"}'),))),
        (
            "‹tools›" + CALL + '‹argument key="a" type="array"›' + "[" * 5000 + "‹/argument›‹/call›",
            Reply("", "", (ToolCall("f", '{"a": "' + "[" * 5000 + '"}'),)),
        ),
        # the raw object
        ("‹tools›" + CALL + '‹json type="object"›{"a": [1,2]}‹/json›‹/call›', Reply("", "", (ToolCall("f", '{"a": [1,2]}'),))),
        ("‹tools›" + CALL + '‹json type="object"›[1]‹/json›‹/call›', Reply("", "", (ToolCall("f", "{}"),))),
        ("‹tools›" + CALL + '‹json type="object"›{"a": ‹/json›‹/call›', Reply("", "", (ToolCall("f", "{}"),))),
        (
            "‹tools›" + CALL + '‹json›{"a":1}‹/json›‹argument key="b"›x‹/argument›‹json›{}‹/json›‹/call›',
            Reply("", "", (ToolCall("f", '{"a":1}'),)),
        ),
        ("‹tools›" + CALL + '‹argument key="b"›x‹/argument›‹json›{}‹/json›‹/call›', Reply("", "", (ToolCall("f", '{"b": "x"}'),))),
        # after the tools nothing counts
        ("‹tools›" + CALL + "‹/call›‹/tools›‹response›late", Reply("", "", (ToolCall("f", "{}"),))),
    ],
)
def test_deviation(text: str, expected: Reply) -> None:
    assert parse(ids(text), TINY, opened="think") == expected
    assert collect(run([[i] for i in ids(text)])) == expected


def test_of_equal_keys_the_last_one_wins() -> None:
    text = "‹tools›" + CALL + '‹argument key="a"›x‹/argument›‹argument key="a" type="number"›2‹/argument›‹/call›'
    assert json.loads(parse(ids(text), TINY, opened="think").tool_calls[0].arguments) == {"a": 2}


def test_a_long_string_argument_streams() -> None:
    groups = [[i] for i in ids("‹tools›" + CALL + '‹argument key="a" type="string"›one "two" three‹/argument›‹/call›')]
    fragments = [d.fragment for d in run(groups) if isinstance(d, ToolCallArguments)]
    assert len(fragments) > 5
    assert "".join(fragments) == '{"a": "one \\"two\\" three"}'


def test_without_tools_a_call_is_never_shown() -> None:
    assert run([ids("r‹/think›‹tools›" + CALL + "‹/call›‹/tools›")], tools=False) == [ReasoningDelta("r")]


def test_reasoning_tokens_are_the_ids_of_its_text() -> None:
    parser = OutputParser(TINY, opened="think")
    reasoning = TINY.encode("because 🫠 so")
    parser.push(reasoning[:2])
    assert parser.reasoning_tokens == 2
    parser.push([*reasoning[2:], *ids("‹/think›‹response›answer")])
    assert parser.reasoning_tokens == len(reasoning)


def test_one_push_can_hold_several_kinds() -> None:
    deltas = run([ids("r‹/think›‹response›c‹/response›‹tools›" + CALL + "‹/call›‹/tools›‹/message›«end_of_msg»")])
    assert deltas == [ReasoningDelta("r"), ContentDelta("c"), ToolCallStart(0, "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0)]


WORDS = [
    TINY.encode(w) for w in ("think", "response", "tools", "call", "argument", "json", "message", ' tool="f"', ' key="k"', ' type="number"')
]
PIECES = st.one_of(
    st.integers(0, TINY.vocab_size - 1).map(lambda i: [i]),
    st.sampled_from([[TINY.open], [TINY.close], [TINY.sep], *WORDS]),
    st.builds(lambda kind, word: [kind, *word, TINY.sep], st.sampled_from([TINY.open, TINY.close]), st.sampled_from(WORDS)),
)
REPLIES = st.lists(PIECES, max_size=60).map(lambda pieces: [i for piece in pieces for i in piece])


@given(REPLIES, st.sampled_from(["think", "response"]), st.booleans(), st.data())
def test_any_ids_in_any_grouping(reply: list[int], opened: Channel, tools: bool, data: st.DataObject) -> None:
    """Never raises, shows no special token, and groups do not matter; ended calls are strict JSON objects."""
    groups = []
    rest = reply
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        groups.append(rest[:size])
        rest = rest[size:]
    whole = run([reply], opened=opened, tools=tools)
    assert joined(run(groups, opened=opened, tools=tools)) == whole
    assert joined(run([[i] for i in reply], opened=opened, tools=tools)) == whole
    result = collect(whole)
    for call in result.tool_calls:
        assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
    starts = [d.index for d in whole if isinstance(d, ToolCallStart)]
    assert starts == list(range(len(starts)))
    if not tools:
        assert not starts
