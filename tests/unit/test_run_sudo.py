# SPDX-License-Identifier: Apache-2.0
"""Whom a job runs as under sudo, and with whose environment; tests/system has the real sudo."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from infiniswap.device.jobs import sudo
from infiniswap.errors import UsageError


def test_the_shells_environment_wins_over_what_sudo_made_of_it() -> None:
    shell = {"PATH": "/own:/bin", "HOME": "/home/a", "EDITOR": "ed", "LANG": "C"}
    own = {"PATH": "/sbin", "HOME": "/root", "USER": "root", "LANG": "C", "SUDO_UID": "7"}
    assert sudo.job_environment(own, shell) == shell


def test_what_was_set_after_sudo_wins_over_the_shell() -> None:
    shell = {"PATH": "/bin", "MODE": "slow"}
    own = {"PATH": "/sbin", "MODE": "fast", "NEW": "1", "SUDO_COMMAND": "x"}
    assert sudo.job_environment(own, shell) == {"PATH": "/bin", "MODE": "fast", "NEW": "1"}


def test_without_sudos_process_our_own_environment_has_to_do() -> None:
    own = {"PATH": "/sbin", "HOME": "/root", "USER": "root", "A": "b", "SUDO_UID": "7"}
    assert sudo.job_environment(own, None) == {"PATH": "/sbin", "A": "b"}
    assert sudo.job_environment({}, None) == {"PATH": os.defpath}


@pytest.mark.parametrize("environ", [{}, {"SUDO_UID": ""}, {"SUDO_UID": "0"}])
def test_without_sudo_nobody_is_dropped_to(environ: dict[str, str]) -> None:
    assert sudo.invoking_user(environ) is None


@pytest.mark.parametrize("text", ["x", "-1", "4000000001", "99999999999999999999", "1 2"])
def test_a_user_that_does_not_exist(text: str) -> None:
    with pytest.raises(UsageError, match="SUDO_UID"):
        sudo.invoking_user({"SUDO_UID": text})


def process(proc: Path, pid: int, comm: str, parent: int, environ: bytes = b"") -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "comm").write_text(f"{comm}\n")
    (directory / "stat").write_text(f"{pid} ({comm}) S {parent} 1 1 0 -1 0 0 0\n")
    (directory / "environ").write_bytes(environ)


def test_the_outer_one_of_two_sudo_processes_has_the_shells_environment(tmp_path: Path) -> None:
    """With a pseudo-terminal sudo puts a monitor between itself and the command."""
    process(tmp_path, os.getppid(), "timeout (x) y", 900)
    process(tmp_path, 900, "sudo", 901, b"A=monitor\0")
    process(tmp_path, 901, "sudo", 902, b"A=shell\0PATH=/own\0EMPTY=\0B=\xff\0junk\0")
    process(tmp_path, 902, "bash", 903)
    process(tmp_path, 903, "sudo", 1, b"A=another\0")
    entry = pwd.getpwnam("nobody")
    user = sudo.invoking_user({"SUDO_UID": str(entry.pw_uid)}, proc=tmp_path)
    assert user is not None
    assert (user.name, user.uid, user.gid) == (entry.pw_name, entry.pw_uid, entry.pw_gid)
    assert entry.pw_gid in user.groups
    found = {"A": "shell", "PATH": "/own", "EMPTY": "", "B": os.fsdecode(b"\xff")}
    found |= {"HOME": entry.pw_dir, "LOGNAME": entry.pw_name}
    assert user.environment.items() >= found.items()
    assert "junk" not in user.environment


def test_a_sudo_that_has_gone_is_no_error(tmp_path: Path) -> None:
    entry = pwd.getpwnam("nobody")
    user = sudo.invoking_user({"SUDO_UID": str(entry.pw_uid), "A": "b"}, proc=tmp_path)
    assert user is not None
    assert user.environment["A"] == "b"
