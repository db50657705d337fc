# SPDX-License-Identifier: Apache-2.0
"""How to run a program that was built with a sanitizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_TSAN_SUPPRESSIONS = Path(__file__).resolve().parents[2] / "c" / "tsan.supp"

ENV = {
    **os.environ,
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": ":".join(
        ("halt_on_error=1", "second_deadlock_stack=1", f"suppressions={_TSAN_SUPPRESSIONS}")
    ),
}


def command(build: str, argv: Sequence[str]) -> list[str]:
    """The command, in the environment that its build ("asan", "tsan" or another) needs."""
    if build == "tsan" and (setarch := shutil.which("setarch")):
        # ThreadSanitizer wants its shadow where a large address space randomisation may put
        # something else.
        return [setarch, "-R", *argv]
    return list(argv)
