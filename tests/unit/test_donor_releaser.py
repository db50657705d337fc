# SPDX-License-Identifier: Apache-2.0
"""What stays behind to give a daemon's slabs back, with a command that only says how it was called;
tests/integration/test_donor_restart.py has the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from infiniswap.donor.releaser import Releaser
from infiniswap.system import programs
from infiniswap.units import MIB


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command writes its arguments, and one of its settings."""
    path = tmp_path / "told"
    script = f'echo "$INFINISWAP_DAEMON_RUN_DIR $*" > {path}'
    monkeypatch.setattr(programs, "infiniswap", lambda *args: ["sh", "-c", script, "sh", *args])
    return path


def test_a_daemon_that_was_killed_could_say_nothing(told: Path, tmp_path: Path) -> None:
    """So the time is the grace period, and not none: a successor may come."""
    releaser = Releaser(tmp_path / "home", 12.5, 16 * MIB, None)
    process = releaser._process
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()  # what the end of the daemon does
    assert process.wait(60) == 0
    wanted = f"{tmp_path} daemon --release --donor home --headroom {16 * MIB} --after 12.5\n"
    assert told.read_text() == wanted


def test_a_daemon_that_stops_says_how_long_to_wait(told: Path, tmp_path: Path) -> None:
    releaser = Releaser(tmp_path / "home", 12.5, 0, Path("/a/cgroup"))
    releaser.release(0)  # waits
    assert told.read_text().endswith(" --headroom 0 --memory-cgroup /a/cgroup --after 0\n")
    releaser.close()


def test_a_daemon_that_fails_at_its_start_leaves_no_home(told: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    releaser = Releaser(tmp_path / "home", 12.5, 0, None)
    releaser.close()
    assert told.read_text().endswith(" --after 0\n")
    releaser._process.wait(60)
