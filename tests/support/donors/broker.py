# SPDX-License-Identifier: Apache-2.0
"""A real Mosquitto of a test's own, on a loopback port. Never the system's service."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.devices.cluster import WAIT_S, until

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


class Broker:
    """A broker without persistence, so that a restart loses what was retained.

    Args:
        directory: for its files.
        options: further lines of its configuration, of the listener.
        host: to listen on.
        port: there; 0: one that is free now.
    """

    def __init__(
        self, directory: Path, *options: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = port or free.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self._log = directory / "mosquitto.log"
        self._config = directory / "mosquitto.conf"
        lines = [f"listener {self.port} {host}", "persistence false", "user root", *options]
        if not any(line.startswith("allow_anonymous") for line in lines):
            lines.append("allow_anonymous true")
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, prefix: tuple[str, ...] = ()) -> None:
        """Until it serves; `prefix` is a command that executes it."""
        program = shutil.which("mosquitto", path=PATH)
        assert program is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*prefix, program, "-c", str(self._config)], stdout=log, stderr=log
            )

        def serves() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log
            return " running" in self.log

        until(serves, "a broker that serves")

    def kill(self) -> None:
        """As `kill -9`. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
        with contextlib.suppress(OSError):
            self._log.unlink()

    @property
    def log(self) -> str:
        """What it has written since it was started."""
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        """To its process: one that is stopped takes connections and says nothing."""
        assert self._process is not None
        self._process.send_signal(number)

    def retain(self, topic: str, *payloads: bytes) -> None:
        """Publishes retained messages; with several, `#` in the topic is their number."""
        from paho.mqtt import publish  # late: few tests need it

        publish.multiple(
            [
                (topic.replace("#", f"{n:x}"), payload, 1, True)
                for n, payload in enumerate(payloads)
            ],
            hostname="127.0.0.1",
            port=self.port,
        )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """One that runs, and is killed at the end."""
    made = Broker(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.kill()
