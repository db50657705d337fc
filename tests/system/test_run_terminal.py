# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run` on a terminal: the live line, Ctrl-C, Ctrl-Z, and a window that is closed.

What a user does there works in the same way where the job has a terminal of its own, under sudo:
those tests run twice.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, process_state, until, wait_ended
from support.jobs.runs import Runner, StartTerminal, Terminal, touch
from support.jobs.screen import Screen

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


LIVE = re.compile(r"\x1b\[([0-9]+);1H\x1b\[0m\x1b\[Kinfiniswap: ([^\x1b]*)\x1b8")
"""The row of the live line, and its facts."""

SUDO = {"SUDO_UID": str(pwd.getpwnam("nobody").pw_uid)}
as_both = pytest.mark.parametrize("sudo", [{}, SUDO], ids=["root", "sudo"])


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


@as_both
def test_ctrl_c_ends_a_job_that_does_not_care(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    # `exec`: dash forgets a signal that comes while it forks.
    script = "echo ready; exec sleep 1000"
    window = terminal(device_runner.argv("sh", "-c", script), device_runner, **sudo)
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
    window.expect("page-in", count=2)
    window.expect("\x1b8", count=3)  # the whole of it
    lines = [line for line in LIVE.findall(window.text) if "MiB local" in line[1]]
    assert lines, window.text
    assert all(row == "40" and len(line) < 120 for row, line in lines)
    assert "paged out" in lines[-1][1]
    assert "page-in" in lines[-1][1]
    window.type("\x03")
    assert window.wait() == 1 or "KeyboardInterrupt" in window.text
    # Nothing of it is left on the screen when the closing lines come, and its row is given back.
    rest = window.text[window.text.rindex("of 32.0 MiB local") :]
    assert rest.index("\x1b[40;1H\x1b[0m\x1b[K\x1b[r\x1b8") < rest.index("exit code")


@as_both
def test_the_live_line_shares_no_row_with_the_jobs_output(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    """It is written between a saved cursor and its return, below the scroll region."""
    script = "printf half; sleep 2.5; echo other; sleep 1.5; printf end"
    window = terminal(device_runner.argv("sh", "-c", script), device_runner, **sudo)
    assert window.wait() == 0
    assert "\x1b[1;39r" in window.text
    assert LIVE.findall(window.text)
    screen = Screen(40, 120)
    screen.write(window.text)
    lines = [line.rstrip() for line in screen.lines if line.strip()]
    assert "halfother" in lines
    assert lines[lines.index("halfother") + 1] == "end"
    assert lines[lines.index("end") + 1].startswith("infiniswap: sh: exit code 0")
    assert not any("local, page-in" in line for line in lines)


def test_a_job_that_reads_each_key_has_the_whole_terminal(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    script = "stty -icanon; echo ready; sleep 3; echo done"
    window = terminal(device_runner.argv("sh", "-c", script), device_runner)
    window.line("ready")
    window.text = ""
    window.expect("done")
    assert not LIVE.findall(window.text.partition("done")[0])
    assert window.wait() == 0


def test_the_live_line_fits_a_window_that_becomes_narrow(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    window = terminal(device_runner.argv(*touch(48, 1 << 30), local="32M"), device_runner)
    window.expect("of 32.0 MiB local")
    window.resize(40, 45)
    window.text = ""
    window.expect("paged out", count=3)
    lines = [line for _, line in LIVE.findall(window.text) if "paged out" in line]
    for line in lines[1:]:  # the first one may be from before
        assert len(line) <= 45 - 1
        assert "local" not in line
    window.type("\x03")
    window.wait()


def test_quiet_has_no_live_line(device_runner: Runner, terminal: StartTerminal) -> None:
    argv = device_runner.argv("sh", "-c", "sleep 2.5; echo done", options=("--quiet",))
    window = terminal(argv, device_runner)
    assert window.wait() == 0
    assert window.text == "done\r\n"


@as_both
def test_a_job_that_reads_the_terminal_gets_what_is_typed(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    script = 'echo ready; read line; echo "got <$line>"; stty size; tty'
    window = terminal(device_runner.argv("sh", "-c", script), device_runner, **sudo)
    window.expect("ready")
    window.type("a line\n")
    assert window.wait() == 0
    assert "got <a line>" in window.text
    assert "40 120" in window.text
    assert "/dev/pts/" in window.text


def shell(terminal: StartTerminal, runner: Runner, **more: str) -> Terminal:
    """An interactive shell."""
    window = terminal(["bash", "--norc", "--noprofile", "-i"], runner, PS1="shell> ", **more)
    window.expect("shell> ")
    return window


def typed(argv: list[str]) -> str:
    """A command line as it is typed."""
    return " ".join(f"'{part}'" for part in argv)


@as_both
@pytest.mark.requires_tool("bash")
def test_ctrl_z_and_fg(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    window = shell(terminal, device_runner, **sudo)
    script = 'echo rea""dy $$; read line; echo "got <$line>"; exit 9'
    argv = device_runner.argv("sh", "-c", script)
    window.type(typed(argv) + "\n")
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


def stopped(pid: int) -> bool:
    return process_state(pid) == "T"


@as_both
@pytest.mark.requires_tool("bash")
def test_in_the_background_the_terminal_is_left_alone(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    window = shell(terminal, device_runner, **sudo)
    argv = device_runner.argv("sh", "-c", "sleep 3; exit 9")
    window.type(typed(argv) + " & wait $!; echo co''de $?\n")
    window.expect("code 9")
    assert "0 B paged out, " not in window.text


@as_both
def test_a_job_that_nobody_can_bring_to_the_foreground_does_not_wait_for_the_keyboard(
    device_runner: Runner, terminal: StartTerminal, out: Path, sudo: dict[str, str]
) -> None:
    """The subshell has gone when the job reads, so no shell knows of the run's process group."""
    window = shell(terminal, device_runner, **sudo)
    argv = device_runner.argv("sh", "-c", "sleep 1; read x </dev/tty")
    window.type(f"( ( {typed(argv)}; echo co''de $? >{out} ) & )\n")
    until(lambda: out.exists() and out.read_text(), "the job's end")
    assert out.read_text() != "code 0\n"


@as_both
def test_a_closed_window_ends_the_job(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    """The terminal tells only the leader of the session: here `run` itself."""
    argv = device_runner.argv("sh", "-c", "echo ready $$; exec sleep 1000")
    window = terminal(argv, device_runner, **sudo)
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


# ------------------------------------------------------------- a terminal of the job's own

WAITS = "echo rea''dy $$; exec sleep 1000"
"""A job that says its pid; the word is not in the command line as it is typed."""


@pytest.fixture
def push_keys(tmp_path: Path) -> Path:
    """push_keys.c, where every user may execute it."""
    source = Path(__file__).parent / "push_keys.c"
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if directory.stat().st_mode & 0o001 == 0:
            directory.chmod(0o711)
    binary = tmp_path / "push_keys"
    compiler = shutil.which("cc") or "cc"
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-o", binary, source], check=True)
    return binary


@pytest.mark.requires_tool("bash")
def test_a_job_of_another_user_cannot_type_into_the_shell_that_started_it(
    device_runner: Runner, terminal: StartTerminal, push_keys: Path, out: Path
) -> None:
    window = shell(terminal, device_runner, **SUDO)
    window.type(typed(device_runner.argv(str(push_keys), f"touch {out}")) + "\n")
    window.expect(f"{push_keys}: exit code ")  # 2 where the kernel refuses it to everybody
    window.expect("shell> ", count=2)
    window.type("echo e''nd\n")
    window.expect("end\r\n")
    assert not out.exists()


def test_the_size_of_the_window_reaches_the_job(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done"
    window = terminal(device_runner.argv("sh", "-c", script), device_runner, **SUDO)
    window.expect("ready")
    window.resize(33, 77)
    window.expect("33 77")
    window.type("\x03")
    assert window.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_terminal_is_as_before_whatever_ends_run(
    device_runner: Runner, terminal: StartTerminal, number: signal.Signals
) -> None:
    """dash, unlike other shells, does not look after the terminal itself."""
    argv = device_runner.argv("sh", "-c", WAITS, options=("--quiet",))
    script = f"echo shell $$; {typed(argv)}; echo en''ded; read line; echo got $line"
    window = terminal(["sh", "-c", script], device_runner, **SUDO)
    before = window.attributes()
    shell_pid = int(window.line("shell "))
    job_pid = int(window.line("ready "))
    until(lambda: window.attributes() != before, "the terminal to be the job's")
    (run_pid,) = children(shell_pid)
    os.kill(run_pid, number)
    window.expect("ended")
    wait_ended(job_pid)
    until(lambda: window.attributes() == before, "the terminal to be as before")
    window.type("a line\n")
    window.expect("got a line")
    window.wait()


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stop_by_sigstop(window: Terminal) -> int:
    """Stops the run in the foreground of the shell; returns its pid."""
    (run_pid,) = children(window.process.pid)
    os.kill(run_pid, signal.SIGSTOP)
    window.expect("Stopped")
    return run_pid


def bring_back(window: Terminal, run_pid: int) -> None:
    """Brings a stopped run to the foreground again."""
    window.type("fg\n")
    until(lambda: not stopped(run_pid), "the run to go on")


@pytest.mark.requires_tool("bash")
def test_a_run_that_sigstop_has_stopped_leaves_the_keyboard_to_the_shell(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    window = shell(terminal, device_runner, **SUDO)
    script = 'echo rea""dy $$; read line; echo "got <$line>"; exit 9'
    window.type(typed(device_runner.argv("sh", "-c", script)) + "\n")
    window.line("ready ")
    run_pid = stop_by_sigstop(window)
    window.type("echo still the shell\n")
    window.expect("still the shell", count=2)
    bring_back(window, run_pid)
    window.type("a line\n")
    window.expect("got <a line>")
    window.expect("exit code 9")


@pytest.mark.requires_tool("bash")
def test_after_sigstop_and_fg_the_job_gets_each_key_again(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    window = shell(terminal, device_runner, **SUDO)
    script = 'stty -icanon; echo rea""dy; echo "got <$(head -c 1)>"'
    window.type(typed(device_runner.argv("sh", "-c", script)) + "\n")
    window.expect("ready")
    bring_back(window, stop_by_sigstop(window))
    until(lambda: not is_echoing(window), "the terminal to be the job's")
    window.type("k")
    window.expect("got <k>")
    window.expect("exit code 0")


def is_echoing(window: Terminal) -> bool:
    """Whether the terminal itself shows what is typed."""
    return bool(window.attributes()[3] & termios.ECHO)


@pytest.mark.parametrize("first", ["one", "two"])
def test_two_runs_of_a_script_leave_the_terminal_as_it_was(
    device_runner: Runner, terminal: StartTerminal, tmp_path: Path, first: str
) -> None:
    """The second run finds the terminal raw, and either may end before the other."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    one, two = (
        typed(device_runner.argv("sh", "-c", f"echo {name} $$; exec sleep 1000")) + " <&5 &"
        for name in ("one", "two")
    )
    script = f"exec 5<&0; {one} cat {gate}; {two} wait; echo en''ded"
    window = terminal(["sh", "-c", script], device_runner, **SUDO)
    before = window.attributes()
    pids = {"one": int(window.line("one "))}
    until(lambda: window.attributes() != before, "the terminal to be the job's")
    gate.write_text("")
    pids["two"] = int(window.line("two "))
    os.kill(pids.pop(first), signal.SIGTERM)
    window.expect("exit code 143")
    (other,) = pids.values()
    os.kill(other, signal.SIGTERM)
    window.expect("ended")
    assert window.attributes() == before
    window.wait()


def test_an_end_of_file_typed_while_another_had_set_the_terminal_ends_no_output(
    device_runner: Runner, terminal: StartTerminal
) -> None:
    script = 'echo ready; read line; echo "got <$line>"'
    window = terminal(device_runner.argv("sh", "-c", script), device_runner, **SUDO)
    before = window.attributes()
    window.expect("ready")
    until(lambda: not is_echoing(window), "the terminal to be the job's")
    window.set_attributes(before)
    window.type("\x04")
    until(lambda: not is_echoing(window), "the terminal to be the job's again")
    window.type("a line\n")
    window.expect("got <a line>")
    assert window.wait() == 0


@as_both
def test_ctrl_c_ends_a_script_around_the_run_too(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    script = f"{typed(device_runner.argv('sh', '-c', WAITS))}; echo the next command"
    window = terminal(["dash", "-c", script], device_runner, **sudo)
    window.line("ready ")
    window.type("\x03")
    assert window.wait() == -signal.SIGINT
    assert "the next command" not in window.text


@pytest.mark.requires_tool("bash")
@as_both
def test_in_a_pipeline_the_job_reads_the_keyboard_when_it_wants(
    device_runner: Runner, terminal: StartTerminal, sudo: dict[str, str]
) -> None:
    window = shell(terminal, device_runner, **sudo)
    argv = device_runner.argv("sh", "-c", 'cat; read line < /dev/tty; echo "got <$line>"')
    window.type(f"echo pi''ped | {typed(argv)} | tr g G\n")
    window.expect("piped")
    window.type("a line\n")
    window.expect("Got <a line>")
    window.expect("exit code 0")
    window.expect("shell> ", count=2)
