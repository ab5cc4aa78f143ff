from __future__ import annotations

import pytest

from engine.errors import ConfigError
from tests.engine.driver import config


@pytest.mark.parametrize(
    "name", ["page_size", "num_pages", "num_slots", "max_running", "max_batched_tokens", "max_queued", "checkpoint_interval"]
)
def test_limits_below_one_are_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0: at least 1 is needed"):
        config(**{name: 0})


def test_a_context_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 1"):
        config(max_model_len=1)


@pytest.mark.parametrize("run_ahead", [-1, 2])
def test_run_ahead_is_none_or_one(run_ahead: int) -> None:
    with pytest.raises(ConfigError, match=f"run_ahead is {run_ahead}"):
        config(run_ahead=run_ahead)
