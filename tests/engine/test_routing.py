from __future__ import annotations

import pickle

from engine.routing import Candidate, rank


def best(candidates: list[Candidate], session: str | None = None) -> str:
    return candidates[rank(candidates, session)[0]].name


def test_session_before_prefix_before_load() -> None:
    idle = Candidate(name="idle")
    warm = Candidate(name="warm", prefix=100, load=50)
    warmer = Candidate(name="warmer", prefix=200, load=90)
    home = Candidate(name="home", has_session=True, load=900)
    busy = Candidate(name="busy", load=7)
    every = [busy, warm, home, idle, warmer]
    assert [every[i].name for i in rank(every)] == ["home", "warmer", "warm", "idle", "busy"]


def test_who_is_full_comes_last() -> None:
    home = Candidate(name="home", has_session=True, full=True)
    other = Candidate(name="other", load=10)
    assert best([home, other]) == "other"


def test_ties_spread_sessions_and_move_only_those_of_the_lost_one() -> None:
    replicas = [Candidate(name=f"r{i}") for i in range(3)]
    sessions = [f"s{i}" for i in range(300)]
    homes = {s: best(replicas, s) for s in sessions}
    counts = [sum(home == r.name for home in homes.values()) for r in replicas]
    assert min(counts) > 60
    left = [r for r in replicas if r.name != "r1"]
    assert all(best(left, s) == home for s, home in homes.items() if home != "r1")


def test_the_answer_does_not_depend_on_order_or_process() -> None:
    replicas = [Candidate(name=f"r{i}") for i in range(5)]
    again = pickle.loads(pickle.dumps(replicas[::-1]))
    assert [best(replicas, f"s{i}") for i in range(50)] == [best(again, f"s{i}") for i in range(50)]
