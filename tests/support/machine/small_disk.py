# SPDX-License-Identifier: Apache-2.0
"""A small file system of a test's own, which it may fill, freeze or read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from infiniswap.units import MIB
from support.devices.cluster import run


@contextlib.contextmanager
def small_disk(root: Path, mib: int, *options: str) -> Iterator[Path]:
    """Mounts an ext4 on a loop device below `root`.

    Args:
        root: a directory of the test, which holds the image and the mount point meanwhile.
        mib: size of the image.
        options: further ones of mkfs.ext4.
    """
    image, point = root / "small.img", root / "small"
    with image.open("wb") as file:
        file.truncate(mib * MIB)
    run("mkfs.ext4", "-q", "-F", *options, "-E", "nodiscard,lazy_itable_init=0", image)
    run("fallocate", "--length", f"{mib}M", image)  # now, as mkfs makes holes where zeros are
    point.mkdir()
    run("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        run("umount", point)
        point.rmdir()
        image.unlink()
