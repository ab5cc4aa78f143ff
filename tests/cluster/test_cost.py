"""Break-even arithmetic, checked by hand."""

from __future__ import annotations

import math

import pytest

from cluster.cost import LIST_PRICES, Machine, Price, Turn, chart
from engine.errors import ConfigError

K3 = LIST_PRICES["kimi-k3"]
TURN = Turn(prompt_tokens=10_000, cached_tokens=9_000, completion_tokens=500)
MACHINE = Machine(usd_per_hour=36.0, prompt_per_s=10_000, completion_per_s=1_000)


def test_list_prices() -> None:
    assert LIST_PRICES["kimi-k3"] == Price(prompt=3.0, cached=0.3, completion=15.0)
    assert LIST_PRICES["kimi-k3.1"] == Price(prompt=2.0, cached=0.2, completion=10.0)


def test_a_turn_of_the_api() -> None:
    assert TURN.api_usd(K3) == pytest.approx(1_000 * 3e-6 + 9_000 * 0.3e-6 + 500 * 15e-6)


def test_a_turn_of_the_machine() -> None:
    assert MACHINE.turns_per_hour(TURN) == pytest.approx(3600 / 0.6)  # 0.1 s of prefill, 0.5 s of decode
    assert MACHINE.usd_per_turn(TURN, 1.0) == pytest.approx(0.006)
    assert MACHINE.usd_per_turn(TURN, 0.5) == pytest.approx(0.012)


def test_at_break_even_both_cost_the_same() -> None:
    share = MACHINE.break_even(TURN, K3)
    assert 0 < share < 1
    assert MACHINE.usd_per_turn(TURN, share) == pytest.approx(TURN.api_usd(K3))
    assert MACHINE.break_even(TURN, LIST_PRICES["kimi-k3.1"]) == pytest.approx(1.5 * share)  # at two thirds of the price


def test_cache_hits_make_turns_cheaper_on_both_sides() -> None:
    cold = Turn(prompt_tokens=10_000, cached_tokens=0, completion_tokens=500)
    assert cold.api_usd(K3) > TURN.api_usd(K3)
    assert MACHINE.usd_per_turn(cold, 1.0) > MACHINE.usd_per_turn(TURN, 1.0)


def test_stored_sessions_are_paid_by_the_hour() -> None:
    storing = Machine(usd_per_hour=36.0, prompt_per_s=10_000, completion_per_s=1_000, stored_gb=73_000, usd_per_gb_month=0.02)
    assert storing.storage_usd_per_hour == pytest.approx(2.0)
    assert storing.break_even(TURN, K3) == pytest.approx(MACHINE.break_even(TURN, K3) * 38 / 36)


def test_a_free_api_is_never_beaten() -> None:
    assert MACHINE.break_even(TURN, Price(prompt=0, cached=0, completion=0)) == math.inf


def test_bars_shrink_and_pass_the_mark_only_below_break_even() -> None:
    *bars, legend = chart(MACHINE, TURN, K3, (0.2, 0.4, 1.0)).splitlines()
    assert [bar.count("#") for bar in bars] == sorted((bar.count("#") for bar in bars), reverse=True)
    past = ["#" in bar.split("|")[1] for bar in bars]
    assert past == [u < MACHINE.break_even(TURN, K3) for u in (0.2, 0.4, 1.0)]
    assert legend.endswith("$0.0132 a turn")


def test_figures_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="cached_tokens 11"):
        Turn(prompt_tokens=10, cached_tokens=11, completion_tokens=1)
    with pytest.raises(ConfigError, match="completion_tokens 0"):
        Turn(prompt_tokens=10, cached_tokens=0, completion_tokens=0)
    with pytest.raises(ConfigError, match="usd_per_hour is 0"):
        Machine(usd_per_hour=0, prompt_per_s=1, completion_per_s=1)
    with pytest.raises(ConfigError, match="stored_gb is -1"):
        Machine(usd_per_hour=1, prompt_per_s=1, completion_per_s=1, stored_gb=-1)
    with pytest.raises(ConfigError, match=r"utilisation is 1\.2"):
        MACHINE.usd_per_turn(TURN, 1.2)
