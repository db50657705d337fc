# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run` on a terminal: the live line, Ctrl-C, Ctrl-Z, and a window that is closed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from cluster import NEEDS_SWAP, process_state, until, wait_ended
from runs import Runner, StartTerminal, touch

pytestmark = [*NEEDS_SWAP, pytest.mark.requires_tool("setsid")]

COUNT = """
import os, signal, time
counts = []
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: counts.append(signal.Signals(number).name))
print("ready", os.getpid(), flush=True)
open(os.environ["ISW_TEST_OUT"] + ".ready", "w").close()
while not counts:
    time.sleep(0.01)
time.sleep(0.5)  # for one too many
with open(os.environ["ISW_TEST_OUT"], "w") as file:
    file.write(",".join(counts))
raise SystemExit(7)
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where COUNT writes."""
    return tmp_path / "out"


@pytest.mark.parametrize(("key", "name"), [("\x03", "SIGINT"), ("\x1c", "SIGQUIT")])
def test_a_key_reaches_the_job_exactly_once(
    device_runner: Runner, terminal: StartTerminal, out: Path, key: str, name: str
) -> None:
    argv = device_runner.argv(sys.executable, "-c", COUNT)
    window = terminal(argv, device_runner, ISW_TEST_OUT=str(out))
    window.expect("ready")
    window.type(key)
    assert window.wait() == 7
    assert out.read_text() == name
    assert "exit code 7" in window.text


def test_ctrl_c_ends_a_job_that_does_not_care(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    # `exec`: dash forgets a signal that comes while it forks.
    script = "echo ready; exec sleep 1000"
    window = terminal(device_runner.argv("sh", "-c", script), device_runner)
    window.expect("ready")
    window.type("\x03")
    assert window.wait() == 128 + signal.SIGINT
    assert "Traceback" not in window.text


def test_the_live_line_shows_memory_and_is_taken_away(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    argv = device_runner.argv(*touch(48, 1 << 30), local="32M")
    window = terminal(argv, device_runner)
    window.expect("of 32.0 MiB local", count=2)
    window.expect("page-in", count=2)  # the whole of it
    lines = [part for part in window.text.split("\r") if "MiB local" in part]
    assert all(part.startswith("\x1b[Kinfiniswap: ") for part in lines), window.text
    assert all(len(part) <= len("\x1b[K") + 119 + len("round 9\n") for part in lines)
    assert "paged out" in lines[-1]
    assert "page-in" in lines[-1]
    window.type("\x03")
    assert window.wait() == 1 or "KeyboardInterrupt" in window.text
    # Nothing of it is left on the screen when the closing lines come.
    assert "\r\x1b[K" in window.text[window.text.rindex("of 32.0 MiB local") :]


def test_quiet_has_no_live_line(device_runner: Runner, terminal: StartTerminal) -> None:
    argv = device_runner.argv("sh", "-c", "sleep 2.5; echo done", options=("--quiet",))
    window = terminal(argv, device_runner)
    assert window.wait() == 0
    assert window.text == "done\r\n"


def test_a_job_that_reads_the_terminal_gets_what_is_typed(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    script = 'echo ready; read line; echo "got <$line>"; stty size; tty'
    window = terminal(device_runner.argv("sh", "-c", script), device_runner)
    window.expect("ready")
    window.type("a line\n")
    assert window.wait() == 0
    assert "got <a line>" in window.text
    assert "40 120" in window.text
    assert "/dev/pts/" in window.text


@pytest.mark.requires_tool("bash")
def test_ctrl_z_and_fg(device_runner: Runner, terminal: StartTerminal) -> None:
    window = terminal(["bash", "--norc", "--noprofile", "-i"], device_runner, PS1="shell> ")
    window.expect("shell> ")
    script = 'echo rea""dy $$; read line; echo "got <$line>"; exit 9'
    argv = device_runner.argv("sh", "-c", script)
    window.type(" ".join(f"'{part}'" for part in argv) + "\n")
    pid = int(window.line("ready "))
    window.type("\x1a")
    window.expect("Stopped")
    until(lambda: stopped(pid), "the job to be stopped")
    window.type("echo still the shell\n")
    window.expect("still the shell", count=2)
    window.type("fg\n")
    until(lambda: not stopped(pid), "the job to go on")
    window.type("a line\n")
    window.expect("got <a line>")
    window.expect("exit code 9")
    window.type("echo code $?\n")
    window.expect("code 9", count=2)
    window.type("exit\n")
    window.wait()


def stopped(pid: int) -> bool:
    return process_state(pid) == "T"


@pytest.mark.requires_tool("bash")
def test_in_the_background_the_terminal_is_left_alone(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    window = terminal(["bash", "--norc", "--noprofile", "-i"], device_runner, PS1="shell> ")
    window.expect("shell> ")
    argv = device_runner.argv("sh", "-c", "sleep 3; exit 9")
    window.type(" ".join(f"'{part}'" for part in argv) + " & wait $!; echo co''de $?\n")
    window.expect("code 9")
    assert "MiB local, 0 B paged out, page-in" not in window.text
    window.type("exit\n")
    window.wait()


def test_a_closed_window_ends_the_job(device_runner: Runner, terminal: StartTerminal) -> None:
    """The terminal tells only the leader of the session: here `run` itself."""
    window = terminal(
        device_runner.argv("sh", "-c", "echo ready $$; exec sleep 1000"), device_runner
    )
    pid = int(window.line("ready "))
    window.hang_up()
    wait_ended(pid)
    assert window.wait() == 128 + signal.SIGHUP


def test_a_job_hears_of_the_closed_window_once(
    device_runner: Runner, terminal: StartTerminal, out: Path
) -> None:
    argv = device_runner.argv(sys.executable, "-c", COUNT)
    window = terminal(argv, device_runner, ISW_TEST_OUT=str(out))
    # Not by what it writes: the terminal may have that before the write has returned.
    until(Path(f"{out}.ready").exists, "the job")
    window.hang_up()
    assert window.wait() == 7
    assert out.read_text() == "SIGHUP"
