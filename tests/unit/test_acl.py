# SPDX-License-Identifier: Apache-2.0
"""infiniswap.system.acl: who is let in, as the kernel decides it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.machine.ran import ran

from infiniswap.system import acl

pytestmark = [pytest.mark.requires_root, pytest.mark.requires_tool("setpriv")]

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """A socket of root's in a directory that everybody may enter."""
    path = Path("/run") / f"isw-acl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as sock:
        before = os.umask(0o177)
        sock.bind(str(path))
        os.umask(before)
        sock.listen()
        yield path
    path.unlink()


@pytest.mark.parametrize("grant", [acl.let_group_in, acl.let_user_in])
def test_one_is_let_in_and_nobody_else(listening: Path, grant: Callable[[Path, int], None]) -> None:
    def connects(number: int) -> bool:
        ids = (f"--reuid={number}", f"--regid={number}", "--clear-groups")
        done = ran("setpriv", *ids, "/usr/bin/python3", "-I", "-c", CONNECT, listening)
        assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
        return done.returncode == 0

    assert not connects(4711)
    grant(listening, 4711)
    assert connects(4711)
    assert not connects(4712)
    assert listening.stat().st_mode & 0o007 == 0


def test_the_group_that_is_let_in_is_read_back(listening: Path) -> None:
    assert acl.group_of(listening) == listening.stat().st_gid
    acl.let_group_in(listening, 4321)
    assert (acl.group_of(listening), listening.stat().st_gid) == (4321, os.getegid())
    acl.let_user_in(listening, 4321)
    assert acl.group_of(listening) == listening.stat().st_gid
