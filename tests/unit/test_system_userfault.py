# SPDX-License-Identifier: Apache-2.0
"""Which hosts can do far memory, by kernel release, C library and /dev/userfaultfd."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from infiniswap.system.userfault import Obstacle, far_obstacle, kernel_obstacle

ALL_FEATURES = 0x1FFFF
MOVE = 1 << 16
POISON = 1 << 14


def host(
    tmp_path: Path,
    *,
    release: str = "7.0.1",
    libc: str = "glibc 2.36",
    features: int = ALL_FEATURES,
) -> Obstacle | None:
    """What keeps a host with these from far memory; its /dev/userfaultfd is a plain file."""
    device = tmp_path / "userfaultfd"
    device.touch()
    return far_obstacle(
        release=release, libc=lambda: libc, device=device, features=lambda _fd: features
    )


@pytest.mark.parametrize(
    "release",
    [
        *("6.12.43+deb13-amd64", "6.12.100", "6.15.11", "6.18.20", "6.18.44-cloud", "6.19.10"),
        *("7.0", "7.0.0-14-generic", "7.2-rc1", "8.1.3"),
    ],
)
def test_kernels_with_every_fix_are_taken(release: str) -> None:
    assert kernel_obstacle(release) is None


@pytest.mark.parametrize(
    ("release", "lacks"),
    [
        ("6.8.0-45-generic", "CVE-2025-21984"),
        ("6.12.19", "CVE-2025-21984"),
        ("6.12.20", "CVE-2025-38242"),
        ("6.12.36", "CVE-2025-38242"),
        ("6.12.37", "aba6faec0103"),
        ("6.12.42+deb13-amd64", "aba6faec0103"),
        ("6.13.12", "CVE-2025-38242"),
        ("6.14.11", "CVE-2025-38242"),
        ("6.15.10", "aba6faec0103"),
        ("6.16.12", "CVE-2026-31397"),
        ("6.17.13", "CVE-2026-31397"),
        ("6.18.19", "CVE-2026-31397"),
        ("6.19.9", "CVE-2026-31397"),
        ("7.0-rc3", "CVE-2026-31397"),
        ("7.0.0-rc7+", "CVE-2026-31397"),
    ],
)
def test_kernels_that_lack_a_fix_are_refused(release: str, lacks: str) -> None:
    found = kernel_obstacle(release)
    assert found is not None
    assert release in found.what
    assert lacks in found.what
    assert "6.12.43" in found.mend


@pytest.mark.parametrize("release", ["6.1.0-18-amd64", "6.7.12", "5.15.0"])
def test_kernels_without_move_are_refused(release: str) -> None:
    found = kernel_obstacle(release)
    assert found is not None
    assert "UFFDIO_MOVE came with Linux 6.8" in found.what
    assert f"Linux {'.'.join(release.split('.')[:2])} " in found.what


def test_release_without_number_is_refused() -> None:
    found = kernel_obstacle("custom")
    assert found is not None
    assert "'custom'" in found.what


def test_host_with_everything_has_no_obstacle(tmp_path: Path) -> None:
    assert host(tmp_path) is None


def test_other_c_library_is_refused(tmp_path: Path) -> None:
    found = host(tmp_path, libc="")
    assert found is not None
    assert "glibc" in found.what


def test_missing_device_node_is_an_obstacle(tmp_path: Path) -> None:
    found = far_obstacle(release="7.0", device=tmp_path / "userfaultfd")
    assert found is not None
    assert f"there is no {tmp_path}/userfaultfd" in found.what
    assert "--device /dev/userfaultfd" in found.mend


def test_device_node_that_cannot_be_opened(tmp_path: Path) -> None:
    found = far_obstacle(release="7.0", device=tmp_path)  # a directory refuses root as well
    assert found is not None
    assert f"{tmp_path} cannot be opened (Is a directory)" in found.what


def test_sandbox_that_forbids_userfaultfd(tmp_path: Path) -> None:
    def forbidden(_fd: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    device = tmp_path / "userfaultfd"
    device.touch()
    found = far_obstacle(release="7.0", device=device, features=forbidden)
    assert found is not None
    assert "makes no userfaultfd (Operation not permitted)" in found.what
    assert "sandbox" in found.mend


def test_missing_features_are_named(tmp_path: Path) -> None:
    found = host(tmp_path, features=ALL_FEATURES & ~(MOVE | POISON))
    assert found is not None
    assert "lacks POISON, MOVE" in found.what


def test_refusal_is_one_text_with_the_remedy() -> None:
    found = kernel_obstacle("6.1.0")
    assert found is not None
    assert str(found) == f"{found.what}. {found.mend}"


def test_this_kernel_is_asked_at_run_time() -> None:
    if not os.access("/dev/userfaultfd", os.R_OK | os.W_OK) or kernel_obstacle(os.uname().release):
        pytest.skip("needs /dev/userfaultfd of a kernel that moves pages")
    # With a release that is judged well, what is left is what the kernel itself offers.
    assert far_obstacle(release="7.0") is None
