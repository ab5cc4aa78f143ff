from __future__ import annotations

import subprocess
import sys
from hashlib import sha256

import pytest

from engine.lineage import Lineage, lineage_of, root

IDS = [1, 2, 163_839, 4, 5, 2**32 - 1, 7]


def u32(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def test_follows_its_definition() -> None:
    start = sha256((2).to_bytes(8, "little") + b"fp" + (6).to_bytes(8, "little") + b"tenant").digest()
    first = sha256(start + u32(*IDS[:3])).digest()
    second = sha256(first + u32(*IDS[3:6])).digest()
    lineage = Lineage(root("fp", "tenant"), 3, IDS)
    assert [lineage.block(i) for i in range(3)] == [start, first, second]
    assert lineage.at(0) == start
    assert lineage.at(2) == sha256(start + u32(*IDS[:2])).digest()
    assert lineage.at(3) == first
    assert lineage.at(5) == sha256(first + u32(*IDS[3:5])).digest()
    assert lineage.at(7) == sha256(second + u32(7)).digest()


def test_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = f"from engine.lineage import *; print(Lineage(root('fp', 't'), 3, {IDS}).at(7).hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {Lineage(root("fp", "t"), 3, IDS).at(7).hex()}


def test_grows_with_its_tokens() -> None:
    grown = Lineage(root("", ""), 4, [])
    for i, token in enumerate(IDS):
        grown.ids.append(token)
        assert grown.at(i + 1) == Lineage(root("", ""), 4, IDS[: i + 1]).at(i + 1)
    assert len(grown) == len(IDS)


def test_positions_before_the_end_do_not_change_when_it_grows() -> None:
    lineage = Lineage(root("", ""), 2, IDS[:5])
    before = [lineage.at(p) for p in range(6)]
    lineage.ids.extend(IDS[5:])
    lineage.at(7)
    assert [lineage.at(p) for p in range(6)] == before


@pytest.mark.parametrize(
    ("one", "other"),
    [(("fp", "a"), ("fp", "b")), (("fp", "a"), ("f", "pa")), (("", ""), ("", "x"))],
    ids=["tenant", "boundary between the parts", "no tenant"],
)
def test_fingerprint_and_tenant_separate(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert Lineage(root(*one), 2, IDS).at(3) != Lineage(root(*other), 2, IDS).at(3)


def test_a_shared_prefix_has_one_name_and_what_is_behind_it_has_not() -> None:
    prefixes = (u32(*IDS[:5]), u32(9, 9, 9, 9))
    a, b = (lineage_of("fp", tenant, IDS, block_size=2, prefixes=prefixes) for tenant in ("a", "b"))
    assert a.shared == b.shared == 4, "full blocks of the longest prefix that fits"
    assert [a.at(p) == b.at(p) for p in range(8)] == [True] * 5 + [False] * 3
    assert a.at(0) == sha256((2).to_bytes(8, "little") + b"fp").digest()
    assert a.at(5) == sha256(a.at(4) + root("fp", "a") + u32(IDS[4])).digest()
    assert a.at(6) == sha256(a.at(4) + root("fp", "a") + u32(*IDS[4:6])).digest()
    assert a.at(7) == sha256(a.at(6) + u32(IDS[6])).digest()
    assert a.at(2) != lineage_of("fp", "a", IDS, block_size=2).at(2), (
        "a tenant's own states are not given away when a prefix is marked later"
    )


@pytest.mark.parametrize("ids", [IDS[:3], [0, *IDS], []], ids=["too short", "other ids", "none"])
def test_a_prompt_that_does_not_begin_with_a_shared_prefix_is_its_tenants(ids: list[int]) -> None:
    made = lineage_of("fp", "a", ids, block_size=2, prefixes=(u32(*IDS[:4]),))
    assert made.shared == 0
    assert made.at(len(ids)) == lineage_of("fp", "a", ids, block_size=2).at(len(ids))


def test_order_matters() -> None:
    assert Lineage(root("", ""), 4, [1, 2]).at(2) != Lineage(root("", ""), 4, [2, 1]).at(2)


def test_refuses_what_is_not_known_or_not_an_id() -> None:
    lineage = Lineage(root("", ""), 4, [1, 2, 3])
    with pytest.raises(IndexError, match="position 4 is past the 3 known ids"):
        lineage.at(4)
    with pytest.raises(IndexError, match="block 1 of 4 ids is not complete"):
        lineage.block(1)
    with pytest.raises(OverflowError):
        Lineage(root("", ""), 4, [-1])
    with pytest.raises(OverflowError):
        Lineage(root("", ""), 4, [2**32])
