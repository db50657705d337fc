# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.quota."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.quota import fair_slabs, over_quota

HELD = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 20))


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
