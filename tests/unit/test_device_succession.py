# SPDX-License-Identifier: Apache-2.0
"""A standby whose predecessor's device is gone says so: nobody can take over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from infiniswap.device.succession.standby import HopelessError, prepare_front_end
from infiniswap.errors import EngineError, InfiniswapError, NotFoundError

GONE = NotFoundError("there is no device of an earlier process")


def attachment(*failures: InfiniswapError) -> Any:
    """One whose front end fails so, and then can be prepared."""
    left = list(failures)

    def prepare_front_end(_engine: object, _note: bytes) -> None:
        if left:
            raise left.pop(0)

    return SimpleNamespace(kernel=SimpleNamespace(prepare=prepare_front_end), left=left)


def test_what_is_gone_for_good_is_hopeless() -> None:
    with pytest.raises(HopelessError, match="no device of an earlier process"):
        prepare_front_end(attachment(GONE, GONE), cast(Any, None), b"", look_again_s=0.0)


def test_what_was_not_seen_for_a_moment_is_not_gone() -> None:
    one = attachment(GONE)
    assert prepare_front_end(one, cast(Any, None), b"", look_again_s=0.0) is one
    assert not one.left


def test_what_this_process_cannot_do_another_one_may() -> None:
    with pytest.raises(EngineError, match="other code"):
        prepare_front_end(
            attachment(GONE, EngineError("other code", code=1)),
            cast(Any, None),
            b"",
            look_again_s=0.0,
        )
