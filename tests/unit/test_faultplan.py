# SPDX-License-Identifier: Apache-2.0
"""The plan of faults for tests/system/test_cluster_faults.py."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from support.jobs.faultplan import AT_ONCE_MAX, Fault, Undo, faults

DONORS = [f"h{number}" for number in range(1, 7)]
CONSUMERS = ["h7", "h8", "h9"]
COUNT = 400


def plan(seed: int) -> list[Fault]:
    return list(itertools.islice(faults(Random(seed), DONORS, CONSUMERS), COUNT))


def test_a_seed_is_a_plan() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_and_no_host_has_two_faults(seed: int) -> None:
    made = plan(seed)
    assert [fault.number for fault in made] == list(range(1, COUNT + 1))
    assert all(a.start_s <= b.start_s for a, b in itertools.pairwise(made))
    kinds = {kind for fault in made for kind in fault.kinds}
    assert kinds == {"kill", "restart", "freeze", "cut", "delay", "squeeze", "drain"}
    assert {fault.host for fault in made} == {*DONORS, *CONSUMERS}
    until_s: dict[str, float] = {}
    for fault in made:
        assert fault.start_s >= until_s.get(fault.host, 0.0)
        until_s[fault.host] = fault.end_s


@pytest.mark.parametrize("seed", range(5))
def test_few_donors_at_a_time_or_all(seed: int) -> None:
    made = [fault for fault in plan(seed) if fault.host in DONORS]
    storms = 0
    for start_s, group in itertools.groupby(made, key=lambda fault: fault.start_s):
        hosts = {fault.host for fault in group}
        storms += len(hosts) == len(DONORS)
        others = [one for one in made if one.start_s < start_s < one.end_s]
        assert len(hosts) + len(others) <= (AT_ONCE_MAX if len(hosts) == 1 else len(DONORS))
    assert storms


def test_faults_end_in_the_order_of_their_ends() -> None:
    undo = Undo()
    made = plan(3)
    for fault in made:
        undo.push(fault)
    ends_s = []
    while (ended := undo.pop(math.inf)) is not None:
        ends_s.append(ended.end_s)
    assert ends_s == sorted(fault.end_s for fault in made)
    undo.push(made[0])
    assert undo.pop(made[0].end_s - 0.001) is None
    assert undo.pop(made[0].end_s) == made[0]
