"""One choice under whatever a model samples: grouping changes nothing, and the pieces keep the order that every dialect relies on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.choice import ChatChoice, Finish, Piece, ReasoningEnd, TextChoice, Update
from chat.reply import collect
from chat.types import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from engine.errors import EngineFailure
from engine.types import FinishReason, TokenChunk, TokenLogprob, Usage
from tests.app.edge import reply, tokenizer

T = tokenizer()
STRUCTURE = [T.open, T.close, T.sep, T.end_of_msg, T.eos]
WORDS = [
    T.encode(word) for word in ("think", "response", "tools", "call", "argument", "message", ' tool="f"', ' key="k"', "hi", "世", "🌍")
]
CANONICAL = reply()("Answer 世界", reasoning="thoughts", calls=[reply().call("f", k="v🌍"), reply().call("g", index=2)])
IDS = st.lists(
    st.one_of(
        st.sampled_from(STRUCTURE).map(lambda i: [i]),
        st.sampled_from(WORDS),
        st.sampled_from([reply().open("response"), reply().close("think"), reply().open("tools"), reply().call("f", k="v")]),
        st.integers(0, 767).map(lambda i: [i]),
    ),
    max_size=25,
).map(lambda groups: [i for group in groups for i in group])


CUTS = st.lists(st.integers(0, 60), max_size=8)


def run(choice: ChatChoice | TextChoice, ids: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[Update]:
    """Feeds `ids` cut at the given places, the last chunk with the finish reason; stops where the choice stops."""
    updates = []
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    groups = [ids[a:b] for a, b in pairwise(bounds)] or [[]]
    for i, group in enumerate(groups):
        logprobs = tuple(TokenLogprob(token_id, -1.0) for token_id in group)
        last = i == len(groups) - 1
        updates.append(choice.push(TokenChunk(request_id="r", token_ids=tuple(group), logprobs=logprobs, finish=finish if last else None)))
        if updates[-1].finish:
            break
    return updates


def pieces(updates: Sequence[Update]) -> list[Piece]:
    return [piece for update in updates for piece in update.pieces]


def end(updates: Sequence[Update]) -> Finish:
    finish = updates[-1].finish
    assert finish is not None
    return finish


def chat(**options: object) -> ChatChoice:
    given = {"stop_ids": (), "stops": (), "thinking": True, "tools": True, "nonce": 0} | options
    return ChatChoice(0, T, **given)  # type: ignore[arg-type]


@given(
    ids=IDS | st.just(CANONICAL),
    cuts=CUTS,
    thinking=st.booleans(),
    tools=st.booleans(),
    stops=st.lists(st.sampled_from(["hi", "世", "ansWer", "i h"]), max_size=2),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_grouping_changes_nothing(
    ids: list[int], cuts: list[int], thinking: bool, tools: bool, stops: list[str], finish: FinishReason
) -> None:
    cut = run(chat(thinking=thinking, tools=tools, stops=stops), ids, cuts, finish)
    single = run(chat(thinking=thinking, tools=tools, stops=stops), ids, range(len(ids)), finish)
    texts = [collect(piece.delta for piece in pieces(way) if not isinstance(piece.delta, ReasoningEnd)) for way in (cut, single)]
    assert texts[0] == texts[1]
    assert (end(cut).reason, end(cut).stop_string) == (end(single).reason, end(single).stop_string)
    assert cut[-1].completion_tokens == single[-1].completion_tokens
    assert cut[-1].reasoning_tokens == single[-1].reasoning_tokens <= cut[-1].completion_tokens


@given(
    ids=IDS | st.just(CANONICAL), cuts=st.lists(st.integers(0, 60), max_size=8), stops=st.lists(st.sampled_from(["hi", "世"]), max_size=2)
)
def test_pieces_come_in_order_and_tokens_add_up(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    updates = run(chat(stops=stops), ids, cuts, FinishReason.STOP)
    seen = pieces(updates)
    kinds = [type(piece.delta) for piece in seen]
    assert kinds.count(ReasoningEnd) == 1
    place = kinds.index(ReasoningEnd)
    assert set(kinds[:place]) <= {ReasoningDelta}
    assert ReasoningDelta not in kinds[place:]
    open_call: int | None = None
    started = 0
    for piece in seen:
        match piece.delta:
            case ToolCallStart(index, _):
                assert (open_call, index) == (None, started)
                assert piece.call_id
                open_call, started = index, started + 1
            case ToolCallArguments(index, fragment):
                assert index == open_call
                assert fragment
            case ToolCallEnd(index):
                assert index == open_call
                open_call = None
            case ContentDelta(text):
                assert text
                assert not started, "the answer comes before the calls"
    taken = [i for part in [*seen, end(updates)] for i in part.token_ids]
    assert taken == ids[: updates[-1].completion_tokens]
    assert [entry.token_id for part in [*seen, end(updates)] for entry in part.logprobs] == taken


@given(
    ids=st.lists(st.integers(0, 1023), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stops=st.lists(st.text(min_size=1, max_size=2), max_size=2),
)
def test_plain_text_under_any_grouping(ids: list[int], cuts: list[int], stops: list[str]) -> None:
    ways = [run(TextChoice(0, T, stop_ids=(), stops=stops), ids, way, FinishReason.LENGTH) for way in (cuts, range(len(ids)))]
    texts = ["".join(piece.delta.text for piece in pieces(way)) for way in ways]  # type: ignore[union-attr]
    assert texts[0] == texts[1]
    assert not any(stop in texts[0] for stop in stops)
    for way in ways:
        assert [i for piece in pieces(way) for i in piece.token_ids] == ids[: way[-1].completion_tokens]


@pytest.mark.parametrize(
    ("ids", "finish", "reason"),
    [
        (CANONICAL, FinishReason.STOP, "tool_calls"),
        (CANONICAL, FinishReason.LENGTH, "length"),
        (CANONICAL[:-45], FinishReason.STOP, "stop"),
        (reply()("hi", reasoning="x"), FinishReason.STOP, "stop"),
    ],
)
def test_reasons(ids: list[int], finish: FinishReason, reason: str) -> None:
    assert end(run(chat(), ids, [], finish)).reason == reason


@pytest.mark.parametrize("choice", [chat(), TextChoice(0, T, stop_ids=(), stops=())])
def test_a_request_that_the_server_cancelled_is_a_failure(choice: ChatChoice) -> None:
    with pytest.raises(EngineFailure):
        choice.push(TokenChunk(request_id="r", finish=FinishReason.CANCELLED))


def test_cached_tokens_are_known_from_the_first_chunk_that_tells() -> None:
    choice = chat()
    assert choice.push(TokenChunk(request_id="r", token_ids=(1,))).cached_tokens is None
    assert choice.push(TokenChunk(request_id="r", usage=Usage(prompt_tokens=5, cached_tokens=3))).cached_tokens == 3
    assert choice.push(TokenChunk(request_id="r", token_ids=(1,))).cached_tokens == 3
