# SPDX-License-Identifier: Apache-2.0
"""infiniswap.donor.requests: a method for each request of a consumer."""

from __future__ import annotations

from infiniswap.control import messages as m
from infiniswap.donor.requests import Requests


def test_every_request_of_a_consumer_is_carried_out_in_one_way() -> None:
    handled = [*Requests.AT_ONCE, *Requests.IN_TURN]
    assert len(handled) == len(set(handled))
    assert set(handled) == set(m.ConsumerRequest.__subclasses__())
    # Those that wait for their lease name it.
    assert all("lease" in kind.__struct_fields__ for kind in Requests.IN_TURN)
