# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.quota."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.quota import Tenant, fair_slabs, over_quota, tenants_over

HELD = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 20))
TENANTS = st.tuples(st.sampled_from("ABC"), st.sampled_from(("", "x", "y", "z")))
HELD_BY_TENANT = st.dictionaries(TENANTS, st.integers(0, 20))


def test_alone_a_consumer_may_have_everything() -> None:
    assert over_quota({"a": 16}, "a", 16, 0.5) == {}


def test_a_newcomer_gets_its_share_from_who_has_more() -> None:
    assert over_quota({"a": 16}, "b", 16, 0.5) == {"a": 8}
    assert over_quota({"a": 9, "b": 7}, "b", 16, 0.5) == {"a": 1}
    assert over_quota({"a": 8, "b": 8}, "b", 16, 0.5) == {}
    assert over_quota({"a": 8, "b": 8}, "c", 16, 0.5) == {"a": 3, "b": 3}


def test_one_slab_is_not_handed_to_and_fro() -> None:
    assert over_quota({"a": 1}, "b", 1, 0.5) == {}
    assert over_quota({"a": 2}, "b", 2, 0.5) == {"a": 1}


def test_an_equal_share_is_exact() -> None:
    assert fair_slabs(98, 49, 1.0) == 2  # 98 * (1 / 49) is less in floating point


@given(HELD, st.sampled_from("abcdef"), st.integers(1, 100), st.floats(0.01, 1.0))
def test_it_ends(held: dict[str, int], asking: str, slabs_max: int, share: float) -> None:
    """Each step takes from one with more and gives to one with less, so nothing goes round."""
    held = dict(held)
    for _ in range(200):
        over = over_quota(held, asking, slabs_max, share)
        if not over:
            break
        fair = fair_slabs(slabs_max, len({c for c in held if held[c]} | {asking}), share)
        giver = max(over, key=lambda consumer: held[consumer])
        assert held[giver] > fair > held.get(asking, 0)
        held[giver] -= 1
        held[asking] = held.get(asking, 0) + 1
        # Who has just given is not the next to take one from who has just got it.
        assert asking not in over_quota(held, giver, slabs_max, share)
    assert not over_quota(held, asking, slabs_max, share)


# ----------------------------------------------------------------------------- tenants


def of_hosts(held: dict[Tenant[str], int]) -> Counter[str]:
    hosts: Counter[str] = Counter()
    for (host, _), slabs in held.items():
        hosts[host] += slabs
    return hosts


def filled(
    held: dict[Tenant[str], int], order: list[Tenant[str]], slabs_max: int, share: float
) -> dict[Tenant[str], int]:
    """Each asks in turn until nobody is given anything; the pool is full."""
    held = dict(held)
    for _ in range(10 * sum(held.values()) + 10):
        was = dict(held)
        for asking in order:
            if over := tenants_over(held, asking, slabs_max, share):
                held[max(over, key=lambda tenant: (held[tenant], tenant))] -= 1
                held[asking] = held.get(asking, 0) + 1
        if held == was:
            return held
    raise AssertionError(f"it goes round: {held}")


def test_a_sweep_of_forty_runs_is_one_tenant_of_its_host() -> None:
    held = {("A", "sweep"): 40}
    assert tenants_over(held, ("A", "sweep"), 40, 0.5) == {}
    assert tenants_over(held, ("A", "one"), 40, 0.5) == {("A", "sweep"): 20}
    assert filled(held, [("A", "one"), ("A", "sweep")], 40, 0.5) == {
        ("A", "sweep"): 20,
        ("A", "one"): 20,
    }


def test_the_same_name_on_two_hosts_is_two_tenants() -> None:
    held = {("A", "physics"): 8, ("B", "physics"): 8}
    assert tenants_over(held, ("A", "physics"), 16, 0.5) == {}
    assert tenants_over(held, ("B", "other"), 16, 0.5) == {("B", "physics"): 4}


def test_the_largest_tenants_of_a_host_give_for_another_host() -> None:
    held = {("A", "x"): 9, ("A", "y"): 3}
    assert tenants_over(held, ("B", ""), 12, 0.5) == {("A", "x"): 6}
    assert tenants_over({("A", "x"): 1, ("A", "y"): 1}, ("B", ""), 2, 0.5) == {
        ("A", "x"): 1,
        ("A", "y"): 1,
    }


@given(HELD, st.sampled_from("abcdef"), st.integers(1, 100), st.floats(0.01, 1.0))
def test_without_tenants_hosts_share_as_ever(
    held: dict[str, int], asking: str, slabs_max: int, share: float
) -> None:
    unnamed = {(host, ""): slabs for host, slabs in held.items()}
    over = tenants_over(unnamed, (asking, ""), slabs_max, share)
    assert over == {(h, ""): n for h, n in over_quota(held, asking, slabs_max, share).items()}


@given(HELD_BY_TENANT, TENANTS, st.integers(1, 100), st.floats(0.01, 1.0))
def test_names_of_tenants_decide_nothing_between_hosts(
    held: dict[Tenant[str], int], asking: Tenant[str], slabs_max: int, share: float
) -> None:
    """Which hosts give depends on what hosts have, whatever names they give their tenants."""
    merged = {(host, ""): slabs for host, slabs in of_hosts(held).items()}
    one = tenants_over(merged, (asking[0], ""), slabs_max, share)
    many = tenants_over(held, asking, slabs_max, share)
    if one:
        assert {host for host, _ in many} == {host for host, _ in one}
        assert all(0 < slabs <= one[host, ""] for (host, _), slabs in many.items())
    else:
        assert all(host == asking[0] for host, _ in many)


@given(HELD_BY_TENANT, st.lists(TENANTS, min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_slabs_are_conserved_nobody_starves_and_it_ends(
    held: dict[Tenant[str], int], order: list[Tenant[str]], share: float
) -> None:
    slabs_max = max(1, sum(held.values()))
    after = filled(held, order, slabs_max, share)
    assert sum(after.values()) == sum(held.values())
    assert min(after.values(), default=0) >= 0
    hosts = of_hosts(after)
    fair = fair_slabs(slabs_max, len({*hosts} & {h for h in hosts if hosts[h]}), share)
    for asking in order:
        own = {t: n for t, n in after.items() if t[0] == asking[0] and (n or t == asking)}
        # Nobody of its host has two more than one that asks has, unless that has its equal part.
        assert after.get(asking, 0) >= hosts[asking[0]] // max(1, len(own)) or all(
            n - after.get(asking, 0) <= 1 for n in own.values()
        )
        # Nor does a host stay below its share while another one is above it by two.
        assert hosts[asking[0]] >= fair or all(
            n <= fair or n - hosts[asking[0]] <= 1 for n in hosts.values()
        )


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 80))
def test_a_host_with_many_tenants_gets_no_more_than_with_one(
    first: int, second: int, slabs_max: int
) -> None:
    def kept(tenants: int) -> int:
        held: dict[Tenant[str], int] = {("B", "only"): slabs_max}
        order = [("A", f"t{number}") for number in range(tenants)] + [("B", "only")]
        return of_hosts(filled(held, order, slabs_max, 0.5))["A"]

    assert kept(first) == kept(second) == slabs_max // 2
