from __future__ import annotations

from engine.fairness import ServedTokens


def test_counts_what_each_tenant_got() -> None:
    served = ServedTokens()
    served.enter("a")
    served.enter("b")
    served.charge("a", 5)
    served.charge("b", 3)
    served.charge("a", 1)
    assert (served["a"], served["b"]) == (6, 3)


def test_idleness_earns_no_credit_and_no_penalty() -> None:
    served = ServedTokens()
    served.enter("busy")
    served.charge("busy", 1000)
    served.enter("late")
    assert served["late"] == 1000
    served.charge("busy", 10)
    served.enter("later")
    assert served["later"] == 1000  # level with the least served at work


def test_a_debt_is_not_shed_by_leaving_for_a_moment() -> None:
    served = ServedTokens()
    served.enter("greedy")
    served.enter("modest")
    served.charge("greedy", 1000)
    served.leave("greedy")
    served.enter("greedy")
    assert (served["greedy"], served["modest"]) == (1000, 0)


def test_who_owes_nothing_is_forgotten() -> None:
    served = ServedTokens()
    for i in range(100):
        served.enter(f"t{i}")
        served.charge(f"t{i}", i)
        served.leave(f"t{i}")
    assert served._served == {}
    served.enter("a")
    served.enter("b")
    served.charge("a", 5)
    served.charge("b", 9)
    served.leave("a")  # level with nobody: b got more
    assert set(served._served) == {"b"}


def test_a_tenant_is_at_work_until_its_last_request_ends() -> None:
    served = ServedTokens()
    served.enter("a")
    served.enter("a")
    served.charge("a", 7)
    served.leave("a")
    assert served["a"] == 7
