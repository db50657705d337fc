# SPDX-License-Identifier: Apache-2.0
"""Limits on a block device, as the kernel's files want them."""

from __future__ import annotations

from pathlib import Path

from infiniswap.system.throttle import (
    CLOUD_VOLUME,
    IoLimits,
    blkio_root,
    set_limits_v1,
    set_limits_v2,
)

NAMES = ("read_bps", "write_bps", "read_iops", "write_iops")


def test_version_1_has_a_file_for_each_limit(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "blkio"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mountinfo").write_text(f"1 0 0:1 / {root} rw - cgroup cgroup rw,blkio\n")
    assert blkio_root(proc=proc) is None, "the kernel cannot limit devices"
    root.mkdir()
    files = [root / f"blkio.throttle.{name}_device" for name in NAMES]
    for file in files:
        file.touch()
    assert blkio_root(proc=proc) == root
    for limits, values in (
        (CLOUD_VOLUME, (125_000_000, 125_000_000, 3000, 3000)),
        (IoLimits(), (0, 0, 0, 0)),
    ):
        set_limits_v1(root, "7:1", limits)
        assert [file.read_text() for file in files] == [f"7:1 {value}" for value in values]


def test_version_2_has_one_file(tmp_path: Path) -> None:
    (tmp_path / "io.max").touch()
    set_limits_v2(tmp_path, "7:1", IoLimits(write_bytes_per_s=9))
    assert (tmp_path / "io.max").read_text() == "7:1 rbps=max wbps=9 riops=max wiops=max"
