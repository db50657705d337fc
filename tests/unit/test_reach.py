# SPDX-License-Identifier: Apache-2.0
"""Paths that another user could lead elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infiniswap.system.reach import replaceable_by

pytestmark = pytest.mark.requires_root

UID = 65534


def theirs(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    os.chown(path, UID, UID)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of root's alone, as are the directories above it, or sticky."""
    assert replaceable_by(tmp_path / "x", UID, UID) is None
    return tmp_path


def test_a_file_in_the_users_directory(root: Path) -> None:
    own = theirs(root / "own")
    (own / "file").touch()
    (own / "below").mkdir()
    for path in (own / "file", own / "missing", own / "below" / "file", own / "no" / "file"):
        assert replaceable_by(path, UID, UID) == own
    assert replaceable_by(own, UID, UID) is None, "it is in root's directory itself"
    assert replaceable_by(own / "file", 1, 1) is None


def test_a_users_file_in_a_directory_of_roots(root: Path) -> None:
    path = root / "file"
    path.touch()
    os.chown(path, UID, UID)
    assert replaceable_by(path, UID, UID) is None


@pytest.mark.parametrize("target", ["own/file", "{root}/own/file", "./own/../own/file"])
def test_a_link_of_roots_that_leads_there(root: Path, target: str) -> None:
    own = theirs(root / "own")
    (own / "file").touch()
    for name, to in (("link", target.format(root=root)), ("second", "link"), ("way", "own")):
        (root / name).symlink_to(to)
    for path in (root / "link", root / "second", root / "way" / "file"):
        assert replaceable_by(path, UID, UID) == own
    (root / "circle").symlink_to("circle")
    assert replaceable_by(root / "circle", UID, UID) is None


def test_what_modes_allow(root: Path) -> None:
    shared = root / "shared"
    shared.mkdir()
    (shared / "file").touch()
    for mode, gid, entry, found in (
        (0o755, UID, "file", None),
        (0o775, UID, "file", shared),
        (0o775, 0, "file", None),
        (0o777, 0, "file", shared),
        (0o1777, 0, "file", None),  # /tmp
        (0o1777, 0, "missing", shared),
    ):
        os.chown(shared, 0, gid)
        shared.chmod(mode)
        assert replaceable_by(shared / entry, UID, UID) == found, (oct(mode), gid, entry)
    os.chown(shared / "file", UID, UID)
    assert replaceable_by(shared / "file", UID, UID) == shared
