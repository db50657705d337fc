# SPDX-License-Identifier: Apache-2.0
"""ublk devices for tests in virtual machines: servers that may die (tests/c/ublk_server.c)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from infiniswap.engine.native import NativeEngine, NativeFrontend
from infiniswap.engine.native_ublk import ublk_shape
from infiniswap.engine.protocol import FrontendConfig, UblkShape

ROOT = Path(__file__).resolve().parents[3]
SERVER = ROOT / "build/c/tests/ublk_server"
SERVERS = 0x7465_7374_7562_6C6B
"""The identity that ublk_server gives its devices."""

WAIT_S = 240.0
_PIDFD_GETFD = 438
_STATE = Path("/dev/shm/ublk-state")


def run(*command: object, check: bool = True) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert not check or done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


def wait_for(what: str, condition: Callable[[], object], seconds: float = WAIT_S) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, f"after {seconds} s not: {what}"
        time.sleep(0.05)


def nodes() -> list[str]:
    """Of ublk devices."""
    return sorted(str(path) for path in Path("/dev").glob("ublk[bc][0-9]*"))


def shape_of(device_id: int) -> UblkShape:
    shape = ublk_shape(device_id)
    assert shape is not None
    return shape


class Server:
    """ublk_server; its lines are read as they come."""

    def __init__(self, mib: int, *what: object) -> None:
        self.process = subprocess.Popen(
            [str(SERVER), str(_STATE), str(mib), *map(str, what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline().split()
        assert first, f"exit {self.process.wait()}"
        self.device_id = int(first[1])

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def wait_serving(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"serving {self.device_id}\n", line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0
        self.close()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def rings_of(pid: int) -> list[int]:
    """Copies of a process's io_urings, as its holder has them, see pidfd_getfd(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    rings = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "io_uring" in os.readlink(link):
            rings.append(libc.syscall(_PIDFD_GETFD, process, int(link.name), 0))
            assert rings[-1] >= 0, os.strerror(ctypes.get_errno())
    os.close(process)
    return rings


class Succession:
    """A device whose server is killed again and again, each with a standby."""

    def __init__(self, mib: int) -> None:
        self.mib = mib
        _STATE.unlink(missing_ok=True)
        self.active = Server(mib, "new")
        self.path = f"/dev/ublkb{self.active.device_id}"
        self.standby = Server(mib, "standby", self.active.device_id)

    def kill(self) -> None:
        rings = rings_of(self.active.process.pid)
        self.active.process.send_signal(signal.SIGKILL)
        self.standby.ask()  # at once: it waits itself for the predecessor's end
        self.active.process.wait()
        for ring in rings:
            os.close(ring)
        self.standby.wait_serving()
        self.active.close()
        self.active = self.standby
        self.standby = Server(self.mib, "standby", self.active.device_id)

    def end(self) -> None:
        self.standby.process.stdin.close()  # type: ignore[union-attr]
        assert self.standby.process.wait(WAIT_S) == 0
        self.standby.close()
        self.active.end()
        _STATE.unlink()


@contextlib.contextmanager
def succession(mib: int) -> Iterator[Succession]:
    made = Succession(mib)
    try:
        yield made
    finally:
        made.end()


def prepared(engine: NativeEngine, device_id: int, identity: int) -> NativeFrontend:
    """A front end of this process that could take the device over."""
    config = FrontendConfig(device_id=device_id, identity=identity)
    return engine.frontend_prepare("ublk", config)


def kill_while(job: subprocess.Popen[str], devices: Succession, kills: int) -> None:
    """Kills at moments when requests are under way, as far as they are."""
    stat = Path(f"/sys/block/{Path(devices.path).name}/stat")
    for _ in range(kills):
        before = stat.read_text().split()[:5]

        def goes_on(before: list[str] = before) -> bool:
            return stat.read_text().split()[:5] != before or job.poll() is not None

        wait_for("some I/O since the last kill", goes_on)
        assert job.poll() is None, f"the job ended early: {job.communicate()[0]}"
        devices.kill()
