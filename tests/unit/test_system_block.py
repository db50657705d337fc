# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.block: what lies below a block device, in a made-up /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infiniswap.system.block import is_encrypted


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """A /sys with no device yet."""
    (tmp_path / "dev/block").mkdir(parents=True)
    return tmp_path


def device(sys: Path, name: str, uuid: str = "", below: tuple[str, ...] = ()) -> Path:
    directory = sys / name
    (directory / "slaves").mkdir(parents=True)
    if uuid:
        (directory / "dm").mkdir()
        (directory / "dm/uuid").write_text(f"{uuid}\n")
    for each in below:
        (directory / "slaves" / each).symlink_to(sys / each)
    return directory


@pytest.mark.parametrize(
    ("uuids", "expected"),
    [
        (("", ""), False),
        (("CRYPT-LUKS2-1", "CRYPT-PLAIN-2"), True),
        (("CRYPT-LUKS2-1", "LVM-2"), False),
    ],
)
def test_an_area_is_encrypted_if_all_below_it_is(
    sys: Path, uuids: tuple[str, ...], expected: bool
) -> None:
    names = tuple(f"dm-{n}" for n in range(len(uuids)))
    for name, uuid in zip(names, uuids, strict=True):
        device(sys, name, uuid)
    top = device(sys, "dm-9", "LVM-3", names)
    file = sys / "swapfile"
    file.touch()
    number = file.stat().st_dev
    (sys / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(top)
    assert is_encrypted(file, sys=sys) is expected
    (top / "loop").mkdir()
    (top / "loop/backing_file").write_text(f"{sys}/gone\n")
    with pytest.raises(OSError, match="No such file"):
        is_encrypted(file, sys=sys)


def test_a_file_on_btrfs_is_not_called_unencrypted(sys: Path) -> None:
    file = sys / "swapfile"
    file.touch()  # the number of its file system is that of no block device here
    assert is_encrypted(file, sys=sys) is None
