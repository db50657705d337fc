# SPDX-License-Identifier: Apache-2.0
"""Where kernels and initial RAM disks are kept between runs, outside the checkout.

Every entry is a directory named after what it is and a key: a digest of everything that it is
made of. So a changed recipe makes a new entry, and what is half made never counts: an entry is
made beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from infiniswap.errors import from_oserror

_KEY_DIGITS = 12
_KEPT_S = 30 * 24 * 3600.0


def directory() -> Path:
    """INFINISWAP_VM_CACHE, or infiniswap/vm in the user's cache directory."""
    chosen = os.environ.get("INFINISWAP_VM_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "infiniswap" / "vm"


def key(*parts: str | bytes) -> str:
    """Short digest of what something is made of."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()[:_KEY_DIGITS]


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time makes an entry; the others wait for it.

    Raises:
        NotPermittedError: the cache directory cannot be written to.
        SystemCallError: likewise, for another reason.
    """
    try:
        directory().mkdir(parents=True, exist_ok=True)
        file = (directory() / f".{name}.lock").open("w")
    except OSError as error:
        raise from_oserror(
            "cannot make the cache of virtual machines",
            error,
            mend="Name another directory with INFINISWAP_VM_CACHE.",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def entry(kind: str, digest: str, make: Callable[[Path], None]) -> Path:
    """The directory KIND-DIGEST; made by `make` where it is not there.

    Others of its kind that nobody has used for a month are removed when a new one is made.

    Args:
        kind: what it is, such as "kernel-6.12".
        digest: see `key`.
        make: fills an empty directory.

    Raises:
        InfiniswapError: what `make` raises; nothing is left then.
    """
    place = directory() / f"{kind}-{digest}"
    if _use(place):
        return place
    with locked(kind):
        if _use(place):
            return place
        with tempfile.TemporaryDirectory(prefix=f".{kind}-", dir=directory()) as made:
            inner = Path(made) / "entry"
            inner.mkdir()
            make(inner)
            inner.rename(place)
        for old in directory().glob(f"{kind}-*"):
            if time.time() - old.stat().st_mtime > _KEPT_S:
                shutil.rmtree(old, ignore_errors=True)
    return place


def _use(place: Path) -> bool:
    """Whether an entry is there; its time stamp says when it was used last."""
    with contextlib.suppress(OSError):
        os.utime(place)
        return True
    return False


def clean() -> int:
    """Removes everything; returns how many bytes that was."""
    top = directory()
    if not top.is_dir():
        return 0
    size = sum(path.lstat().st_size for path in top.rglob("*") if not path.is_dir())
    shutil.rmtree(top, ignore_errors=True)
    return size
