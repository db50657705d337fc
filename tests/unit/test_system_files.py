# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.files: locks on files whose last holder removes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infiniswap.system.files import try_lock


def test_a_lock_is_taken_although_its_directory_is_removed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, opened = tmp_path / "run" / "lock", []
    real = os.open

    def open_late(*args: Any, **options: Any) -> int:
        opened.append(args)
        if len(opened) == 1:
            path.parent.rmdir()
        return real(*args, **options)

    monkeypatch.setattr(os, "open", open_late)
    lock = try_lock(path)
    assert lock is not None
    assert try_lock(path) is None  # it is held
    os.close(lock)
