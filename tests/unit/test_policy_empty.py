# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.empty."""

from __future__ import annotations

from infiniswap.policy.empty import EMPTY_S_MAX, EmptySince


def test_a_slab_goes_back_after_it_has_been_empty_without_a_break() -> None:
    empty = EmptySince()
    assert empty.due(0.0, [True, True, False]) == []
    assert empty.due(EMPTY_S_MAX, [True, False, True]) == []
    assert empty.due(EMPTY_S_MAX + 1.0, [True, True, True]) == [0]
    assert empty.due(2 * EMPTY_S_MAX + 0.5, [False, True, True]) == [2]
