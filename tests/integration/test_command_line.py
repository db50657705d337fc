# SPDX-License-Identifier: Apache-2.0
"""The command line in clumsy hands: without rights, with closed or full outputs, with files that
cannot be read. One sentence that says what to do, the documented exit code, and never a traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
from support.devices.cluster import WAIT_S, environment

COMMAND = (sys.executable, "-m", "infiniswap")


def infiniswap(
    *arguments: str,
    by: Sequence[str] = (),
    stdout: int | IO[bytes] = subprocess.PIPE,
    **changes: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Args:
        arguments: of `infiniswap`.
        by: the program that starts it, with its own arguments.
        stdout: where its output goes.
        changes: to the environment.
    """
    done = subprocess.run(
        [*by, *COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        # Else an output that fails ends the command before its exit code is known.
        env=environment({"PYTHONUNBUFFERED": "", **changes}),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user may enter; those of pytest are root's alone."""
    with tempfile.TemporaryDirectory(prefix="isw-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def config(shared: Path) -> str:
    """A configuration whose directories are the test's."""
    path = shared / "infiniswap.toml"
    path.write_text(f'[device]\nrun_dir = "{shared}/run"\nbackup_dir = "{shared}/kept"\n')
    return str(path)


# ----------------------------------------------------------------------------------- rights


def without(capability: str) -> list[str]:
    """Starts a program of root's that lacks a capability."""
    return ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.requires_memcg
@pytest.mark.requires_tool("setpriv")
@pytest.mark.parametrize("command", ["device start d", "device start d --swap", "run --local 32M"])
def test_root_without_a_capability_is_told_its_name_once(config: str, command: str) -> None:
    options = ("--config", config, "--size", "16M", "--donors", "127.0.0.1:1")
    job = ("--", "true") if command.startswith("run") else ()
    done = infiniswap(*command.split(), *options, *job, by=without("sys_admin"))
    assert done.returncode == 4
    assert done.stderr.count("\n") == done.stderr.count("CAP_SYS_ADMIN") == 1, done.stderr
    assert "as root" not in done.stderr
    # It is no block device, so nothing could swap on it.
    assert ("nbd-socket" in done.stderr) == (command == "device start d")
    assert not Path(config).with_name("run").exists() or not any(
        Path(config).with_name("run").iterdir()
    )


@pytest.mark.requires_native
@pytest.mark.requires_tool("unshare")
def test_root_of_a_user_namespace_is_told_so(config: str) -> None:
    by = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*by, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    options = ("--config", config, "--size", "16M", "--donors", "127.0.0.1:1", "--swap")
    done = infiniswap("device", "start", "d", *options, by=by)
    assert done.returncode == 4
    assert "root of the host" in done.stderr
    assert "user namespace" in done.stderr


@pytest.fixture
def kept(shared: Path) -> Path:
    """A directory that root alone may look into."""
    path = shared / "kept"
    path.mkdir(mode=0o700)
    return path


# ---------------------------------------------------------------------------- another user

NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")

ASKING = {
    "status": ("status",),
    "daemon": ("daemon", "--listen", "127.0.0.1:0"),
    "device start": ("device", "start", "d", "--size", "4M", "--donors", "127.0.0.1:1"),
    "donor drain": ("donor", "drain", "127.0.0.1:1"),
}


def closed(directory: Path, name: str, where: str) -> Path:
    """A file of root's that nobody else may read, because of itself or of its directory."""
    path = directory / "etc" / name
    path.parent.mkdir(mode=0o700 if where == "directory" else 0o755)
    path.write_text("" if name.endswith("toml") else "0123456789abcdef")
    path.chmod(0o600 if where == "file" or name == "secret" else 0o644)
    return path


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
@pytest.mark.parametrize("where", ["file", "directory"])
@pytest.mark.parametrize("command", ASKING)
def test_whoever_may_not_read_the_secret_is_not_told_to_create_it(
    config: str, shared: Path, command: str, where: str
) -> None:
    path = closed(shared, "secret", where)
    arguments = (*ASKING[command], "--config", config, "--secret-file", str(path))
    done = infiniswap(*arguments, by=NOBODY)
    assert done.returncode == 3
    why = f": the directory {path.parent} is closed to it" if where == "directory" else ""
    said = f"{path}: this user may not read the cluster secret{why}. Run it with sudo.\n"
    assert done.stderr == f"infiniswap: {said}"
    path.unlink()
    done = infiniswap(*arguments)
    assert done.returncode == 3
    assert "No such file or directory. Create it (mode 0600) or correct" in done.stderr


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
@pytest.mark.parametrize("where", ["file", "directory"])
@pytest.mark.parametrize("command", [*ASKING, "device list", "config check"])
def test_whoever_may_not_read_the_configuration_is_told_so(
    shared: Path, command: str, where: str
) -> None:
    path = closed(shared, "infiniswap.toml", where)
    done = infiniswap(*ASKING.get(command, command.split()), "--config", str(path), by=NOBODY)
    assert done.returncode == 3
    assert done.stderr.startswith(f"infiniswap: {path}: this user may not read the configuration")
    assert done.stderr.endswith("Run it with sudo.\n")
    assert ("is closed to it" in done.stderr) == (where == "directory")


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
def test_what_a_user_may_not_see_is_not_said_to_be_absent(config: str, kept: Path) -> None:
    done = infiniswap("device", "list", "--config", config, by=NOBODY)
    assert done.returncode == 0
    assert done.stderr.count(f"this user may not look into {kept}") == 1
    assert infiniswap("device", "list", "--config", config).stderr == ""


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
@pytest.mark.parametrize("action", ["show", "stop", "restart", "reload"])
def test_an_unknown_device_is_told_where_this_user_may_not_look_for_stopped_ones(
    config: str, kept: Path, action: str
) -> None:
    done = infiniswap("device", action, "absent", "--config", config, by=NOBODY)
    assert done.returncode == 11, done.stderr
    assert "no device named absent is running" in done.stderr
    assert f"{kept}, which is closed to this user: `sudo infiniswap device list`" in done.stderr
    done = infiniswap("device", action, "absent", "--config", config)
    assert done.stderr.endswith("Running devices: none. `infiniswap device list` shows all.\n")


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
@pytest.mark.parametrize("options", [("--release",), ("--pool", "1G", "--data-port", "0")])
def test_a_daemon_of_another_user_is_told_what_it_may_not_do(
    config: str, kept: Path, options: tuple[str, ...]
) -> None:
    Path(config).write_text(f'[daemon]\nrun_dir = "{kept}"\nstate_dir = "{kept}"\n')
    done = infiniswap("daemon", "--config", config, *options, by=NOBODY)
    assert (done.returncode, "run it with sudo" in done.stderr.lower()) == (4, True), done.stderr


@pytest.mark.requires_root
@pytest.mark.requires_tool("setpriv")
def test_init_in_a_closed_directory_is_refused(shared: Path) -> None:
    path = closed(shared, "secret", "directory").with_name("infiniswap.toml")
    done = infiniswap("init", "--config", str(path), by=NOBODY)
    assert done.returncode == 4
    assert f"{path}: cannot write the configuration: Permission denied" in done.stderr


# ------------------------------------------------------------------------ standard streams

PRINTING = (
    "status",
    "status --json",
    "device list",
    "device list --json",
    "doctor",
    "doctor --json",
    "config check",
    "init --print",
    "service install --print",
    "service install --dry-run --root .",
    "--help",
    "--version",
    "device start --help",
)
ALWAYS = ("status --json", "device list", "service install --print", "--help")
of_printing = pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if line in ALWAYS else pytest.mark.full) for line in PRINTING],
)


def arguments_of(line: str, config: str) -> list[str]:
    """The words, with the test's configuration where the command takes one."""
    takes = not line.startswith(("-", "service")) and "--help" not in line
    return [*line.split(), *(("--config", config) if takes else ())]


@pytest.mark.requires_native
@of_printing
def test_an_output_that_takes_nothing_is_one_sentence(config: str, line: str) -> None:
    with open("/dev/full", "wb") as full:
        done = infiniswap(*arguments_of(line, config), stdout=full)
    assert done.returncode == 10
    assert done.stderr.startswith("infiniswap: standard output: the output is incomplete: No space")
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.requires_native
@of_printing
def test_a_reader_that_has_gone_is_not_a_failure(config: str, line: str) -> None:
    expected = infiniswap(*arguments_of(line, config))
    ends = os.pipe()
    os.close(ends[0])
    with os.fdopen(ends[1], "wb") as nobody:
        done = infiniswap(*arguments_of(line, config), stdout=nobody)
    assert done.stderr == expected.stderr
    assert done.returncode in (expected.returncode, 0)  # where much was still to be printed


@pytest.mark.requires_native
@of_printing
def test_streams_that_are_closed_change_nothing_else(config: str, line: str) -> None:
    arguments = arguments_of(line, config)
    expected = infiniswap(*arguments)
    done = infiniswap(*arguments, by=("sh", "-c", '"$@" <&- >&-', "sh"))
    assert (done.returncode, done.stdout, done.stderr) == (
        expected.returncode,
        "",
        expected.stderr,
    )
    done = infiniswap(*arguments, by=("sh", "-c", '"$@" 2>&-', "sh"))
    assert (done.returncode, bool(done.stdout), done.stderr) == (expected.returncode, True, "")


@pytest.mark.parametrize(
    "redirected", ["2>/dev/full", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full"]
)
def test_a_message_that_cannot_be_written_leaves_the_exit_code(redirected: str) -> None:
    done = infiniswap("status", "--zzz", by=("sh", "-c", f'"$@" {redirected}', "sh"))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_lines_come_when_they_are_printed_where_that_is_asked_for() -> None:
    """As `tail -f` of a service's output wants it."""
    code = "import sys; from infiniswap.cli.common.output import open_standard_streams as o; o(); "
    code += "print('first'); print('second', file=sys.stderr); print('third')"
    for unbuffered, wanted in (("1", "first second third"), ("", "second first third")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            env=environment({"PYTHONUNBUFFERED": unbuffered}),
            check=False,
        )
        assert done.stdout.split() == wanted.split()


def test_a_failed_command_keeps_its_exit_code_on_a_full_disk(config: str) -> None:
    Path(config).write_text("[deamon]\n")
    with open("/dev/full", "wb") as full:
        done = infiniswap("config", "check", config, stdout=full)
    assert done.returncode == 3
    assert "unknown section [deamon]" in done.stderr
    assert "the output is incomplete" in done.stderr


def test_what_the_encoding_lacks_is_written_as_an_escape(tmp_path: Path) -> None:
    done = infiniswap("config", "check", str(tmp_path / "→"), PYTHONIOENCODING="ascii")
    assert done.returncode == 3
    assert r"\u2192: one mistake" in done.stdout


# ------------------------------------------------------------------- files and directories


@pytest.mark.requires_native
@pytest.mark.parametrize(
    "line", ["init --print --config x", "service install --dry-run --root .", "status"]
)
def test_a_current_directory_that_is_gone_is_told_where_it_matters(
    tmp_path: Path, line: str
) -> None:
    by = ("sh", "-c", 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone"))
    done = infiniswap(*line.split(), by=by)
    if line == "status":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 11
        assert done.stderr.startswith("infiniswap: the current directory has been removed.")


@pytest.mark.parametrize(
    "line", ["status --config", "device list --config", "service install --dry-run --root"]
)
def test_an_empty_file_name_is_not_the_current_directory(line: str) -> None:
    done = infiniswap(*line.split(), "")
    option = line.split()[-1]
    assert done.returncode == 2
    assert f": {option}: its value is empty: name a file or directory. See " in done.stderr


def test_init_replaces_files_only(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = infiniswap("init", "--force", "--config", str(pipe))
    assert (done.returncode, "not a regular file and cannot be replaced" in done.stderr) == (
        2,
        True,
    )
    assert pipe.is_fifo()


def test_a_demo_does_not_run_for_results_that_it_could_not_write(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "results.json"):
        # Were this not seen to first, the missing directory would be told.
        done = infiniswap("demo", "--json", str(path), "--dir", str(tmp_path / "absent"))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"--json {path}: the results cannot be written there" in done.stderr
