# SPDX-License-Identifier: Apache-2.0
"""Limits on a block device: texts, and that what was there comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.errors import SystemCallError, UnavailableError, UsageError
from infiniswap.system import throttle
from infiniswap.system.throttle import CLOUD_VOLUME, IoLimits

NAMES = ("read_bps", "write_bps", "read_iops", "write_iops")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc, root = tmp_path / "proc", tmp_path / "blkio"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (proc / "self" / "mountinfo").write_text(f"1 0 0:1 / {root} rw - cgroup cgroup rw,blkio\n")
    for name in NAMES:
        (root / f"blkio.throttle.{name}_device").write_text("8:0 77\n")
    return proc


def _now(root: Path) -> list[str]:
    return [(root / f"blkio.throttle.{name}_device").read_text() for name in NAMES]


def test_limits_are_set_and_put_back(proc: Path, tmp_path: Path) -> None:
    with throttle.throttled("7:1", CLOUD_VOLUME, proc=proc):
        assert _now(tmp_path / "blkio") == [
            "7:1 125000000",
            "7:1 125000000",
            "7:1 3000",
            "7:1 3000",
        ]
    assert _now(tmp_path / "blkio") == ["7:1 0"] * 4


def test_what_was_there_comes_back_also_after_an_error(proc: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="in between"),
        throttle.throttled("8:0", CLOUD_VOLUME, proc=proc),
    ):
        raise RuntimeError("in between")
    assert _now(tmp_path / "blkio") == ["8:0 77"] * 4


def test_nothing_stays_limited_when_one_file_refuses(proc: Path, tmp_path: Path) -> None:
    last = tmp_path / "blkio" / "blkio.throttle.write_iops_device"
    last.unlink()
    with pytest.raises(SystemCallError), throttle.throttled("7:1", CLOUD_VOLUME, proc=proc):
        pytest.fail("must not get here")
    first = tmp_path / "blkio" / "blkio.throttle.read_bps_device"
    assert first.read_text() == "8:0 77\n"


def test_version_2_needs_a_cgroup(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "mountinfo").write_text("1 0 0:1 / / rw - cgroup2 none rw\n")
    with pytest.raises(UnavailableError), throttle.throttled("7:1", CLOUD_VOLUME, proc=proc):
        pytest.fail("must not get here")
    job = tmp_path / "job"
    job.mkdir()
    (job / "io.max").write_text("7:1 rbps=5 wbps=max riops=max wiops=max\n")
    with throttle.throttled("7:1", IoLimits(write_bytes_per_s=9), cgroup_v2=job, proc=proc):
        assert (job / "io.max").read_text() == "7:1 rbps=max wbps=9 riops=max wiops=max"
    assert (job / "io.max").read_text() == "7:1 rbps=5 wbps=max riops=max wiops=max"


@pytest.mark.parametrize("device", ["", "loop0", "7:0 5", "7", "/dev/loop0"])
def test_wrong_device_numbers(proc: Path, device: str) -> None:
    with pytest.raises(UsageError), throttle.throttled(device, CLOUD_VOLUME, proc=proc):
        pytest.fail("must not get here")


def test_a_limit_of_zero(proc: Path) -> None:
    with pytest.raises(UsageError), throttle.throttled("7:1", IoLimits(0), proc=proc):
        pytest.fail("must not get here")


LIMIT = st.none() | st.integers(1, 2**63)


@given(LIMIT, LIMIT, LIMIT, LIMIT)
def test_version_2s_text_comes_back(
    a: int | None, b: int | None, c: int | None, d: int | None
) -> None:
    names = ("rbps", "wbps", "riops", "wiops")
    pairs = " ".join(
        f"{name}={'max' if value is None else value}"
        for name, value in zip(names, (a, b, c, d), strict=True)
    )
    assert throttle.parse_v2(f"8:0 rbps=1\n7:1 {pairs}\n", "7:1") == IoLimits(a, b, c, d)


@given(st.text())
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    throttle.parse_v1(text, "7:1")
    throttle.parse_v2(text, "7:1")
