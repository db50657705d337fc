# SPDX-License-Identifier: Apache-2.0
"""matplotlib, where it is installed and runs."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any | None:
    """matplotlib's pyplot, which draws into files alone; None where there is none."""
    try:
        import matplotlib
    except (ImportError, RuntimeError):  # numpy refuses the processor of some virtual machines
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found
