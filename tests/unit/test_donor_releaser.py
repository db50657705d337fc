# SPDX-License-Identifier: Apache-2.0
"""What stays behind to give a daemon's slabs back, with a command that only says how it was called;
tests/integration/test_donor_restart.py has the real one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.configs import configured
from support.devices.cluster import until

from infiniswap.donor.memory import MemoryFigures
from infiniswap.donor.pool_limits import pool_limits
from infiniswap.donor.releaser import Releaser
from infiniswap.system import programs
from infiniswap.units import GIB, MIB, PAGE_BYTES


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
    options = f"--donor home --config /dev/null --headroom {16 * MIB} --after 12.5"
    assert told.read_text() == f"{tmp_path} daemon --release {options}\n"


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_signal_that_ends_the_daemon_spares_the_releaser(
    told: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """`pkill -f "infiniswap daemon"` reaches both."""
    releaser = Releaser(tmp_path / "home", 12.5, 0, None)
    process = releaser._process
    status = Path(f"/proc/{process.pid}/status")
    ignored = 1 << (number - 1)
    until(lambda: _signals(status) & ignored, "a shell that has set its signals up")
    process.send_signal(number)
    releaser.release(0)
    assert told.read_text().endswith(" --after 0\n")


def _signals(status: Path) -> int:
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("SigIgn:")]
    return int(line.split()[1], 16)


def test_the_log_tells_of_a_home_that_was_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(programs, "infiniswap", lambda *args: ["sh", "-c", "exit 3", "sh", *args])
    Releaser(tmp_path / "home", 12.5, 0, None).release(0)
    assert f"stays mounted at {tmp_path / 'home'}" in caplog.text
    assert "infiniswap daemon --release" in caplog.text


def test_an_automatic_headroom_is_whole_pages() -> None:
    """The releaser gets it as a setting, which refuses other sizes."""
    figures = MemoryFigures(total_bytes=8 * GIB + 1024, available_bytes=8 * GIB)
    limits = pool_limits(configured(policy__headroom_fraction=0.123), figures)
    assert limits.headroom_bytes % PAGE_BYTES == 0
    assert limits.headroom_bytes > 0.122 * figures.total_bytes
