# SPDX-License-Identifier: Apache-2.0
"""What a killed run of the tests leaves, and the next one's look at that."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from support.devices.cluster import LOCK, lock_files

from infiniswap.system.mounts import unmount


@pytest.mark.requires_root
@pytest.mark.requires_fuse
def test_a_dead_mount_hides_no_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINISWAP_TEST_DISK", str(tmp_path))
    dead, killed = tmp_path / "isw-a", tmp_path / "isw-b"
    dead.mkdir()
    killed.mkdir()
    (killed / LOCK).touch()
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
    code = ctypes.CDLL(None, use_errno=True).mount(b"dead", bytes(dead), b"fuse", 0, options)
    os.close(fuse)
    assert code == 0, os.strerror(ctypes.get_errno())
    try:
        with pytest.raises(OSError, match="not connected"):
            (dead / LOCK).stat()
        assert killed / LOCK in lock_files()
    finally:
        unmount(dead, lazy=True)
