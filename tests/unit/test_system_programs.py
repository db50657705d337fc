# SPDX-License-Identifier: Apache-2.0
"""Programs that we start: how they end, and that nobody else says what they are."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from support.machine.trap import Trap

from infiniswap.errors import DeadlineError, NotFoundError, SystemCallError, UnavailableError
from infiniswap.system import programs
from infiniswap.system.process import pidfd_open

PYTHON = sys.executable


def test_a_failed_commands_own_words_are_in_the_error() -> None:
    script = "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SystemCallError, match="no such luck"):
        programs.run_command([PYTHON, "-c", script])
    with pytest.raises(SystemCallError, match="exit code 3"):
        programs.run_command([PYTHON, "-c", "import sys; sys.exit(3)"])


def test_a_missing_command_names_its_package() -> None:
    with pytest.raises(UnavailableError, match="`absent` is not installed"):
        programs.run_command(["absent", "-a"])
    assert programs.missing("losetup").mend == "Install it: apt install mount."


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(99)"
    )
    with pytest.raises(DeadlineError, match="did not end within"):
        programs.run_command([PYTHON, "-c", script], timeout_s=2)
    if pid_file.exists():
        with pytest.raises(NotFoundError):
            pidfd_open(int(pid_file.read_text()))


def test_a_command_that_has_ended_is_not_waited_for_because_of_what_it_has_left() -> None:
    into = bytearray(100)
    got, done = programs.convert(
        ["/bin/sh", "-c", "cat; sleep 3600 & echo $! no such luck >&2; exit 3"],
        b"four",
        into,
        timeout_s=20,
    )
    pid, _, said = done.stderr.partition(" ")
    os.kill(int(pid), signal.SIGKILL)
    assert (bytes(into[:got]), done.code, said) == (b"four", 3, "no such luck\n")
    # Neither takes what it is given, nor says anything.
    left = ["/bin/sh", "-c", "exec <&-; sleep 3600 & echo $! >&2"]
    got, done = programs.convert(left, bytes(60_000), into, timeout_s=20)
    os.kill(int(done.stderr), signal.SIGKILL)
    assert (got, done.code) == (0, 0)


def test_more_output_than_there_is_room_for_is_an_end_in_time() -> None:
    into = bytearray(4)
    with pytest.raises(DeadlineError, match="did not end within"):
        programs.convert(["/bin/cat", "/dev/zero"], b"", into, timeout_s=0.5)
    assert programs.convert(["/bin/echo", "a line"], b"", into, timeout_s=20)[0] == 4


def test_the_terminals_signals_do_not_reach_commands() -> None:
    group = programs.run_command([PYTHON, "-c", "import os; print(os.getsid(0) == os.getpid())"])
    assert group == "True\n"


# -------------------------------------------------------------- what others have prepared


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is called from a trap; the file that appears when something of it is run."""
    trap = Trap(tmp_path)
    monkeypatch.chdir(trap.path)
    for name, value in {**trap.environ, "PYTHONHOME": "/", "PYTHONINSPECT": "1"}.items():
        monkeypatch.setenv(name, value)
    return trap.ran


def test_python_of_ours_takes_no_module_from_the_callers_directory_or_environment(
    ran: Path,
) -> None:
    assert programs.run_command(programs.infiniswap("--version")).startswith("infiniswap ")
    script = (
        "import infiniswap.discovery.listener_process, json, os, sys\n"
        "print(json.dumps([sys.flags.isolated, dict(os.environ)]))"
    )
    isolated, found = json.loads(programs.run_command(programs.python("-c", script)))
    assert isolated == 1
    assert found == {"PATH": programs.SEARCH_PATH, "LC_ALL": "C"} | settings()
    assert not ran.exists()


def settings() -> dict[str, str]:
    """How the tests themselves are run."""
    return {name: text for name, text in os.environ.items() if name.startswith("INFINISWAP_")}


def test_commands_are_not_looked_for_on_the_callers_path(ran: Path) -> None:
    assert programs.run_command(["true"]) == ""
    assert programs.run_command(["sh", "-c", "true; pwd"]) == "/\n"
    for name in ("true", "./true", "trap/true"):
        found = programs.find(name)
        assert found is None or found.startswith(("/usr/", "/bin/"))
    with pytest.raises(UnavailableError):
        programs.start(["./true"])
    assert not ran.exists()


def test_what_is_left_behind_takes_nothing_from_the_callers_directory(
    ran: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    script = f"import infiniswap.cli.main, os; open({str(told)!r}, 'w').write(os.getcwd())"
    env = programs.environment(settings=False)
    assert programs.start(programs.python("-c", script), env=env).wait(60) == 0
    assert told.read_text() == "/"
    assert not ran.exists()


def test_our_settings_are_passed_on_unless_they_are_not_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"INFINISWAP_DEVICE_SLAB": "1G", "INFINISWAP_CONFIG": "here.toml", "EDITOR": "ed"}
    found = programs.environment({"A": "b"}, base={**base, "JOURNAL_STREAM": "8:1"})
    fixed = {"PATH": programs.SEARCH_PATH, "LC_ALL": "C", "JOURNAL_STREAM": "8:1", "A": "b"}
    # A relative name means the caller's directory, not that of the program.
    config = {"INFINISWAP_CONFIG": str(tmp_path / "here.toml"), "INFINISWAP_DEVICE_SLAB": "1G"}
    assert found == {**fixed, **config}
    assert programs.environment(settings=False, base=base) == {
        "PATH": programs.SEARCH_PATH,
        "LC_ALL": "C",
    }


def test_a_program_is_executed_after_what_comes_before_it(tmp_path: Path) -> None:
    """Its process is there already, and reads nothing of ours."""
    seen = []

    def before(pid: int) -> None:
        # The kernel lets the parent go on a moment before it has named the child.
        while (name := Path(f"/proc/{pid}/comm").read_text().strip()) != "sh":
            assert name == Path("/proc/self/comm").read_text().strip()
        seen.append((pid, name))
        assert not (tmp_path / "ran").exists()

    ran = str(tmp_path / "ran")
    script = f"import os, sys; open({ran!r}, 'w').write(sys.stdin.read() or str(os.getpid()))"
    process = programs.start([PYTHON, "-c", script], before=before)
    assert process.wait(30) == 0
    assert seen == [(process.pid, "sh")]
    assert (tmp_path / "ran").read_text() == str(process.pid)


def test_a_program_is_not_executed_when_that_fails(tmp_path: Path) -> None:
    def before(_pid: int) -> None:
        raise SystemCallError("refused")

    script = f"open({str(tmp_path / 'ran')!r}, 'w')"
    with pytest.raises(SystemCallError, match="refused"):
        programs.start([PYTHON, "-c", script], before=before)
    assert not (tmp_path / "ran").exists()
