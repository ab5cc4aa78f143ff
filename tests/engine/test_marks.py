from __future__ import annotations

from engine.lineage import Lineage, root
from engine.marks import marks, next_interval
from engine.types import GenerateRequest


def positions(
    prompt_len: int, *, start: int = 0, stop: int | None = None, interval: int = 100, junction: int = 0, boundaries: tuple[int, ...] = ()
) -> list[tuple[int, bool]]:
    """(position, only an interval), the first to be passed first; the interval behind them is left out."""
    request = GenerateRequest(request_id="", prompt=tuple(range(prompt_len)), boundaries=boundaries)
    lineage = Lineage(root("", ""), 4, range(stop or prompt_len))
    found = marks(
        lineage, request, start=start, stop=stop or prompt_len, interval=interval, junction=junction, has=lambda key: key == lineage.at(5)
    )
    assert all(mark.key == lineage.at(mark.position) for mark in found[1:])
    assert found[0].key is None
    assert found[0].interval
    return [(mark.position, mark.interval) for mark in reversed(found[1:])]


def test_the_prompts_end_is_kept_one_token_early() -> None:
    assert positions(10) == [(9, False)]
    assert positions(1) == []


def test_an_end_that_fills_a_page_is_kept_as_well() -> None:
    assert positions(11) == [(10, False)]
    assert positions(12) == [(11, False), (12, False)]
    assert positions(13) == [(12, False)]


def test_intervals_boundaries_and_the_junction() -> None:
    assert positions(30, interval=10) == [(10, True), (20, True), (29, False), (30, True)]
    assert positions(30, boundaries=(7, 20, 31), junction=16) == [(7, False), (16, False), (20, False), (29, False)]
    assert positions(30, interval=7, boundaries=(7,)) == [(7, False), (14, True), (21, True), (28, True), (29, False)]


def test_only_ahead_of_the_start_and_within_reach() -> None:
    assert positions(30, start=20, interval=10, boundaries=(7, 20, 25)) == [(25, False), (29, False), (30, True)]
    assert positions(30, start=29) == []
    assert positions(10, stop=9) == [(9, False)]


def test_generated_tokens_have_intervals_only() -> None:
    assert positions(10, stop=35, interval=10) == [(9, False), (10, True), (20, True), (30, True)]


def test_what_the_cache_has_is_not_taken_again() -> None:
    assert positions(10, boundaries=(5, 6)) == [(6, False), (9, False)]


def test_the_interval_goes_on_behind_the_known_tokens() -> None:
    request = GenerateRequest(request_id="", prompt=(1,) * 20)
    lineage = Lineage(root("", ""), 4, request.prompt)
    found = marks(lineage, request, start=0, stop=20, interval=10, junction=0, has=lambda key: False)
    assert found[0].position == 30
    assert next_interval(30, 10).position == 40
