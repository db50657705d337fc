# SPDX-License-Identifier: Apache-2.0
"""Commands of the documents, as a shell of a test runs them.

`sudo` and `ssh` are stand-ins: the test is root, and its hosts have no sshd.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.devices.cluster import WAIT_S, until

BESIDE = 'shift; exec sh -c "$(echo "$*" | sed "s,/consumer/,/donor/,g")"'
"""An ssh where the donor's files lie beside the consumer's."""


def search_path(directory: Path, ssh: str) -> str:
    """A PATH with the stand-ins, which are made in that directory, and with this Infiniswap."""
    directory.mkdir()
    # The environment stays, as with `sudo -E`: it carries the small sizes.
    for name, body in (("sudo", 'exec "$@"'), ("ssh", ssh)):
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
    programs = os.environ.get("PATH", "")
    return f"{directory}:{Path(sys.executable).parent}:{programs}:/usr/bin:/bin:/usr/sbin:/sbin"


def bash(text: str) -> list[str]:
    """The command line that runs commands until one fails."""
    return ["bash", "-c", f"set -euo pipefail\n{text}"]


def join_command(said: str) -> str:
    """The command that `infiniswap invite` has said to type on the new host, without `sudo`."""
    found = re.search(r"^ +sudo (infiniswap join \S+)$", said, re.MULTILINE)
    assert found, said
    return found[1]


def smaller(text: str, gib_mib: int) -> str:
    """The commands with so many MiB for each GiB."""
    text = re.sub(r"(\d+) << 30", lambda match: f"{int(match[1]) * gib_mib} << 20", text)
    return re.sub(r"(?<![\w.])(\d+)G\b", lambda match: f"{int(match[1]) * gib_mib}M", text)


class Service:
    """Commands of which the last one runs on until Ctrl-C.

    Args:
        argv: a shell.
        log: what they say.
        serving: what they say when it serves.
    """

    def __init__(
        self, argv: list[str], log: Path, serving: str, env: Mapping[str, str], cwd: Path
    ) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

        def serves() -> bool:
            assert self._process.poll() is None, self.log
            return serving in self.log

        until(serves, f"{log.stem} to serve")

    @property
    def log(self) -> str:
        """So far."""
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        """To the whole group, as a terminal does."""
        os.killpg(self._process.pid, number)

    def end(self, number: signal.Signals = signal.SIGINT) -> None:
        """Nothing to do once it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(number)
            self._process.wait(WAIT_S)
        assert "Traceback" not in self.log, self.log
