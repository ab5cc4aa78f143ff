from __future__ import annotations

import pickle

from engine.stats import Counters, EngineStats, StepStats


def test_groups_are_summed_and_step_together() -> None:
    parts = [
        EngineStats(steps=5, hits=1, misses={"evicted": 2}, finished={"stop": 1}, pages_total=10),
        EngineStats(steps=4, hits=2, misses={"evicted": 1, "never_seen": 3}, pages_total=10),
    ]
    last = StepStats(step=6, rows=1, tokens=1, sampled=1, seconds=0.5)
    total = EngineStats.total(parts, steps=7, last=last)
    assert total == EngineStats(steps=7, hits=3, misses={"evicted": 3, "never_seen": 3}, finished={"stop": 1}, pages_total=20, last=last)
    assert pickle.loads(pickle.dumps(total)) == total


def test_a_snapshot_does_not_change_later() -> None:
    counters = Counters()
    counters.misses["evicted"] += 1
    before = EngineStats(**counters.snapshot())  # type: ignore[arg-type]
    counters.misses["evicted"] += 1
    counters.hits += 1
    assert (before.misses, before.hits) == ({"evicted": 1}, 0)
