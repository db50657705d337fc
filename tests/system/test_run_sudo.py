# SPDX-License-Identifier: Apache-2.0
"""`sudo infiniswap run`: set up as root, while the command is the invoking user's own."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.devices.cluster import NEEDS_SWAP, WAIT_S
from support.jobs.runs import Runner, StartTerminal

pytestmark = NEEDS_SWAP

USER = "nobody"

SHOW = 'id -u; id -g; id -G; pwd; grep -E "^(Uid|Gid)" /proc/self/status; umask; env'


def user() -> pwd.struct_passwd:
    return pwd.getpwnam(USER)


def shown(stdout: bytes) -> tuple[list[str], dict[str, str]]:
    """What SHOW printed: the lines before the environment, and that."""
    lines = stdout.decode().splitlines()
    return lines[:7], dict(line.split("=", 1) for line in lines[7:] if "=" in line)


def check_identity(lines: list[str], directory: str) -> None:
    entry = user()
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    assert lines[0] == str(entry.pw_uid)
    assert lines[1] == str(entry.pw_gid)
    assert sorted(map(int, lines[2].split())) == sorted(set(groups))
    assert lines[3] == directory
    # Real, effective, saved and of the file system: no way back to root.
    assert lines[4].split()[1:] == [str(entry.pw_uid)] * 4
    assert lines[5].split()[1:] == [str(entry.pw_gid)] * 4


def sudo_variables() -> dict[str, str]:
    """What sudo sets."""
    entry = user()
    return {
        "SUDO_UID": str(entry.pw_uid),
        "SUDO_GID": str(entry.pw_gid),
        "SUDO_USER": entry.pw_name,
        "SUDO_COMMAND": "infiniswap",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "PATH": "/usr/sbin:/usr/bin",
    }


@pytest.fixture
def like_sudo(tmp_path: Path, device_runner: Runner) -> Path:
    """A program named sudo that runs a command in the environment that sudo would give it."""
    given = {
        name: value
        for name, value in device_runner.cluster.env.items()
        if name.startswith("INFINISWAP")
    }
    words = [f"'{name}={value}'" for name, value in {**sudo_variables(), **given}.items()]
    script = tmp_path / "sudo"
    script.write_text(f'#!/bin/sh\nenv -i {" ".join(words)} "$@"\nexit $?\n')
    script.chmod(0o755)
    return script


def test_the_job_has_the_identity_and_the_environment_of_the_user(
    device_runner: Runner, like_sudo: Path
) -> None:
    entry = user()
    before = {"PATH": "/opt/own/bin:/usr/bin:/bin", "EDITOR": "ed", "HOME": "/wrong", "ISW_A": "ü"}
    argv = [str(like_sudo), *device_runner.argv("sh", "-c", SHOW)]
    done = subprocess.run(
        argv, env=before, cwd="/usr/share", capture_output=True, check=False, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr.decode()
    lines, environment = shown(done.stdout)
    check_identity(lines, "/usr/share")
    assert environment["PATH"] == before["PATH"]
    assert environment["EDITOR"] == "ed"
    assert environment["ISW_A"] == "ü"
    assert environment["HOME"] == entry.pw_dir
    assert environment["USER"] == environment["LOGNAME"] == entry.pw_name
    assert not [name for name in environment if name.startswith("SUDO_")]
    assert f"the command runs as {entry.pw_name}, who called sudo" in done.stderr.decode()


def test_without_sudo_among_the_ancestors_the_user_still_gets_no_root(
    device_runner: Runner,
) -> None:
    env = {**device_runner.cluster.env, **sudo_variables(), "ISW_A": "kept"}
    done = device_runner("sh", "-c", SHOW, env=env, cwd="/usr")
    assert done.returncode == 0, done.stderr.decode()
    lines, environment = shown(done.stdout)
    check_identity(lines, "/usr")
    assert environment["HOME"] == user().pw_dir
    assert environment["ISW_A"] == "kept"
    assert "SUDO_UID" not in environment


def test_the_users_rights_decide_on_the_command_and_the_summary(
    device_runner: Runner, tmp_path: Path
) -> None:
    env = {**device_runner.cluster.env, **sudo_variables()}
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (own / "program").write_text("#!/bin/sh\n")
    (own / "program").chmod(0o755)
    done = device_runner(str(own / "program"), env=env)
    assert done.returncode in (126, 127), done.stderr.decode()
    done = device_runner("true", env=env, options=("--summary-json", str(own / "s.json")))
    assert done.returncode == 2
    assert not (own / "s.json").exists()
    # In a directory that everybody may use, what is made is the user's.
    shared = device_runner.cluster.root / "shared"
    device_runner.cluster.root.chmod(0o711)
    shared.mkdir()
    shared.chmod(0o1777)
    path = shared / "summary.json"
    done = device_runner("true", env=env, options=("--summary-json", str(path)))
    assert done.returncode == 0, done.stderr.decode()
    assert path.stat().st_uid == user().pw_uid
    assert json.loads(path.read_text())["exit_code"] == 0


def test_signals_reach_a_job_of_another_user(device_runner: Runner) -> None:
    env = {**device_runner.cluster.env, **sudo_variables()}
    process = device_runner.popen(
        "sh",
        "-c",
        "trap 'echo got; exit 4' TERM; echo ready; while :; do sleep 0.05; done",
        env=env,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=WAIT_S)
    assert (stdout, process.returncode) == (b"got\n", 4)


# ---------------------------------------------------------------------- the real one


@pytest.fixture(params=["use_pty", "!use_pty"])
def sudo(tmp_path: Path, request: pytest.FixtureRequest) -> list[str]:
    """Beginning of a command line: sudo called by the user. The rule that allows it exists only in
    a mount namespace of its own. A host without sudo is skipped in CI, too: installing it there
    only for this would change who may become root."""
    if shutil.which("sudo") is None:
        pytest.skip("needs sudo")
    rules = tmp_path / "sudoers"
    rules.write_text(
        f"Defaults env_reset, !lecture, {request.param}, "
        'secure_path="/usr/sbin:/usr/bin:/sbin:/bin"\n'
        f"root ALL=(ALL) ALL\n{USER} ALL=(ALL) NOPASSWD:SETENV: ALL\n"
    )
    rules.chmod(0o440)
    script = (
        'mount --bind "$0" /etc/sudoers && '
        f'exec setpriv --reuid {USER} --regid {user().pw_gid} --init-groups sudo -n "$@"'
    )
    return ["unshare", "--mount", "sh", "-c", script, str(rules)]


def through(sudo: list[str], runner: Runner, *command: str) -> list[str]:
    given = [f"{key}={value}" for key, value in runner.cluster.env.items() if "INFINISWAP" in key]
    return [*sudo, *given, "ISW_B=by sudo", *runner.argv(*command)]


@pytest.mark.requires_tool("unshare", "setpriv", "mount")
def test_real_sudo(device_runner: Runner, sudo: list[str]) -> None:
    path = "/opt/own:/usr/sbin:/usr/bin:/sbin:/bin"
    done = subprocess.run(
        through(sudo, device_runner, "sh", "-c", SHOW + "; exit 3"),
        env={"PATH": path, "ISW_A": "from the shell", "LANG": "C.UTF-8"},
        cwd="/usr",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=2 * WAIT_S,
    )
    assert done.returncode == 3, done.stderr.decode()
    lines, environment = shown(done.stdout)
    check_identity(lines, "/usr")
    assert environment["PATH"] == path
    assert environment["ISW_A"] == "from the shell"
    assert environment["ISW_B"] == "by sudo"
    assert environment["HOME"] == user().pw_dir


COUNT = """
n=0
trap 'n=$((n + 1)); echo "got $n"' INT TERM
echo "ready $$"
while [ $n = 0 ]; do sleep 0.05; done
sleep 0.5  # for one too many
exit 6
"""


@pytest.mark.requires_tool("unshare", "setpriv", "mount", "setsid")
def test_ctrl_c_through_real_sudo(
    device_runner: Runner, sudo: list[str], terminal: StartTerminal
) -> None:
    window = terminal(through(sudo, device_runner, "sh", "-c", COUNT), device_runner)
    window.expect("ready")
    window.type("\x03")
    assert window.wait() == 6
    assert "got 1" in window.text
    assert "got 2" not in window.text


@pytest.mark.requires_tool("unshare", "setpriv", "mount")
def test_a_signal_for_sudo_reaches_the_job_once(device_runner: Runner, sudo: list[str]) -> None:
    process = subprocess.Popen(
        through(sudo, device_runner, "sh", "-c", COUNT),
        env=device_runner.cluster.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    device_runner.running.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"ready")
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (stdout, process.returncode) == (b"got 1\n", 6), stderr.decode()
