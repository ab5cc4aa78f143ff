"""`k3 plan` and `k3 cost`: words in, words out; the arithmetic is tested in tests/cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.cli import cli
from cluster.accelerators import ACCELERATORS
from model.released import K3


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The released config.json, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(K3.to_dict()))
    return str(tmp_path)


def k3(*words: str) -> Result:
    return CliRunner().invoke(cli, words, catch_exceptions=False, env={"COLUMNS": "250", "TERM": "dumb"})


def test_a_layout_that_fits(model: str) -> None:
    result = k3("plan", "--model", model, "--accelerator", "B300", "--tp", "8", "--usd-per-hour", "5", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["fits"], told["tp"], told["dp"], told["ep"]) == (True, 8, 1, 8)
    assert told["source"] == ACCELERATORS["B300"].source
    assert told["experts_bytes"] * 8 == 1_446_456_066_048
    assert told["usd_per_million_generated"] > 0


def test_one_that_does_not_says_why_and_what_would_and_exits_with_1() -> None:
    result = k3("plan", "--accelerator", "H100-80")
    assert result.exit_code == 1
    assert "640 GB" in result.stdout
    assert "decode_step_s" not in result.stdout
    assert "what holds it: the smallest layouts" in result.stdout
    told = json.loads(k3("plan", "--accelerator", "H100-80", "--json").stdout)
    assert not told["fits"]
    smallest = {row["accelerator"]: row["count"] for row in told["smallest_layouts"]}
    assert (smallest["H100-80"], smallest["B300"], smallest["H200"]) == (40, 8, 16)


def test_without_a_checkpoint_it_is_the_released_model(model: str) -> None:
    words = ("plan", "--accelerator", "B300", "--json")
    assert k3(*words).stdout == k3(*words, "--model", model).stdout


def test_the_pools_are_explained_and_the_peers_can_be_planned() -> None:
    shown = " ".join(k3("plan", "--accelerator", "B300", "--tp", "8").stdout.split())
    assert "had 42.23 GiB a GPU" in shown
    reserve = shown.partition("--reserve-gb ")[2].split()[0]
    told = json.loads(k3("plan", "--accelerator", "B300", "--tp", "8", "--reserve-gb", reserve, "--json").stdout)
    assert told["left_for_pools_bytes"] == pytest.approx(42.23 * 2**30, rel=0.01)
    parts = ("weight_bytes", "workspace_bytes", "left_for_pools_bytes", "kept_free_bytes")
    assert sum(told[part] for part in parts) == pytest.approx(told["memory_bytes"])


def test_a_workload_that_asks_for_more() -> None:
    told = json.loads(k3("plan", "--accelerator", "B300", "--tp", "8", "--sessions", "100", "--json").stdout)
    assert "100 are asked for" in told["reason"]
    assert k3("plan", "--accelerator", "B300", "--output-rate", "1000").exit_code == 1


def test_without_an_accelerator_the_smallest_layouts(model: str) -> None:
    told = [json.loads(line) for line in k3("plan", "--model", model, "--json").stdout.splitlines()]
    assert {row["accelerator"]: row["count"] for row in told}["H200"] == 16


def test_break_even_against_both_list_prices(model: str) -> None:
    words = ("cost", "--model", model, "--accelerator", "B300", "--usd-per-hour", "5")
    shown = k3(*words)
    assert shown.exit_code == 0
    assert "| = the API" in shown.stdout
    told = [json.loads(line) for line in k3(*words, "--json").stdout.splitlines()]
    assert [row["against"] for row in told] == ["kimi-k3", "kimi-k3.1"]
    for row in told:
        assert row["break_even_utilisation"] == pytest.approx(row["own_usd_per_turn"] / row["api_usd_per_turn"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--accelerator", "B3000"), "'B3000' is not in the table"),
        (("plan", "--accelerator", "B300", "--count", "12"), "multiple of the node size"),
        (("plan", "--accelerators", "/nowhere.yaml"), "/nowhere.yaml: No such file"),
        (("plan", "--memory-share", "1.5"), "memory_share is 1.5"),
        (("cost", "--accelerator", "H100-80", "--usd-per-hour", "2"), "exceed the usable"),
        (("cost", "--accelerator", "B300", "--usd-per-hour", "0"), "usd_per_hour is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(model: str, words: tuple[str, ...], said: str) -> None:
    result = k3(*words, "--model", model)
    assert result.exit_code == 2
    assert said in result.stderr
