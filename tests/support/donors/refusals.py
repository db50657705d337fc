# SPDX-License-Identifier: Apache-2.0
"""A donor's refusals of requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from infiniswap.errors import RequestRefusedError


@contextlib.contextmanager
def refused(reason: str, words: str = "") -> Iterator[None]:
    """For that reason (REFUSED_*), with an error that matches `words`."""
    with pytest.raises(RequestRefusedError, match=words or None) as caught:
        yield
    assert caught.value.reason == reason
