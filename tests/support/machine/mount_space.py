# SPDX-License-Identifier: Apache-2.0
"""A mount name space in which something is another way than on this host."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def changed_mounts(script: str, *args: object) -> Iterator[tuple[str, ...]]:
    """What executes a command in the name space: the beginning of its command line.

    Args:
        script: changes mounts, for a shell.
        args: of the script, from `$1` on.
    """
    waits = f"{script}\necho ready && exec sleep infinity"
    command = ("unshare", "--mount", "sh", "-ec", waits, "sh", *map(str, args))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == b"ready\n"
            yield ("nsenter", f"--target={keeper.pid}", "--mount", "--")
        finally:
            keeper.kill()
