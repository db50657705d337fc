# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan` for tests."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any


def second_long(argv: Sequence[str]) -> list[str]:
    """That job, and a second before it: a plan says nothing of shorter ones."""
    return ["sh", "-c", f"sleep 1; exec {shlex.join(argv)}"]


def plan_in(stdout: str) -> Any:
    """The JSON behind what the job printed."""
    return json.loads(stdout[stdout.index('{\n  "command"') :])
