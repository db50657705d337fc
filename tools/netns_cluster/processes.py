# SPDX-License-Identifier: Apache-2.0
"""Starting processes that outlive the command that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infiniswap.errors import DeadlineError, SystemCallError, from_oserror
from infiniswap.own_code import CODE_OWNER
from infiniswap.system import programs
from infiniswap.system.files import log_tail
from netns_cluster.record import Process

# The shell ends at once, so that the process is a child of init's and nobody's zombie.
_ORPHAN = 'log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!'
_POLL_S = 0.02


def environment(config: Path) -> dict[str, str]:
    """The caller's environment with this configuration file in place of the caller's own
    configuration, and this checkout's programs first on the PATH."""
    env = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("INFINISWAP_") or name == CODE_OWNER
    }
    path = env.get("PATH", os.defpath)
    env["INFINISWAP_CONFIG"] = str(config)
    env["PATH"] = f"{Path(sys.executable).parent}:{path}:{programs.SEARCH_PATH}"
    env["LC_ALL"] = "C"
    return env


def start(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Starts it in a session of its own; what it prints is appended to the log.

    Raises:
        SystemCallError: no process could be made.
    """
    try:
        done = subprocess.run(
            ["sh", "-c", _ORPHAN, "sh", str(log), *argv],
            env=programs.environment() if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            check=True,
            timeout=30,
        )
        return Process.of(int(done.stdout))
    except OSError as error:
        raise from_oserror(f"cannot start {argv[0]}", error) from error
    except (subprocess.SubprocessError, ValueError) as error:
        raise SystemCallError(f"cannot start {argv[0]}: {error}") from error


def await_ready(
    process: Process, log: Path, what: str, ready: Callable[[], bool], timeout_s: float
) -> None:
    """Waits until `ready` says so.

    Raises:
        SystemCallError: the process has ended before; says what it printed.
        DeadlineError: not in time.
    """
    end_s = time.monotonic() + timeout_s
    while not ready():
        said = f"it last said: {log_tail(log) or 'nothing'}"
        if not process.state:
            raise SystemCallError(f"{what} ended; {said}", where=str(log))
        if time.monotonic() >= end_s:
            raise DeadlineError(f"{what} was not ready within {timeout_s:g} s; {said}")
        time.sleep(_POLL_S)


def is_device_process(pid: int) -> bool:
    """Whether it serves a device, and so must not be ended while that is in use."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"infiniswap.device" in words


def parent_pids() -> set[int]:
    """The caller and what has started it."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
            pid = int(text[text.rfind(")") + 1 :].split()[1])
        except (OSError, ValueError):
            break
    return found
