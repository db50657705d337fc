# SPDX-License-Identifier: Apache-2.0
"""Open files of the test process itself, for tests that hold thousands of connections."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def files_allowed(soft: int) -> Iterator[None]:
    """Sets the soft limit, which processes started meanwhile inherit; skips where it cannot."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < soft:
        pytest.skip(f"needs a hard limit of {soft} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
