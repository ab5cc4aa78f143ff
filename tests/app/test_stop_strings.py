from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.stop_strings import StopStrings


def shown(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "abc", ("abc", None)),
        (["b"], "abc", ("a", "b")),
        (["abcd", "bc"], "xabcd", ("xa", "bc")),
        (["abc", "bc"], "xabcd", ("x", "abc")),
        (["aab"], "aaab", ("a", "aab")),
        (["世界"], "hello 世界!", ("hello ", "世界")),
        (["abc"], "ab", ("ab", None)),
    ],
)
def test_the_text_ends_before_the_first_stop_string_that_completes(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert shown(stops, [text]) == expected
    assert shown(stops, list(text)) == expected


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=4), max_size=8))
def test_cutting_into_pieces_changes_nothing(stops: list[str], pieces: list[str]) -> None:
    assert shown(stops, pieces) == shown(stops, ["".join(pieces)])


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab", max_size=12))
def test_nothing_is_shown_too_early_and_nothing_held_too_long(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    out = ""
    for place, letter in enumerate(text, start=1):
        out += matcher.push(letter)
        if matcher.matched is not None:
            assert not any(stop in out for stop in stops)
            break
        held = text[len(out) : place]
        assert out + held == text[:place]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStrings(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""
