from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat.constraint import Constraint
from chat.grammar import constraint_for
from chat.matcher import Matcher, MatcherFactory
from chat.types import Channel, Conversation
from tests.chat.sampling import FACTORY, TINY, ids_of, random_reply
from tests.chat.test_parse import ids

USER = {"role": "user", "content": "q"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def matcher(opened: Channel = "think", **fields: object) -> Matcher:
    fields = fields or {"response_format": {"type": "json_object"}}
    constraint = constraint_for(Conversation(messages=[USER], **fields), opened)  # type: ignore[arg-type]
    assert constraint is not None
    return FACTORY.create(constraint.to_json())


def consume(m: Matcher, text: str) -> None:
    for i in ids(text):
        assert m.consume(i), text


def next_ids(m: Matcher) -> list[int]:
    mask = m.mask()
    assert mask is not None
    return ids_of(mask)


def test_thinking_is_free_but_cannot_end_the_turn() -> None:
    m = matcher()
    consume(m, 'any {"text" 你好 <|close|>')
    assert next_ids(m) == sorted([*range(TINY.base), TINY.open, TINY.close])
    for special in (TINY.sep, TINY.end_of_msg, TINY.eos, TINY.media_pad):
        assert not m.consume(special)


def test_the_grammar_begins_at_the_response_channel_however_it_is_reached() -> None:
    for left in ("because‹/think›‹response›", "because‹response›", "‹/think›‹response›"):
        m = matcher()
        consume(m, left)
        assert next_ids(m) == [i for i in range(TINY.base) if TINY.token_bytes(i) in (b"{", b'{"', b"{}")]
    assert matcher("response").consume(TINY.encode("{")[0])


def test_a_call_cannot_be_written_into_the_think_channel() -> None:
    m = matcher(tools=TOOLS, tool_choice="required")
    consume(m, "now‹/think›")
    m.rollback(len(ids("‹/think›")))
    assert TINY.encode("x")[0] in next_ids(m)
    m.consume(TINY.open)
    words = {TINY.decode([i]) for i in next_ids(m)}
    assert all("response".startswith(w) or "tools".startswith(w) for w in words)


def test_the_turn_is_ended_by_force() -> None:
    m = matcher()
    consume(m, "‹/think›‹response›{}")
    for token_id in ids("‹/response›‹/message›«end_of_msg»"):
        assert next_ids(m) == [token_id]
        assert m.consume(token_id)
    assert m.mask() is None
    assert m.consume(TINY.open)


def test_an_id_that_is_not_allowed_changes_nothing() -> None:
    m = matcher("response")
    assert not m.consume(TINY.encode("x")[0])
    assert not m.consume(TINY.end_of_msg)
    assert m.error is None
    consume(m, "{}‹/response›")


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.data())
def test_ids_that_were_taken_back_never_happened(seed: int, data: st.DataObject) -> None:
    m = matcher(tools=TOOLS, tool_choice="required")
    reply = [*random_reply(m, seed, thinking=3), TINY.open, TINY.sep]
    for token_id in reply[-2:]:
        m.consume(token_id)
    back = data.draw(st.integers(0, len(reply)))
    m.rollback(back)
    fresh = matcher(tools=TOOLS, tool_choice="required")
    for token_id in reply[: len(reply) - back]:
        assert fresh.consume(token_id)
    for token_id in reply[len(reply) - back :]:
        mine, other = m.mask(), fresh.mask()
        assert (mine is None and other is None) or np.array_equal(mine, other)
        assert m.consume(token_id)
        assert fresh.consume(token_id)


def test_no_more_is_taken_back_than_was_consumed() -> None:
    m = matcher()
    consume(m, "ab")
    with pytest.raises(ValueError, match="cannot take back"):
        m.rollback(len(ids("ab")) + 1)


def test_matchers_of_one_grammar_are_independent() -> None:
    a, b = matcher("response"), matcher("response")
    consume(a, '{"a":1')
    assert b.consume(TINY.encode("{")[0])
    consume(a, "}‹/response›")


def test_a_grammar_that_fails_ends_the_turn_and_says_why() -> None:
    m = FACTORY.create(Constraint("start: oops(", "now").to_json())
    assert m.error is not None
    assert next_ids(m) == [TINY.end_of_msg]
    assert not m.consume(TINY.open)
    assert m.consume(TINY.end_of_msg)
    assert m.mask() is None


def test_wider_logits_than_the_vocabulary() -> None:
    factory = MatcherFactory(TINY, vocab_size=1100)
    constraint = constraint_for(Conversation(messages=[USER], response_format={"type": "json_object"}), "think")
    assert constraint is not None
    m = factory.create(constraint.to_json())
    mask = m.mask()
    assert mask is not None
    assert mask.shape == (35,)
    m.consume(TINY.close)
    assert max(next_ids(m)) < TINY.vocab_size
