# SPDX-License-Identifier: Apache-2.0
"""A command that ends by itself, with all that it has said."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

WAIT_S = 200.0


def ran(
    *argv: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    says: str = "",
    wait_s: float = WAIT_S,
) -> subprocess.CompletedProcess[str]:
    """Whether it has failed is the caller's to see. `says` is its standard input."""
    return subprocess.run(
        argv,
        env=env,
        cwd=cwd,
        input=says,
        timeout=wait_s,
        capture_output=True,
        text=True,
        check=False,
    )
