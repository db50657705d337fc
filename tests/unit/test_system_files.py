# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.files: locks on files whose last holder removes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infiniswap.errors import SystemCallError
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


def test_a_lock_is_taken_although_its_directory_goes_while_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, made = tmp_path / "run" / "lock", []
    path.parent.mkdir()
    real = os.mkdir

    def mkdir(*args: Any, **options: Any) -> None:
        made.append(args)
        if len(made) > 1:
            return real(*args, **options)
        path.parent.rmdir()
        raise FileExistsError

    monkeypatch.setattr(os, "mkdir", mkdir)
    lock = try_lock(path)
    assert lock is not None
    os.close(lock)


def test_a_lock_that_can_never_be_made_is_an_error_and_not_held(tmp_path: Path) -> None:
    lock, directory = tmp_path / "lock", tmp_path / "file"
    lock.symlink_to(tmp_path / "absent" / "lock")
    directory.touch()
    for path in (lock, directory / "lock"):
        with pytest.raises(SystemCallError, match="cannot make the lock file"):
            try_lock(path)
