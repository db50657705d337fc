# SPDX-License-Identifier: Apache-2.0
"""A small cluster on loopback for tests: donors' daemons and devices as real processes.

Fixtures: `cluster` (one per test) and `shared_cluster` (one per module, two donors). Both end
what they started through the product's own commands, so each test also proves that a device can
be removed; then they look for anything left in the kernel, take it away, and fail if there was.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from infiniswap.control.tls import FULL_REASON
from infiniswap.device.control import client
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import InfiniswapError
from infiniswap.own_code import CODE_OWNER
from infiniswap.system import loop, mounts, nbd, swap
from infiniswap.system.genl import GenericNetlink
from infiniswap.units import MIB
from support.machine.ran import ran
from support.machine.runmode import IN_GUEST

WAIT_S = 600.0 if IN_GUEST else 60.0
"""Bound of every wait for something that must happen; never reached on success. (A virtual machine
without KVM takes minutes for what takes seconds.)"""

_TICK_S = 0.2 if IN_GUEST else 0.02
_DETACHED_S = 5.0

T = TypeVar("T")

SLAB = 8 * MIB
LINK_DIR = Path("/dev/infiniswap")
LOCK = "owner"
PROGRAM = (sys.executable, "-I", "-m", "infiniswap")
"""As the installed one, which takes no module from where it is called."""

NEEDS_SWAP = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
    pytest.mark.requires_memcg,
    pytest.mark.requires_swap,
]
"""What a test needs in which something swaps to a device."""

_ASKING = {("status",), ("donor",)}
_DISK = {"tmpfs", "ramfs", "overlay", "9p", "btrfs", "zfs"}


def _bases() -> tuple[str | None, ...]:
    return os.environ.get("INFINISWAP_TEST_DISK"), "/var/tmp", tempfile.gettempdir()


def disk_directory() -> Path:
    """A new directory on a file system that can hold a backup; skips where there is none."""
    for base in _bases():
        if base and mounts.mount_of(Path(base)).fs_type not in _DISK:
            # Short: a Unix socket's path has 107 characters at most.
            return Path(tempfile.mkdtemp(prefix="isw-", dir=base))
    pytest.skip("needs a directory on a local disk (INFINISWAP_TEST_DISK)")


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without the user's Infiniswap settings, plus `changes`."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if "INFINISWAP" not in name or name == CODE_OWNER
    }
    return {**clean, **(changes or {})}


def until(condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Waits until `condition` is true and returns its value."""
    end_s = time.monotonic() + wait_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {wait_s:g} s in vain for: {what}"
        time.sleep(_TICK_S)
    return value


def unhurried(ask: Callable[[], T]) -> T:
    """What is asked over TLS, again and slower where a test asks more often than one peer may."""
    while True:
        try:
            return ask()
        except ssl.SSLError as error:
            if FULL_REASON not in (error.reason or ""):
                raise
        time.sleep(0.2)


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Donor:
    """A daemon's process."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, ports: dict[str, int], host: str
    ) -> None:
        self.process = process
        self.state_dir = log.parent / "state"
        self.host = host
        self._log = log
        self.control: int = ports["control_port"]
        self.data: int = ports["data_port"]

    @property
    def address(self) -> str:
        """HOST:PORT of its control API."""
        return f"{self.host}:{self.control}"

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        """Sends it, without waiting for anything."""
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends it and waits for the end; returns the exit code."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


class Cluster:
    """Daemons and devices with directories of their own.

    Attributes:
        root: on a local disk.
        env: of every command; change it before starting something.
        program: what every command begins with.
        donors: every daemon started, dead ones too.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or disk_directory()
        # Held while this process lives, so that a later run knows whether it still does.
        self._lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise
        self.run_dir = self.root / "run"
        self.backup_dir = self.root / "backup"
        self.env = environment(
            {
                "INFINISWAP_DEVICE_RUN_DIR": str(self.run_dir),
                "INFINISWAP_DEVICE_BACKUP_DIR": str(self.backup_dir),
                "INFINISWAP_DAEMON_STATE_DIR": str(self.root / "state"),
                "INFINISWAP_DAEMON_RUN_DIR": str(self.root / "donors"),
                "INFINISWAP_DEVICE_SLAB": str(SLAB),
                # A second interpreter per device; tests of take-overs turn it on.
                "INFINISWAP_DEVICE_STANDBY": "off",
                "INFINISWAP_DEVICE_STAGING": str(8 * MIB),
                "INFINISWAP_POLICY_HOT_PAGES_PER_S": "1",
                "INFINISWAP_POLICY_PERIOD_S": "1" if IN_GUEST else "0.2",
                # Where whatever runs on the host has the processors first.
                **({"INFINISWAP_CLUSTER_ASK_S": "30"} if IN_GUEST else {}),
            }
        )
        self.program: tuple[str, ...] = PROGRAM
        self.donors: list[Donor] = []
        self._names = 0
        self._prefix = os.pread(self._lock, 16, 0).decode() or f"t{secrets.token_hex(3)}"
        os.pwrite(self._lock, self._prefix.encode(), 0)
        self._loops_seen: set[Path] = set()
        foreign = loop.attached() if root is None else ()
        self.foreign_loops = {(device.number, device.backing) for device in foreign}

    # --------------------------------------------------------------------- donors

    def donor(
        self,
        *args: str,
        host: str = "127.0.0.1",
        port: int = 0,
        pool: str = "256M",
        prefix: tuple[str, ...] = (),
    ) -> Donor:
        """Starts a daemon and waits until it serves; `prefix` is a command that executes it."""
        number = len(self.donors)
        ready, log = self.root / f"donor{number}.ready", self.root / f"donor{number}.log"
        ready.unlink(missing_ok=True)
        command = [*prefix, *self.program, "daemon"]
        command += ["--listen", f"{host}:{port}", "--data-port", "0", "--ready-file", str(ready)]
        command += ["--slab", str(SLAB), "--pool", pool, "--headroom", "16M", *args]
        with log.open("w") as output:
            process = subprocess.Popen(command, env=self.env, stdout=output, stderr=output)

        def ports() -> Any:
            assert process.poll() is None, log.read_text()
            return json.loads(ready.read_text()) if ready.exists() else None

        donor = Donor(process, log, until(ports, "a daemon that serves"), host)
        self.donors.append(donor)
        return donor

    def successor(self, donor: Donor) -> Donor:
        """Starts another daemon on the port of one that has ended.

        That port was the system's choice: for a moment a connection of anybody's may have it.
        """

        def started() -> Donor | None:
            try:
                return self.donor(port=donor.control)
            except AssertionError as error:
                if "the port is in use" not in str(error):
                    raise
                return None

        found = until(started, f"port {donor.control} to be free")
        assert isinstance(found, Donor)
        return found

    @property
    def addresses(self) -> str:
        """For --donors: every daemon that was started."""
        return ",".join(donor.address for donor in self.donors)

    # -------------------------------------------------------------------- devices

    def name(self) -> str:
        """A device name that nobody else uses."""
        self._names += 1
        return f"{self._prefix}{self._names}"

    def cli(self, *args: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Runs `infiniswap ARGS`; `changes` to the environment."""
        # Who only asks has patience with donors. Devices have not: they must notice dead ones.
        patient = {"INFINISWAP_CLUSTER_ASK_S": "30"} if args[:1] in _ASKING else {}
        env = {**self.env, **patient, **changes}
        return ran(*self.program, *args, env=env, wait_s=WAIT_S * 2)

    def ok(self, *args: str, **changes: str) -> str:
        """As cli, must succeed; returns the standard output."""
        done = self.cli(*args, **changes)
        assert done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def donor_row(self, donor: Donor) -> Any:
        """What `status --json` tells of it."""
        return json.loads(self.ok("status", "--json", "--donors", donor.address))["donors"][0]

    def start(self, *args: str, name: str = "", size: str = "128M", **changes: str) -> Device:
        """Starts a device with every donor."""
        name = name or self.name()
        command = ["device", "start", name, "--donors", self.addresses, *args]
        self.ok(*command, *(["--size", size] if size else []), **changes)
        return Device(self, name)

    def names(self) -> list[str]:
        """Names of devices that have a run directory."""
        with contextlib.suppress(OSError):
            return sorted(entry.name for entry in self.run_dir.iterdir())
        return []

    # ------------------------------------------------------------------- clean-up

    def close(self) -> None:
        """Ends everything; fails for what had to be ended by force."""
        problems = self._remove_devices()
        for donor in self.donors:
            if donor.process.poll() is None and donor.end() != 0:
                problems.append(f"a daemon ended badly:\n{donor.log}")
            if "Traceback" in donor.log:
                problems.append(f"a daemon's log:\n{donor.log}")
        problems += self._release_donors()
        problems += self.take_leftovers()
        self.forget()
        assert not problems, "\n".join(problems)

    def forget(self) -> None:
        """Its directory goes; nothing of it may be in use any more."""
        shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._lock)

    def _release_donors(self) -> list[str]:
        """What killed daemons have left is meant to be there; nothing else is."""
        homes = self.root / "donors"
        if self.env["INFINISWAP_DAEMON_RUN_DIR"] == str(homes) and not homes.exists():
            return []
        done = self.cli("daemon", "--release")
        if done.returncode:
            return [f"memory of killed daemons is not given back: {done.stderr}"]
        with contextlib.suppress(OSError):
            return [f"left: {path}" for path in homes.iterdir()]
        return []

    def _remove_devices(self) -> list[str]:
        problems = []
        for name in self.names():
            with contextlib.suppress(OSError):
                log = (self.run_dir / name / "log").read_text()
                if "Traceback" in log:
                    problems.append(f"log of {name}:\n{log}")
            done = self.cli("device", "remove", name)
            if done.returncode:
                problems.append(f"cannot remove {name}: {done.stderr}")
        return problems

    def processes(self) -> dict[int, str]:
        """Processes of ours but for living daemons: pid to command line.

        One that is just being executed has no environment to tell it by, for a moment; so none is
        found only if a second look finds none either.
        """
        return self._seen_processes() or self._seen_processes()

    def _seen_processes(self) -> dict[int, str]:
        own = {donor.process.pid for donor in self.donors if donor.process.poll() is None}
        mark = f"INFINISWAP_DEVICE_RUN_DIR={self.run_dir}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) in own:
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()
        return found

    def loops(self) -> list[loop.LoopDevice]:
        """Loop devices attached since the start, on files of ours."""
        found = [
            device
            for device in loop.attached()
            if (device.number, device.backing) not in self.foreign_loops
            # Once the file system is unmounted lazily, or seen from another mount namespace than
            # its own, which may be somebody else's, only the path inside it is known.
            and (
                device.backing.startswith(str(self.root))
                or (device.backing == "/disk" and device.path in self._loops_seen)
            )
        ]
        self._loops_seen = {device.path for device in found}
        return found

    def saw_loop(self, path: Path) -> None:
        """This one is of a device of ours."""
        self._loops_seen.add(path)

    def leftovers(self) -> list[str]:
        """What is attached, mounted, linked or running that is ours; nothing is touched."""
        found = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        paths = {device.path for device in self.loops()}
        found += [f"loop device {device}" for device in self.loops()]
        found += [f"nbd device {device}" for device in self.nbds()]
        found += [
            f"mount {mount.mount_point}"
            for mount in mounts.mounts()
            if mount.mount_point.startswith(str(self.root))
        ]
        found += [f"swap {area}" for area in swap.active_areas() if Path(area.path) in paths]
        with contextlib.suppress(OSError):
            found += [f"link {link}" for link in LINK_DIR.glob(f"{self._prefix}*")]
        found += [f"run directory of {name}" for name in self.names()]
        return found

    def nbds(self) -> list[nbd.NbdDevice]:
        """nbd devices of processes of this cluster."""
        return [device for device in nbd.devices() if f":{self.root}/" in device.identifier]

    def take_leftovers(self) -> list[str]:
        """Takes away by force what leftovers() finds, and returns it."""
        with contextlib.suppress(AssertionError):
            # The kernel detaches these itself, once nobody looks at them.
            until(lambda: not any(each.autoclear for each in self.loops()), "them", _DETACHED_S)
        found = self.leftovers()
        for device in self.loops():
            if swap.find_area(device.path):
                with contextlib.suppress(InfiniswapError):
                    swap.swapoff(device.path, timeout_s=WAIT_S)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.processes(), "killed processes to end")
        for left in self.nbds():
            with contextlib.suppress(InfiniswapError):
                # First, so that what waits for a dead process fails and swapoff can end.
                with GenericNetlink() as link:
                    nbd.disconnect(link, left.index)
                if swap.find_area(left.path):
                    swap.swapoff(left.path, timeout_s=WAIT_S)
        for mount in reversed(mounts.mounts()):
            if mount.device in {f"7:{device.number}" for device in self.loops()}:
                with contextlib.suppress(InfiniswapError):
                    mounts.unmount(Path(mount.mount_point), lazy=True)
        for device in self.loops():
            with contextlib.suppress(InfiniswapError):
                loop.detach(device)
        for mount in reversed(mounts.mounts()):
            if mount.mount_point.startswith(str(self.root)):
                with contextlib.suppress(InfiniswapError):
                    mounts.unmount(Path(mount.mount_point), lazy=True)
        with contextlib.suppress(OSError):
            for path in LINK_DIR.glob(f"{self._prefix}*"):
                path.unlink()
        for name in self.names():
            shutil.rmtree(self.run_dir / name, ignore_errors=True)
        return found


class Device:
    """A device that was started."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.run = cluster.run_dir / name
        self.backup = cluster.backup_dir / f"{name}.backup"

    @property
    def status(self) -> Any:
        """What `device show --json` prints, asked for here: most tests ask until something has
        happened, and each process that asks would take the processors from it."""
        paths = DevicePaths(self.name, self.run, self.cluster.backup_dir)
        return msgspec.to_builtins(client.status(paths, wait_s=WAIT_S))

    @property
    def shown(self) -> Any:
        """The same by that command."""
        return json.loads(self.cluster.ok("device", "show", self.name, "--json"))

    @property
    def socket(self) -> Path:
        """Of the front end nbd-socket."""
        return self.run / "nbd.sock"

    @property
    def uri(self) -> str:
        """For NBD clients of that socket."""
        return f"nbd+unix:///?socket={self.socket}"

    @property
    def path(self) -> Path:
        """The block device, by its link."""
        link = LINK_DIR / self.name
        self.cluster.saw_loop(link.resolve())
        return link

    @property
    def log(self) -> str:
        """What its process has written; empty once it has ended in order."""
        with contextlib.suppress(OSError):
            return (self.run / "log").read_text()
        return ""

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self.status["pid"])

    def command(self, action: str) -> subprocess.CompletedProcess[str]:
        """`device ACTION NAME`."""
        return self.cluster.cli("device", action, self.name)

    def stop(self) -> None:
        """Must succeed."""
        self.cluster.ok("device", "stop", self.name)

    def remove(self) -> None:
        """Must succeed."""
        self.cluster.ok("device", "remove", self.name)

    def send(self, number: signal.Signals) -> int:
        """Sends it to the device process; returns its pid."""
        pid = self.pid
        os.kill(pid, number)
        return pid

    def wait_standby(self) -> Any:
        """Waits until a death would be followed by a take-over; returns the status."""

        def ready() -> Any:
            status = self.status
            return status if status["succession"]["standby"] == "ready" else None

        return until(ready, "a standby")

    def wait_take_over(self, count: int) -> Any:
        """Waits until so many take-overs were made; returns the status."""

        def done() -> Any:
            try:
                status = self.status
            except (AssertionError, InfiniswapError):
                return None  # there is nobody to ask at the moment
            return status if status["succession"]["take_overs"] >= count else None

        return until(done, f"take-over {count}")

    def processes(self) -> dict[str, int]:
        """Pids of holder, active process and standby, the last one once it is ready."""

        def found() -> dict[str, int] | None:
            status = self.wait_standby()
            holder, active = status["succession"]["holder_pid"], status["pid"]
            others = [pid for pid in children(holder) if pid != active]
            if len(others) != 1:
                return None  # one has just died
            return {"holder": holder, "active": active, "standby": others[0]}

        pids = until(found, "holder, active process and standby")
        assert isinstance(pids, dict)
        return pids

    def wait_take_over_by_another_standby(self) -> None:
        """Kills the standby, waits for the next one, and then kills the active process."""
        pids = self.processes()
        os.kill(pids["standby"], signal.SIGKILL)
        until(lambda: self.processes()["standby"] != pids["standby"], "another standby")
        os.kill(pids["active"], signal.SIGKILL)
        self.wait_take_over(1)

    def kill(self) -> None:
        """kill -9, and waits until the process is gone."""
        pid = self.send(signal.SIGKILL)
        wait_ended(pid)


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def process_state(pid: int) -> str:
    """One letter, as in ps; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_ended(pid: int, wait_s: float = WAIT_S) -> None:
    """Waits for the end of a process that is no child of ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(wait_s * 1000), f"process {pid} has not ended after {wait_s:g} s"
    finally:
        os.close(pidfd)


def run(*argv: str | Path, **changes: str) -> str:
    """Runs a command of the system, which must succeed; returns its standard output."""
    # Programs in Python of the distribution must find its interpreter, not that of the tests.
    path = f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ.get('PATH', '')}"
    env = environment({"LC_ALL": "C", "PATH": path, **changes})
    done = ran(*argv, env=env, wait_s=WAIT_S * 2)
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def lock_files() -> list[Path]:
    """Every cluster's there is, of runs that were killed and of those that go on."""
    found = set()
    for directory in {path for base in _bases() if base for path in Path(base).glob("isw-*")}:
        with contextlib.suppress(OSError):  # a mount whose process was killed
            if (directory / LOCK).exists():
                found.add(directory / LOCK)
    return sorted(found)


def pytest_sessionstart() -> None:
    """What a killed run has left attached, swap areas first of all, would be in our way."""
    for path in lock_files():
        with contextlib.suppress(BlockingIOError, FileNotFoundError, PermissionError):
            stale = Cluster(path.parent)  # BlockingIOError: its run is still there
            for left in stale.take_leftovers():
                print(f"left by a run that was killed, and removed: {left}")
            stale.forget()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of the test's own, without donors."""
    own = Cluster()
    try:
        yield own
    finally:
        own.close()


@pytest.fixture(scope="module")
def module_cluster() -> Iterator[Cluster]:
    own = Cluster()
    try:
        own.donor()
        own.donor()
        yield own
    finally:
        own.close()


@pytest.fixture
def shared_cluster(module_cluster: Cluster) -> Iterator[Cluster]:
    """The module's cluster with two donors; what a test leaves behind fails that test."""
    yield module_cluster
    problems = module_cluster._remove_devices() + module_cluster.take_leftovers()
    for donor in module_cluster.donors:
        assert donor.process.poll() is None, donor.log
    assert not problems, "\n".join(problems)
