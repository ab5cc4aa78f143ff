"""The planner against published facts of the released model and of machines that ran it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.accelerators import ACCELERATORS, read_accelerators
from cluster.planner import ClusterPlan, Workload, local_bytes, peer_gap, plan, session_bytes, smallest_layouts
from cluster.planner_roofline import Efficiency, Grid, decode_step_s, prefill_s
from cluster.pools import pool_bytes
from engine.errors import ConfigError
from model.config import ModelConfig
from model.released import K3, KIMI_LINEAR_48B
from model.state import StatePools
from model.weights import Shard, all_specs, component_bytes, local_slices

VISION = 92_289_024 + 802_428_928  # projector and tower: in the checkpoint, not in this decoder


def planned(name: str, count: int, workload: Workload | None = None, tp: int | None = None) -> ClusterPlan:
    return plan(K3, name, ACCELERATORS[name], count, tp=tp, workload=workload or Workload())


def test_released_bytes() -> None:
    assert sum(component_bytes(K3).values()) + VISION == 1_560_860_324_864


def test_a_million_tokens_are_a_session_of_27_gib_and_its_state() -> None:
    assert session_bytes(K3, 0) == 434_110_464 + 15_261_696
    assert session_bytes(K3, 1) - session_bytes(K3, 0) == 27_648
    assert session_bytes(K3, 1_048_576) == 28_991_029_248 + 449_372_160


@pytest.mark.parametrize(("tp", "ep"), [(8, 64), (8, 8), (1, 1)])
def test_local_bytes_are_what_the_fullest_shard_loads(tp: int, ep: int) -> None:
    tiny = ModelConfig.tiny()
    for model in (K3,) if ep == 64 else (tiny,):
        loaded: Counter[str] = Counter()
        component = {s.name: s.component for s in all_specs(model)}
        for piece in local_slices(model, Shard(tp_size=tp, ep_size=ep)):
            loaded[component[piece.name]] += piece.nbytes
        assert local_bytes(model, tp, ep) == loaded


def test_a_public_run_on_eight_b300_reported_3_249_215_tokens() -> None:
    """vLLM, TP8, fp8 latents, 42.23 GiB of cache a GPU: 13,955 B a token there, 1 % above the latents themselves."""
    pool = int(42.23 * 2**30)
    result = planned("B300", 8, Workload(latent_bytes=1, cache_bytes=pool, num_slots=2), tp=8)
    assert result.fits
    assert result.pool_tokens == pytest.approx(3_249_215, rel=0.02)
    assert result.pool_tokens > 3_249_215  # the overhead is theirs


@pytest.mark.parametrize(("name", "count"), [("H100-80", 64), ("B200", 16), ("B300", 8), ("MI355X", 8), ("H200", 16)])
def test_layouts_that_hold_it(name: str, count: int) -> None:
    result = planned(name, count)
    assert result.fits, result.reason
    assert result.live_sessions >= 1
    assert result.weight_bytes + result.workspace + result.pool <= 0.9 * ACCELERATORS[name].memory
    assert result.max_context >= 131_072
    assert result.tp * result.groups == result.ep == count


def test_eight_h100_do_not_hold_it_and_the_reason_says_by_how_much() -> None:
    result = planned("H100-80", 8)
    assert not result.fits
    assert result.reason is not None
    assert "1,560 GB" in result.reason
    assert "640 GB" in result.reason
    assert result.usd_per_million(2.0) == float("inf")


def test_the_smallest_layouts_are_named() -> None:
    found = {p.accelerator: p.count for p in smallest_layouts(K3, ACCELERATORS, Workload())}
    assert found["B300"] == found["GB300"] == found["MI355X"] == 8
    assert found["A100-80"] == found["H100-80"] == 40
    assert found["B200"] == found["H200"] == found["MI300X"] == 16
    for name, count in found.items():
        assert count == 8 or not planned(name, count - 8).fits


def test_weights_may_fit_where_a_long_context_does_not() -> None:
    result = planned("H100-80", 64, Workload(context=1_048_576))
    assert result.reason is not None
    assert "context does not" in result.reason


@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_pages_and_slots_cost_what_the_pools_allocate(dtype: torch.dtype, element: int) -> None:
    tiny = ModelConfig.tiny()
    pools = StatePools.allocate(tiny, tp_size=2, page_size=16, num_pages=3, num_slots=5, device="cpu", dtype=dtype)
    cost = pool_bytes(tiny, page_size=16, tp_size=2, latent_bytes=element)
    assert 3 * cost.page == pools.latents.nbytes
    assert 5 * cost.slot == pools.kda.nbytes + pools.conv.nbytes


def test_host_memory_holds_whole_sessions() -> None:
    """A node's 2 TB over 4,073,250,816 B of a session of 131,072 tokens."""
    assert planned("B300", 8, Workload(host_bytes=2e12)).host_sessions == 491
    assert planned("B200", 16, Workload(host_bytes=2e12)).host_sessions == 982


def test_half_the_latent_bytes_hold_twice_the_tokens() -> None:
    wide, narrow = (planned("B300", 8, Workload(latent_bytes=b, num_slots=2), tp=8) for b in (2, 1))
    assert narrow.pool_tokens == pytest.approx(2 * wide.pool_tokens, rel=1e-4)


def test_forks_cost_slots_and_no_pages() -> None:
    alone, forked = (planned("B300", 8, Workload(context=16_384, forks=f), tp=8) for f in (0, 3))
    assert forked.pools == alone.pools
    assert forked.live_sessions == 127 // 4
    assert alone.live_sessions > forked.live_sessions


def test_rates_follow_the_stated_efficiencies() -> None:
    slow = planned("B300", 8, tp=8)
    fast = planned("B300", 8, Workload(efficiency=Efficiency(memory=1, compute=1, link=1, collective_s=0)), tp=8)
    assert fast.step_s < slow.step_s
    assert fast.ttft_s < slow.ttft_s
    weights_once = fast.weight_bytes / ACCELERATORS["B300"].bandwidth
    assert fast.step_s > 0.5 * weights_once  # no step is faster than the bytes that it must read
    assert slow.load_s == pytest.approx(8 * slow.weight_bytes / 10e9)
    assert slow.usd_per_million(2.0) == pytest.approx(8 * 2.0 / 3600 / slow.tokens_per_s * 1e6)


def four_layers_on_an_h200() -> Grid:
    model = replace(K3, num_layers=4, kda_layers=(0, 1, 2))
    return Grid(model=model, accelerator=ACCELERATORS["H200"], count=1, tp=1, node_size=8, network=50e9, weights=local_bytes(model, 1, 1))


@pytest.mark.parametrize(("batch", "wall_ms", "within"), [(1, 2.56, 0.35), (16, 6.75, 0.15), (64, 14.51, 0.15), (256, 25.76, 0.15)])
def test_decode_as_vllm_was_measured_on_one_h200(batch: int, wall_ms: float, within: float) -> None:
    """Four full-width layers, vLLM 0.33, context of about 1,060 tokens: one efficiency serves all batches, less well at one row."""
    predicted = decode_step_s(four_layers_on_an_h200(), batch, 1060, 2, Efficiency())
    assert predicted * 1e3 == pytest.approx(wall_ms, rel=within)


def test_prefill_as_vllm_was_measured_on_one_h200() -> None:
    assert prefill_s(four_layers_on_an_h200(), 8192, 8192, 2, Efficiency()) == pytest.approx(0.219, rel=0.1)


def test_the_width_is_the_one_that_serves_most_sessions_at_the_asked_rate() -> None:
    workload = Workload(output_rate=10)
    widths = {tp: planned("H200", 64, workload, tp) for tp in (2, 4, 8)}
    chosen = planned("H200", 64, workload)
    assert chosen.rows == max(p.rows for p in widths.values()) == widths[4].rows
    assert not planned("H200", 64, workload, 1).fits


def test_nearly_as_many_sessions_and_an_earlier_first_token_win() -> None:
    narrow, wide = planned("B300", 8, tp=4), planned("B300", 8, tp=8)
    assert 0.9 * narrow.rows < wide.rows < narrow.rows
    assert wide.ttft_s < narrow.ttft_s
    assert planned("B300", 8).tp == 8


def test_every_session_gets_the_asked_rate_or_does_not_run() -> None:
    free, slow, fast = (planned("B300", 64, Workload(output_rate=rate), tp=1) for rate in (1, 10, 15))
    assert free.live_sessions == slow.live_sessions == fast.live_sessions
    assert free.rows > slow.rows > fast.rows > 0
    assert (slow.step_s <= 1 / 10, fast.step_s <= 1 / 15, free.step_s > 1 / 10) == (True, True, True)
    refused = planned("B300", 64, Workload(output_rate=1000), tp=1)
    assert refused.reason is not None
    assert "1000 tokens a second need 1 ms" in refused.reason


def test_more_sessions_than_fit_are_refused_with_both_numbers() -> None:
    assert planned("B300", 8, Workload(sessions=13), tp=8).fits
    refused = planned("B300", 8, Workload(sessions=14), tp=8)
    assert refused.reason is not None
    assert "13 sessions of 131,072 tokens with 0 forks fit, 14 are asked for" in refused.reason
    assert planned("B300", 8, Workload(sessions=14)).tp == 4, "another width holds them"


def test_the_gap_to_a_public_pool_is_told() -> None:
    """42.23 GiB a GPU there: with the gap as further reserve this plan has the same pool."""
    gap = peer_gap()
    same = planned("B300", 8, Workload(reserve=Workload().reserve + gap), tp=8)
    assert same.pool == pytest.approx(42.23 * 2**30, rel=1e-6)
    assert 8 * 2**30 < gap < 12 * 2**30


def test_float32_widens_the_dense_weights_alone() -> None:
    narrow, wide = local_bytes(K3, 8, 64), local_bytes(K3, 8, 64, 4)
    assert wide["experts"] == narrow["experts"]
    assert wide["mla"] == 2 * narrow["mla"]
    assert narrow["kda"] < wide["kda"] < 2 * narrow["kda"], "some of them are fp32 in the files"


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of the node size 8"):
        planned("H200", 12)
    with pytest.raises(ConfigError, match="must divide both head counts"):
        planned("H200", 40, tp=5)
    with pytest.raises(ConfigError, match="exceeds the model"):
        planned("H200", 16, Workload(context=2_000_000))
    with pytest.raises(ConfigError, match="latent_bytes is 3"):
        Workload(latent_bytes=3)


def test_a_file_overrides_rows_and_adds_some(tmp_path: Path) -> None:
    file = tmp_path / "accelerators.json"
    file.write_text(json.dumps({"H200": {"memory": 139e9, "source": "our own"}, "X1": replace_source("lab")}))
    table = read_accelerators(file)
    assert table["H200"] == replace(ACCELERATORS["H200"], memory=139e9, source="our own")
    assert table["X1"].source == "lab"
    assert table["B300"] == ACCELERATORS["B300"]


def replace_source(source: str) -> dict[str, object]:
    return {"memory": 1e11, "bandwidth": 1e12, "bf16_flops": 1e14, "link": 1e11, "source": source}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"memory": 1e9}, "H200: source is missing"),
        ({"memory": -1, "source": "x"}, "H200: memory: a positive number"),
        ({"ram": 1, "source": "x"}, "H200: unknown ram"),
        (3, "H200: a mapping of"),
    ],
)
def test_wrong_rows_are_refused_by_name(tmp_path: Path, row: object, words: str) -> None:
    file = tmp_path / "accelerators.json"
    file.write_text(json.dumps({"H200": row}))
    with pytest.raises(ConfigError, match=words):
        read_accelerators(file)


def test_every_row_has_its_source() -> None:
    assert set(ACCELERATORS) == {"A100-80", "H100-80", "H200", "B200", "B300", "GB300", "MI300X", "MI325X", "MI355X"}
    assert all(a.source for a in ACCELERATORS.values())


def test_the_planner_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import cluster.planner"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])


@pytest.mark.parametrize(
    ("name", "count", "fits"), [("H100-80", 1, False), ("H100-80", 2, True), ("H100-80", 4, True), ("H100-80", 8, True), ("H200", 1, True)]
)
def test_kimi_linear_on_one_node(name: str, count: int, fits: bool) -> None:
    """98.2 GB of weights: more than one accelerator of 80 GB, less than one of 141."""
    planned = plan(KIMI_LINEAR_48B, name, ACCELERATORS[name], count, tp=None, workload=Workload())
    assert planned.fits == fits
    assert (planned.reason is None) == fits
    if fits:
        assert planned.live_sessions >= 19
        assert planned.max_context == KIMI_LINEAR_48B.max_position_embeddings
    else:
        assert planned.reason is not None
        assert "98 GB" in planned.reason
