# SPDX-License-Identifier: Apache-2.0
"""tools/vm itself, and that what happens in a guest is told outside.

Each test boots machines of its own, so what the others nearly say as well is for full runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from qemu_vm import kernels, plan
from support.devices.cluster import children
from support.machine.guestrun import ROOT

from infiniswap.errors import InfiniswapError, SystemCallError

pytestmark = [pytest.mark.requires_native, pytest.mark.timeout(1800)]
TOOL = str(ROOT / "tools" / "vm")
WAIT_S = 600.0


@pytest.fixture(autouse=True, scope="module")
def _machines(in_ci: bool) -> None:
    try:
        plan.check_host()
        kernels.get(kernels.DEFAULT)
    except InfiniswapError as error:
        if in_ci:
            pytest.fail(f"CI must have it: needs virtual machines: {error}", pytrace=False)
        pytest.skip(f"needs virtual machines: {error}")


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_status_and_both_streams_come_out(tmp_path: Path) -> None:
    script = "echo out; echo err >&2; echo kept >/run/vm/share/f; echo x >tests/no-such; exit 7"
    argv = [TOOL, "--share", str(tmp_path), "--", "sh", "-c", script]
    done = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert (tmp_path / "f").read_text() == "kept\n"
    assert not (ROOT / "tests/no-such").exists()


@pytest.mark.full
def test_output_streams_and_a_killed_one_leaves_no_qemu() -> None:
    argv = [TOOL, "--", "sh", "-c", "echo ready; sleep 3600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as tool:
        assert tool.stdout is not None
        try:
            assert tool.stdout.readline() == b"ready\n"
            (child,) = children(tool.pid)
            line = Path(f"/proc/{child}/cmdline").read_text()
            assert "qemu-system" in line
            found = re.search(r"path=([^,\0]*/runs/[^,\0]*),", line)
            assert found is not None
            mine = Path(found[1])
            assert mine.is_dir()
        finally:
            tool.kill()
        tool.wait(WAIT_S)
    _until(lambda: not Path(f"/proc/{child}").exists())
    # What is left is a directory, and any next call removes it.
    subprocess.run([TOOL, "--", "true"], check=True, timeout=WAIT_S)
    assert not mine.exists()


@pytest.mark.full
def test_an_ended_one_takes_everything_along() -> None:
    argv = [TOOL, "--", "sh", "-c", "echo ready; sleep 3600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as tool:
        assert tool.stdout is not None
        tool.stdout.readline()
        (child,) = children(tool.pid)
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(WAIT_S) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.full
def test_a_panic_is_told_with_what_the_kernel_said() -> None:
    argv = [TOOL, "--", "sh", "-c", "echo c >/proc/sysrq-trigger; sleep 600"]
    done = subprocess.run(argv, check=False, capture_output=True, timeout=WAIT_S)
    assert done.returncode == SystemCallError.exit_code
    assert b"machine h1 panicked" in done.stderr
    assert b"sysrq" in done.stderr


@pytest.mark.full
def test_machines_reach_each_other_by_name() -> None:
    script = "vm-barrier up || exit 9"
    script += "; for h in h1 h2 h3; do ping -c 1 -w 60 $h >/dev/null || exit 1; done"
    script += "; vm-barrier end || exit 9"
    argv = [TOOL, "--hosts", "3", "--memory", "384M", "--", "/run/vm/busybox", "sh", "-c"]
    script += '; echo "I am $INFINISWAP_VM_HOST"; [ $INFINISWAP_VM_HOST != h2 ] || exit 5'
    done = subprocess.run(
        [*argv, script], check=False, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 5, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"h{n}: I am h{n}" for n in (1, 2, 3)]


_WATCHES_ITS_CLOCK = """
import sys, time
print("ready", flush=True)
longest, last, end = 0.0, time.monotonic(), time.monotonic() + 5
while last < end:
    now = time.monotonic()
    longest, last = max(longest, now - last), now
print(longest)
"""


@pytest.mark.full
def test_an_emulated_guest_that_gets_no_processor_time_sees_none_pass() -> None:
    stopped_s = 4.0
    argv = [TOOL, "--accel", "tcg", "--", sys.executable, "-c", _WATCHES_ITS_CLOCK]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as tool:
        assert tool.stdout is not None
        assert tool.stdout.readline() == b"ready\n"
        (child,) = children(tool.pid)
        os.kill(child, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(child, signal.SIGCONT)
        assert float(tool.stdout.readline()) < stopped_s / 2
        assert tool.wait(WAIT_S) == 0


# As ruff and mypy want it: they may look at the tree meanwhile.
_SAMPLE = """\
import pytest


def test_good() -> None:
    pass


def test_bad() -> None:
    print("said before")
    left, right = 2, 3
    assert left == right


def test_skipped() -> None:
    pytest.skip("because")


def test_after_it() -> None:
    pass
"""
_PANICS = """

def test_panics() -> None:
    Path("/proc/sysrq-trigger").write_text("c")


def test_in_another_machine() -> None:
    pass
"""


@pytest.mark.parametrize("panics", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_fails_in_a_guest_is_shown_outside(panics: bool) -> None:
    # Among the guest's tests, as those are found by their place; never collected by the suite.
    sample = ROOT / "tests/vm/guest" / f"sample_{os.getpid()}.py"
    imports = "from pathlib import Path\n\n" if panics else ""
    sample.write_text(imports + _SAMPLE + _PANICS * panics)
    try:
        argv = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(sample)]
        done = subprocess.run(
            argv, cwd=ROOT, check=False, capture_output=True, text=True, timeout=WAIT_S * 2
        )
    finally:
        sample.unlink()
    out = done.stdout
    assert done.returncode == 1, out
    assert "test_good[6.12] PASSED" in out
    assert "assert 2 == 3" in out
    assert "said before" in out
    assert "test_skipped[6.12] SKIPPED (because)" in out
    assert "test_after_it[6.12] PASSED" in out
    if panics:
        assert "machine h1 panicked" in out
        assert "test_in_another_machine[6.12] PASSED" in out
    assert f"{1 + panics} failed, {2 + panics} passed, 1 skipped" in out
