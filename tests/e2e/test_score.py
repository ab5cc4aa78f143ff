"""`k3 score` by grids of shards: the reference's logits, whatever the sharding and the chunk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file
from typer.testing import CliRunner

from app.cli import cli

pytestmark = [pytest.mark.ray, pytest.mark.slow]
GOLDEN = Path(__file__).parent.parent / "data" / "k3"


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, namespace="serve", log_to_driver=False)
    yield
    assert ray.is_initialized(), "the command left the Ray that it did not start"
    ray.shutdown()


@pytest.mark.parametrize(
    ("name", "tp", "ep", "chunk"),
    [("tiny-a", 1, 1, 512), ("tiny-a", 4, 4, 16), ("tiny-b", 2, 4, 7), ("tiny-b", 1, 2, 64), ("tiny-c", 1, 4, 65)],
)
def test_logits_of_every_position(tmp_path: Path, name: str, tp: int, ep: int, chunk: int) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    prompts = {key.removesuffix(".input_ids"): ids.tolist() for key, ids in expected.items() if key.endswith(".input_ids")}
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    out = tmp_path / "new" / "logits.safetensors"
    words = ["score", "--model", GOLDEN / name / "model", "--prompts", tmp_path / "prompts.json", "--out", out]
    words += ["--tp", tp, "--ep", ep, "--chunk", chunk]
    result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    logits = load_file(out)
    assert set(logits) == {f"logits.{prompt}" for prompt in prompts}
    for prompt, ids in prompts.items():
        got = logits[f"logits.{prompt}"]
        assert (got.dtype, got.shape) == (np.float32, expected[f"{prompt}.logits"].shape)
        assert len(got) == len(ids)
        np.testing.assert_allclose(got, expected[f"{prompt}.logits"], atol=2e-3, rtol=0, err_msg=prompt)
