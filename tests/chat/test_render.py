from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat.cases import read_conversation
from chat.image_grid import image_grid
from chat.render import render
from chat.reply import Reply, parse
from chat.tokenizer import Tokenizer
from chat.types import ChatError, Conversation, ImageSize, Prompt, Segment
from tests.chat.conftest import goldens

TINY = Tokenizer.tiny()
CASES = goldens("render")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(name: str = "f", arguments: Any = "{}", id: str | None = "c") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def visible(prompt: Prompt) -> str:
    """The text with `‹`, `‹/` and `›` for the control tokens."""
    short = {"<|open|>": "‹", "<|close|>": "‹/", "<|sep|>": "›", "<|end_of_msg|>": "⏹"}
    return "".join(short.get(s.text, s.text) if s.control else s.text for s in prompt.segments)


def show(messages: list[dict[str, Any]], **options: Any) -> str:
    return visible(render(Conversation(messages=messages, effort=None, generation_prompt=False, **options), TINY))


@pytest.mark.parametrize("case", CASES)
def test_golden(case: dict[str, Any]) -> None:
    before = copy.deepcopy(case)
    prompt = render(read_conversation(case), TINY)
    assert [[s.control, s.text] for s in prompt.segments] == case["segments"]
    assert list(prompt.ids) == case["ids_tiny"]
    assert case == before


@pytest.mark.parametrize("case", CASES)
def test_golden_in_the_published_vocabulary(case: dict[str, Any], published: Tokenizer) -> None:
    assert list(render(read_conversation(case), published).ids) == case["ids_real"]


def test_every_segment_is_encoded_by_itself() -> None:
    prompt = render(Conversation(messages=[user("<|open|>"), user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]), TINY)
    ids = [i for s in prompt.segments for i in (TINY.encode_control if s.control else TINY.encode)(s.text)]
    assert ids == list(prompt.ids)


TEXT = st.one_of(st.text(), st.sampled_from([*TINY.special_ids, "<|kimi_image_placeholder|>"]), st.text(alphabet="<|open>closep_"))


@given(TEXT, TEXT, TEXT, TEXT)
def test_no_text_of_a_client_becomes_a_control_token(a: str, b: str, c: str, d: str) -> None:
    def special(*texts: str) -> list[int]:
        w, x, y, z = texts
        messages = [
            {"role": "system", "content": w, "name": x},
            user([{"type": "text", "text": y}]),
            {
                "role": "assistant",
                "content": z,
                "reasoning_content": w + "r",
                "tool_calls": [call("f" + x, {"k" + y: z, "n": [w]}), call("g", "not JSON " + x, None)],
            },
            {"role": "tool", "tool": "t" + x, "content": y},
        ]
        tool = {"type": "function", "function": {"name": "f" + z, "description": w}}
        form = {"type": "json_schema", "json_schema": {"name": x, "schema": {"title": y}}}
        prompt = render(Conversation(messages=messages, tools=[tool], tool_choice="required", response_format=form), TINY)
        return [i for i in prompt.ids if i >= TINY.base]

    assert special(a, b, c, d) == special("x", "x", "x", "x")


@pytest.mark.parametrize("case", [c for c in goldens("parse") if c.values[0].get("roundtrip_exact")])
def test_a_published_reply_is_the_prefix_of_the_next_prompt(case: dict[str, Any]) -> None:
    thinking, expected = case["request"]["thinking"], case["expected"]
    calls = [call(c["name"], json.dumps(c["arguments"]), str(i)) for i, c in enumerate(expected["tool_calls"])]
    answer = {"role": "assistant", "content": expected["content"], "reasoning_content": expected["reasoning"], "tool_calls": calls}
    prompt = render(Conversation(messages=[user("q")], thinking=thinking), TINY)
    later = render(Conversation(messages=[user("q"), answer, user("next")], thinking=thinking), TINY)
    assert later.ids[: later.starts[2]] == (*prompt.ids, *case["ids_tiny"], TINY.end_of_msg)


def test_half_a_surrogate_pair_is_no_crash() -> None:
    assert render(Conversation(messages=[user("a\ud800b")]), TINY).ids == render(Conversation(messages=[user("a\ufffdb")]), TINY).ids


def test_starts_are_where_each_message_begins() -> None:
    messages = [
        user("q"),
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call("f", id="1"), call("g", id="2")]},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
        {"role": "system", "content": "s"},
    ]
    whole = render(Conversation(messages=messages, tools=[TOOL], tool_choice="none"), TINY)
    for count in (0, 1, 4):
        part = render(Conversation(messages=messages[:count], tools=[TOOL], generation_prompt=False), TINY)
        assert whole.ids[: whole.starts[count]] == part.ids
    assert whole.starts[3] < whole.starts[2] < whole.starts[4] < whole.starts[5]
    assert whole.boundaries == (whole.starts[5],)


def test_tail_segments_vanish_from_the_next_turn_behind_the_boundary() -> None:
    form = {"type": "json_object"}
    first = render(Conversation(messages=[user("q")], tools=[TOOL], tool_choice="required", response_format=form), TINY)
    (boundary,) = first.boundaries
    free = render(Conversation(messages=[user("q")], tools=[TOOL]), TINY)
    assert free.boundaries == ()
    assert first.ids[:boundary] == free.ids[:boundary]
    assert first.ids[boundary:] != free.ids[boundary:]


ARGUMENTS = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.one_of(st.text(max_size=9), st.integers(), st.booleans(), st.none(), st.lists(st.text(max_size=3), max_size=3)),
    max_size=3,
)


@given(st.text(), st.text(), st.lists(ARGUMENTS, max_size=2), st.booleans(), st.booleans())
def test_a_reply_is_the_prefix_of_the_next_prompt(
    reasoning: str, content: str, calls: list[dict[str, Any]], thinking: bool, tail: bool
) -> None:
    """Prompt + canonical reply + end = how the next turn renders both, up to the boundary; and parsing gives the message back."""
    question = [user("q")]
    answer = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning if reasoning.strip() else "",
        "tool_calls": [call("f", arguments, str(i)) for i, arguments in enumerate(calls)],
    }
    choice = "required" if tail else "auto"
    prompt = render(Conversation(messages=question, tools=[TOOL], tool_choice=choice, thinking=thinking), TINY)
    later = render(Conversation(messages=[*question, answer, user("next")], tools=[TOOL], thinking=thinking), TINY)
    open_turn = render(Conversation(messages=question, tools=[TOOL], thinking=thinking), TINY).ids
    assert later.ids[: len(open_turn)] == open_turn
    if not tail:
        assert prompt.ids == open_turn
    reply = later.ids[len(open_turn) : later.starts[2]]
    parsed = parse(reply, TINY, opened=prompt.opened)
    assert parsed.reasoning == (answer["reasoning_content"] if thinking else "")
    assert parsed.content == content
    back = {"role": "assistant", "content": parsed.content, "reasoning_content": answer["reasoning_content"]}
    back["tool_calls"] = [call(c.name, c.arguments, str(i)) for i, c in enumerate(parsed.tool_calls)]
    again = render(Conversation(messages=[*question, back, user("next")], tools=[TOOL], thinking=thinking), TINY)
    assert again.ids == later.ids


def test_a_developer_is_a_system_message() -> None:
    assert show([{"role": "developer", "content": "be brief"}]) == '‹message role="system"›be brief‹/message›⏹'


def test_results_of_an_incomplete_run_keep_their_running_number() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("f", id="1"), call("g", id="2")]},
        {"role": "tool", "tool_call_id": "2", "content": "x"},
    ]
    assert show(messages).endswith('‹message role="tool" tool="g" index="1"›x‹/message›⏹')


def test_a_run_with_an_unknown_id_stays_as_it_is() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("f", id="1"), call("g", id="2")]},
        {"role": "tool", "tool_call_id": "2", "content": "x", "name": "mine"},
        {"role": "tool", "tool_call_id": "?", "content": "y"},
        user("between"),
        {"role": "tool", "tool_call_id": "1", "content": "z"},
    ]
    text = show(messages)
    assert '‹message role="tool" tool="mine" index="1"›x' in text
    assert '‹message role="tool" tool="g" index="2"›y' in text
    assert '‹message role="tool" tool="f" index="3"›z' in text


def test_of_two_calls_with_one_id_the_first_gets_both_results() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("f"), call("g")]},
        *({"role": "tool", "tool_call_id": "c", "content": c} for c in "xy"),
    ]
    assert show(messages).endswith('tool="f" index="1"›x‹/message›⏹‹message role="tool" tool="f" index="2"›y‹/message›⏹')


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("  ", ""),
        ('{"x": 1.50}', '‹argument key="x" type="number"›1.5‹/argument›'),
        ('{"a":1,"a":"b"}', '‹argument key="a" type="string"›b‹/argument›'),
        ({"k": {"é": [1, True]}}, '‹argument key="k" type="object"›{"é": [1, true]}‹/argument›'),
        ("[" * 100_000, '‹json type="object"›' + "[" * 100_000 + "‹/json›"),
    ],
)
def test_arguments(arguments: Any, shown: str) -> None:
    text = show([{"role": "assistant", "tool_calls": [call("f", arguments)]}], thinking=False)
    assert f'‹call tool="f" index="1"›{shown}‹/call›' in text


@pytest.mark.parametrize(
    ("message", "thinking", "shown", "opened"),
    [
        ({"content": "c"}, True, "‹response›c", "response"),
        ({"content": "c", "reasoning_content": "r"}, True, "‹think›r‹/think›‹response›c", "response"),
        ({"reasoning_content": "r", "content": None}, True, "‹think›r", "think"),
        ({"content": ""}, True, "‹think›", "think"),
        ({"content": "c", "reasoning_content": "r"}, False, "‹response›c", "response"),
        ({"content": ""}, False, "‹response›", "response"),
    ],
)
def test_prefill(message: dict[str, Any], thinking: bool, shown: str, opened: str) -> None:
    messages = [user("q"), {"role": "assistant", "partial": True, **message}]
    prompt = render(Conversation(messages=messages, thinking=thinking, effort=None, response_format={"type": "json_object"}), TINY)
    assert visible(prompt).endswith('formatting.‹/message›⏹‹message role="assistant"›' + shown)
    assert prompt.opened == opened
    assert prompt.boundaries == (prompt.starts[2],)


def test_a_prefill_that_is_continued_parses_as_the_continuation_alone() -> None:
    messages = [user("q"), {"role": "assistant", "partial": True, "content": "so "}]
    prompt = render(Conversation(messages=messages), TINY)
    assert parse(TINY.encode("far"), TINY, opened=prompt.opened) == Reply("", "far", ())


def test_images_keep_their_place() -> None:
    content = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "<|media_pad|>"}, {"type": "image_url", "image_url": {}}]
    sizes = {(1, 0): image_grid(100, 50).size, (1, 2): ImageSize(28, 28, 1)}
    prompt = render(Conversation(messages=[user("hi"), user(content)], images=sizes), TINY)
    assert [(i.message, i.part, i.pads, i.width, i.height) for i in prompt.images] == [(1, 0, 8, 100, 50), (1, 2, 1, 28, 28)]
    pads = [i for i, token in enumerate(prompt.ids) if token == TINY.media_pad]
    assert pads == [p for image in prompt.images for p in range(image.start, image.start + image.pads)]
    assert Segment(text="<|media_pad|>") in prompt.segments


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "critic"}], "messages[0].role"),
        ([{"role": ["user"]}], "messages[0].role"),
        ([user(3)], "messages[0].content"),
        ([user(["x"])], "messages[0].content[0]"),
        ([user([{"type": "video_url"}])], "messages[0].content[0]"),
        ([user([{"type": "text", "text": 3}])], "messages[0].content[0]"),
        ([user([{"type": "image_url", "image_url": {"url": "data:"}}])], "messages[0].content[0]"),
        ([{"role": "user", "name": 3}], "messages[0].name"),
        ([{"role": "assistant", "reasoning_content": 3}], "messages[0].reasoning_content"),
        ([{"role": "assistant", "tool_calls": {}}, {"role": "assistant", "tool_calls": "x"}], "messages[1].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [call("")]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [call("f", "[1]")]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [call("f", 3)]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [call("f", {"a": DEEP})]}], "messages"),
        ([user("q"), {"role": "tool", "tool_call_id": "x", "content": "y"}], "messages[1]"),
    ],
)
def test_what_cannot_be_rendered_is_named(messages: Any, param: str) -> None:
    with pytest.raises(ChatError) as error:
        render(Conversation(messages=messages), TINY)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ("json", "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": []}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}}, "response_format.json_schema.strict"),
    ],
)
def test_a_bad_response_format_is_named(form: Any, param: str) -> None:
    with pytest.raises(ChatError) as error:
        render(Conversation(messages=[user("q")], response_format=form), TINY)
    assert error.value.param == param


def test_an_unknown_effort_is_named() -> None:
    with pytest.raises(ChatError, match="medium") as error:
        render(Conversation(messages=[user("q")], effort="medium"), TINY)
    assert error.value.param == "thinking.effort"
