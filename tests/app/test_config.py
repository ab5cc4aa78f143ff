from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from app.config import ServiceConfig
from app.pricing import Price


def test_every_field_can_be_said_as_a_string() -> None:
    """`serve run app:deployment key=value` passes strings only."""
    config = ServiceConfig.model_validate(
        {
            "model": "/m",
            "tp": "2",
            "ep": "8",
            "aliases": "a, b",
            "api_keys": '["k1", "k2"]',
            "prefix_cache": "false",
            "cache_bytes": "4GiB",
            "num_pages": "none",
            "max_model_len": "1000",
            "shard_timeout_s": "2.5",
            "prices": '{"m": {"prompt": 1, "cached": 0.5, "completion": 2}}',
        }
    )
    assert (config.model, config.tp, config.ep) == ("/m", 2, 8)
    assert (config.aliases, config.api_keys) == (("a", "b"), ("k1", "k2"))
    assert (config.prefix_cache, config.cache_bytes, config.num_pages, config.max_model_len) == (False, 4 * 2**30, None, 1000)
    assert config.shard_timeout_s == 2.5
    assert config.prices == {"m": Price(prompt=1, cached=0.5, completion=2)}


def test_every_field_says_what_it_is() -> None:
    assert all(field.description for field in ServiceConfig.model_fields.values())


@pytest.mark.parametrize(
    ("given", "tp", "shards", "groups"),
    [
        ({}, 2, 2, 1),
        ({"model": "/m"}, 1, 1, 1),
        ({"model": "/m", "tp": 2}, 2, 2, 1),
        ({"model": "/m", "ep": 4}, 1, 4, 4),
        ({"model": "/m", "tp": 2, "ep": 8}, 2, 8, 4),
        ({"ep": 1}, 1, 1, 1),
    ],
)
def test_widths(given: dict[str, Any], tp: int, shards: int, groups: int) -> None:
    config = ServiceConfig.model_validate(given)
    assert (config.tp_size, config.shards, config.groups) == (tp, shards, groups)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"modle": "x"}, ["modle", "did you mean model"]),
        ({"zzzz": "x"}, ["zzzz", "known keys", "max_running"]),
        ({"tp": 2, "ep": 3}, ["ep=3", "multiple of tp=2"]),
        ({"tp": "two"}, ["tp", "integer"]),
        ({"max_running": 100, "max_batched_tokens": 50}, ["max_running=100", "max_batched_tokens=50"]),
        ({"num_slots": 4}, ["num_slots=4", "max_running=64"]),
        ({"aliases": "kimi-k3"}, ["aliases", "kimi-k3"]),
        ({"device": "tpu"}, ["device", "cuda"]),
        ({"cache_bytes": "lots"}, ["cache_bytes"]),
        ({"prices": '{"m": {"prompt": -1, "cached": 0, "completion": 0}}'}, ["prices", "prompt"]),
    ],
)
def test_mistakes_name_the_key(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        ServiceConfig.model_validate(given)
    for word in words:
        assert word in str(error.value)


def test_keys_are_never_shown() -> None:
    assert "hunter2" not in repr(ServiceConfig(api_keys=("hunter2",)))
    with pytest.raises(ValidationError) as error:
        ServiceConfig.model_validate({"api_keys": "hunter2", "tp": 2, "ep": 3})
    assert "hunter2" not in str(error.value)


def test_it_is_frozen_and_travels() -> None:
    config = ServiceConfig(aliases=("a",))
    with pytest.raises(ValidationError):
        config.tp = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
