# SPDX-License-Identifier: Apache-2.0
"""`infiniswap run` for tests: starting it in all the ways a user does, and finding what it left.

Fixtures: `runner` (its runs make the device themselves) and `device_runner` (they use one declared
swap device, which the module's tests share: quicker). Both fail a test that leaves anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infiniswap.device.process.runs import abandoned_cgroups
from infiniswap.system import loop, swap
from infiniswap.system.cgroup import MemoryCgroup
from infiniswap.system.job_cgroup import find_job_cgroups
from support.devices.cluster import LINK_DIR, WAIT_S, Cluster, Device, until, wait_ended

LOCAL = "32M"

TOUCH = """
import mmap, sys
size, rounds = int(sys.argv[1]) << 20, int(sys.argv[2])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if len(sys.argv) > 3:
    memory.madvise(mmap.MADV_NOHUGEPAGE)
for number in range(rounds):
    for at in range(0, size, 4096):
        memory[at : at + 16] = at.to_bytes(8, "little") + number.to_bytes(8, "little")
    for at in range(0, size, 4096):
        found = memory[at : at + 16]
        assert found == at.to_bytes(8, "little") + number.to_bytes(8, "little"), at
    print("round", number, flush=True)
"""
"""A job: MIB ROUNDS. Writes every page of its memory and verifies it, round by round."""


def touch(mib: int, rounds: int = 1) -> list[str]:
    """Command line of a job that fills and verifies `mib` MiB."""
    return [sys.executable, "-c", TOUCH, str(mib), str(rounds), "nohuge"]


def ready(process: subprocess.Popen[bytes], wanted: bytes = b"ready\n") -> None:
    """Waits until the job says so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == wanted:
            return
    process.wait(WAIT_S)
    assert process.stderr is not None
    raise AssertionError(f"the job never was {wanted!r}: {process.stderr.read().decode()}")


class Runner:
    """Runs `infiniswap run OPTIONS -- COMMAND`.

    Attributes:
        cluster: its donors and directories.
        device: the declared one that is used, None when runs make their own.
    """

    def __init__(self, cluster: Cluster, device: Device | None = None) -> None:
        self.cluster = cluster
        self.device = device
        self.running: list[subprocess.Popen[bytes]] = []

    def argv(self, *command: str, options: tuple[str, ...] = (), local: str = LOCAL) -> list[str]:
        """The whole command line."""
        argv = [sys.executable, "-m", "infiniswap", "run", "--local", local]
        if self.device is not None:
            argv += ["--device", self.device.name]
        elif not {"--donors", "--device"} & set(options):
            argv += ["--donors", self.cluster.addresses]
        return [*argv, *options, "--", *command]

    def popen(
        self, *command: str, options: tuple[str, ...] = (), local: str = LOCAL, **more: Any
    ) -> subprocess.Popen[bytes]:
        """Starts one; standard streams are pipes unless told otherwise."""
        return self.start(self.argv(*command, options=options, local=local), **more)

    def start(self, argv: list[str], **more: Any) -> subprocess.Popen[bytes]:
        """As popen, by a command line that executes `infiniswap run` in the end."""
        more = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **more}
        more = {"stderr": subprocess.PIPE, "env": self.cluster.env, **more}
        process = subprocess.Popen(argv, **more)
        self.running.append(process)
        return process

    def __call__(
        self, *command: str, options: tuple[str, ...] = (), local: str = LOCAL, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs one to its end."""
        given = more.pop("input", None)
        if given is not None:
            more["stdin"] = subprocess.PIPE
        process = self.popen(*command, options=options, local=local, **more)
        stdout, stderr = process.communicate(given, timeout=2 * WAIT_S)
        assert b"Traceback" not in (stderr or b""), stderr.decode()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def summary(self, *command: str, **more: Any) -> Any:
        """Runs one that must succeed, and returns what --summary-json has."""
        path = self.cluster.root / "summary.json"
        options = (*more.pop("options", ()), "--summary-json", str(path))
        done = self(*command, options=options, **more)
        assert done.returncode == 0, done.stderr.decode()
        summary = json.loads(path.read_text())
        path.unlink()
        return summary

    # ------------------------------------------------------------------ what there is

    def cgroup(self, process: subprocess.Popen[bytes]) -> MemoryCgroup:
        """Of a run's job, once that is in it."""

        def find() -> MemoryCgroup | None:
            assert process.poll() is None, process.communicate()[1]
            for cgroup in find_job_cgroups():
                if f"-{process.pid}-" in cgroup.name and cgroup.pids():
                    return cgroup
            return None

        found = until(find, "the job in its cgroup")
        assert isinstance(found, MemoryCgroup)
        return found

    @property
    def status(self) -> Any:
        """`device show --json` of the device in use."""
        device = Device(self.cluster, "run") if self.device is None else self.device
        return device.status

    @property
    def log(self) -> str:
        """Of the device in use."""
        name = "run" if self.device is None else self.device.name
        with contextlib.suppress(OSError):
            return (self.cluster.run_dir / name / "log").read_text()
        return ""

    def leftovers(self) -> list[str]:
        """Everything that is there and would not be without us."""
        pids = {process.pid for process in self.running}
        found = [
            f"cgroup {cgroup.name}: {cgroup.pids()}"
            for cgroup in find_job_cgroups()
            if int(cgroup.name.split("-")[2]) in pids
        ]
        if self.device is None:
            found += self.cluster.leftovers()
            with contextlib.suppress(OSError):
                found += [f"backup {path}" for path in self.cluster.backup_dir.glob("run*.*")]
            # The link is one per host; another suite's device may have that name, too.
            with contextlib.suppress(OSError):
                if not Path(os.readlink(LINK_DIR / "run")).exists():
                    found.append("a dead link /dev/infiniswap/run")
        else:
            runs = self.status["runs"]
            found += [f"the device still watches {runs}"] if runs else []
            own = {self.device.name}
            found += [
                f"run directory of {name}" for name in self.cluster.names() if name not in own
            ]
        return found

    def nothing_left(self) -> None:
        """Waits until everything is gone, whoever has to take it away."""
        left: list[str] = []

        def gone() -> bool:
            left[:] = self.leftovers()
            return not left

        try:
            until(gone, "everything to be taken away")
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *left, self.log])) from None

    def end(self) -> None:
        """Ends what a failed test left running."""
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(WAIT_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for cgroup in abandoned_cgroups():
            if any(f"-{process.pid}-" in cgroup.name for process in self.running):
                cgroup.kill()

    def close(self) -> None:
        """Ends them, and sees to it that nothing is left of them."""
        self.end()
        self.nothing_left()


@pytest.fixture
def runner(shared_cluster: Cluster) -> Iterator[Runner]:
    """Runs that make their device."""
    with contextlib.closing(Runner(shared_cluster)) as own:
        yield own


@pytest.fixture(scope="module")
def declared_device(module_cluster: Cluster) -> Iterator[Device]:
    """One swap device for all tests of the module."""
    device = module_cluster.start("--swap", size="128M")
    try:
        yield device
    finally:
        device.remove()


@pytest.fixture
def device_runner(declared_device: Device) -> Iterator[Runner]:
    """Runs on the module's device."""
    with contextlib.closing(Runner(declared_device.cluster, declared_device)) as own:
        yield own


class Terminal:
    """A program on a terminal of its own, as the leader of its session.

    Args:
        argv: the program.
        env: its environment.
        columns: width of the terminal.
    """

    def __init__(self, argv: list[str], env: Mapping[str, str], columns: int = 120) -> None:
        self._primary, secondary = pty.openpty()
        self.resize(40, columns)
        self.process = subprocess.Popen(
            # setsid -c: the terminal becomes the controlling one.
            ["setsid", "-c", *argv],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            env={**env, "TERM": "xterm"},
            close_fds=True,
        )
        os.close(secondary)
        self.text = ""

    def resize(self, rows: int, columns: int) -> None:
        """As the mouse does it."""
        fcntl.ioctl(self._primary, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def attributes(self) -> list[Any]:
        """How the terminal is set, as `stty` shows it."""
        return termios.tcgetattr(self._primary)

    def set_attributes(self, attributes: list[Any]) -> None:
        """As another program with this terminal does it."""
        termios.tcsetattr(self._primary, termios.TCSANOW, attributes)

    def type(self, text: str) -> None:
        """As on the keyboard."""
        os.write(self._primary, text.encode())

    def read(self, wait_s: float = 0.1) -> bool:
        """Takes what has been written; False once nobody has the terminal open."""
        if self._primary < 0:
            time.sleep(wait_s)
            return False
        if not select.select([self._primary], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self._primary, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def expect(self, wanted: str, count: int = 1) -> None:
        """Waits until it has been written `count` times."""
        end_s = time.monotonic() + WAIT_S
        while self.text.count(wanted) < count:
            alive = self.read()
            assert self.text.count(wanted) >= count or alive, f"no {wanted!r}:\n{self.text}"
            assert time.monotonic() < end_s, f"no {wanted!r}:\n{self.text}"

    def line(self, beginning: str) -> str:
        """Waits for a whole line that begins so; returns the rest of it."""
        self.expect(beginning)
        while "\n" not in (rest := self.text.rpartition(beginning)[2]):
            assert self.read(WAIT_S), self.text
        return rest.splitlines()[0].strip()

    def wait(self) -> int:
        """The exit code, with everything it writes until then."""
        end_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end_s, self.text
            self.read()
        length = -1
        while self.read(0.0) and len(self.text) != length:
            length = len(self.text)
        return self.process.returncode

    def hang_up(self) -> None:
        """Closes the terminal's window."""
        if self._primary >= 0:
            os.close(self._primary)
            self._primary = -1

    def close(self) -> None:
        """Ends everything."""
        self.hang_up()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


StartTerminal = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[StartTerminal]:
    """Opens terminals, and closes them: terminal(argv, runner, NAME=value)."""
    with contextlib.ExitStack() as stack:

        def start(argv: list[str], runner: Runner, **more: str) -> Terminal:
            one = Terminal(argv, {**runner.cluster.env, **more})
            stack.callback(one.close)
            return one

        yield start


def other_area(root: Path, mib: int = 16, priority: int = 7) -> contextlib.ExitStack:
    """A small swap area of somebody else's on a loop device; `close()` takes it away."""
    stack = contextlib.ExitStack()
    file = root / "other-swap"
    file.write_bytes(bytes(mib << 20))
    stack.callback(file.unlink)
    device = loop.attach(file)
    stack.callback(loop.detach, device)
    swap.mkswap(device.path, label="isw-test-other")
    swap.swapon(device.path, priority=priority, discard=False)
    stack.callback(swap.swapoff, device.path, timeout_s=WAIT_S)
    return stack


__all__ = [
    "LOCAL",
    "Runner",
    "StartTerminal",
    "Terminal",
    "declared_device",
    "device_runner",
    "other_area",
    "runner",
    "terminal",
    "touch",
    "wait_ended",
]
