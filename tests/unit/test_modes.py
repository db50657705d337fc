# SPDX-License-Identifier: Apache-2.0
"""Files and directories have their rights whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from infiniswap.cli.init import _write as write_configuration
from infiniswap.control.own_certificate import DONOR, certificate_path, keep_certificate
from infiniswap.donor.daemon import _write_ready
from infiniswap.donor.drain import Drain
from infiniswap.donor.home import make_run_dir
from infiniswap.donor.serve import Ports
from infiniswap.invitation.membership import check_writable
from infiniswap.planning import history
from infiniswap.secret import write_new


@pytest.fixture(params=[0o000, 0o077], ids=["umask 0", "umask 077"], autouse=True)
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def of_secret(path: Path) -> Path:
    write_new(path, b"x")
    return path


def of_init(path: Path) -> Path:
    write_configuration(path, "", replace=True)
    return path


def of_history(path: Path) -> Path:
    history.write(path, ())
    return path


def of_drain(path: Path) -> Path:
    Drain(Mock(), int, AsyncMock(), float, path, 0.0)._keep(True)
    return path


def of_certificate(path: Path) -> Path:
    keep_certificate(path.parent, DONOR)
    return certificate_path(path.parent, DONOR)


def of_ready(path: Path) -> Path:
    make_run_dir(path.parent)
    _write_ready(path, Ports(1, 2))
    return path


def of_join(path: Path) -> Path:
    check_writable(path)
    return path


@pytest.mark.parametrize(
    "write", [of_secret, of_init, of_history, of_drain, of_certificate, of_ready, of_join]
)
def test_what_is_made_has_its_rights_whatever_the_umask_is(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "far" / "away" / "file")
    closed = 0o700 if write in (of_history, of_certificate) else 0o755
    modes = [stat.S_IMODE(made.stat().st_mode) for made in (path.parent.parent, path.parent)]
    assert modes == [0o755, closed]
    if path.exists():
        assert not path.stat().st_mode & 0o022
