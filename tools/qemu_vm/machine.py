# SPDX-License-Identifier: Apache-2.0
"""Runs the machines of a plan: starts them, passes their output on, waits within bounds, and takes
everything away, also when it is interrupted. When this process is killed, QEMU dies with it (the
parent's death signal) and the next call removes the directory that is left."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from infiniswap.errors import DeadlineError, SystemCallError
from qemu_vm import accel, cache, commands, initrd, kernels, qemu
from qemu_vm.plan import Plan, check_host

_TICK_S = 0.05
_END_S = 60.0
"""From the command's end until QEMU's: output still on its way, then power-off."""
_BOOTS_MAX = 3
_CONSOLE_BYTES = 1 << 20
_SHOWN_LINES = 40
_BAD = re.compile(r"Kernel panic|Oops|\bBUG:|vm: cannot start")
_CHUNK = 65536
_MKFS_S = 120.0
_RUNS = "runs"


class Machine:
    """One guest.

    Attributes:
        name: h1, h2, ...
        status: the command's exit status, None while there is none.
        up_s, ended_s: when it came up and when the command ended, on the monotonic clock.
        console: last messages of its kernel.
        keyboard: where a terminal's input goes.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self.up_s: float | None = None
        self.ended_s: float | None = None
        self.console = bytearray()
        self.keyboard: socket.socket | None = None
        self._rest: dict[int, bytes] = {}

    def poll(self, now_s: float) -> int | None:
        """Looks for what the guest has said of itself; returns the exit status."""
        if self.up_s is None and (self.directory / "up").exists():
            self.up_s = now_s
        if self.status is None:
            with contextlib.suppress(OSError, ValueError):
                self.status = int((self.directory / "status").read_text())
                self.ended_s = now_s
        return self.status

    @property
    def running(self) -> bool:
        """Whether its QEMU is."""
        return self.process is not None and self.process.poll() is None

    @property
    def panicked(self) -> bool:
        """Whether its kernel has said so."""
        return b"Kernel panic" in self.console

    def keep(self, data: bytes) -> None:
        """Remembers kernel messages."""
        self.console += data
        del self.console[:-_CONSOLE_BYTES]

    def lines(self, data: bytes, stream: int) -> bytes:
        """Whole lines with the machine's name before each; the rest stays for the next call, and
        comes when there is no more data."""
        whole = self._rest.pop(stream, b"") + data
        cut = whole.rfind(b"\n") + 1 if data else len(whole)
        self._rest[stream] = whole[cut:]
        prefix = f"{self.name}: ".encode()
        return b"".join(prefix + line for line in whole[:cut].splitlines(keepends=True))

    def told(self) -> str:
        """What its kernel said last, or from where it began to go wrong, for a message."""
        lines = self.console.decode(errors="replace").replace("\r", "").strip().splitlines()
        bad = next((at for at, line in enumerate(lines) if _BAD.search(line)), None)
        if bad is None:
            return "\n".join(lines[-_SHOWN_LINES:])
        return "\n".join(lines[bad : bad + _SHOWN_LINES])


def run(plan: Plan) -> int:
    """Runs the plan's command and returns its exit status: with several machines that of the
    first one that failed.

    Raises:
        UnavailableError, NotFoundError: something it needs is not there.
        SystemCallError: a guest did not come up, panicked or its QEMU ended.
        DeadlineError: a guest did not come up, or the command not end, in its time.
    """
    check_host()
    kernel = kernels.get(plan.kernel)
    ram_disk = initrd.get(kernel)
    plan = dataclasses.replace(plan, accel=accel.choose(plan.accel, kernel, ram_disk))
    for _ in range(_BOOTS_MAX - 1):
        try:
            return _run(plan, kernel, ram_disk)
        except _BootError as error:
            print(f"{error}\nIt is booted once more.", file=sys.stderr, flush=True)
    return _run(plan, kernel, ram_disk)


class _BootError(SystemCallError):
    """A kernel panicked before any machine was up, under TCG: now and then, when one processor
    translates what another is writing (static keys), and then not the next time."""


def _run(plan: Plan, kernel: kernels.Kernel, ram_disk: Path) -> int:
    with _directory() as top:
        machines = [Machine(name, top / name) for name in plan.names]
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(selectors.DefaultSelector())
            links = _links(plan, stack)
            for machine, ends in zip(machines, links, strict=True):
                stack.callback(_kill, machine)
                _start(plan, machine, kernel, ram_disk, ends, watch, stack)
            for ends in links:
                for end in ends:
                    end.close()
            if plan.terminal:
                stack.enter_context(_raw_terminal())
            _wait(plan, machines, watch)
    return next((one.status for one in machines if one.status), 0)


# ---------------------------------------------------------------------------- directories


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """A directory for one run; those of killed runs are removed. Whoever lives holds its lock."""
    top = cache.directory() / _RUNS
    with cache.locked(_RUNS):
        top.mkdir(exist_ok=True)
        sweep()
        mine = Path(tempfile.mkdtemp(prefix="", dir=top))
        descriptor = os.open(mine, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        for name in ("share", "barriers"):
            (mine / name).mkdir()
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        os.close(descriptor)


def sweep() -> None:
    """Removes the directories of runs that were killed."""
    for path in (cache.directory() / _RUNS).glob("*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _write_orders(plan: Plan, machine: Machine) -> None:
    """What guest/stage2 and guest/vm-barrier read."""
    machine.directory.mkdir()
    settings = qemu.settings(plan, machine.name)
    (machine.directory / "settings").write_text(
        "".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items())
    )
    env = dict(plan.env)
    env["INFINISWAP_VM"] = plan.kernel
    env["INFINISWAP_VM_HOST"] = machine.name
    env["INFINISWAP_VM_HOSTS"] = " ".join(plan.names)
    env["PATH"] = env.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin:/run/vm/bin"
    command = machine.directory / "command"
    command.write_text(
        "\n".join(
            [
                "#!/bin/sh",
                *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
                f"cd {shlex.quote(str(plan.directory))} || exit 126",
                f"exec {shlex.join(plan.command)}",
                "",
            ]
        )
    )
    command.chmod(0o755)


# ---------------------------------------------------------------------------- starting


def _links(plan: Plan, stack: contextlib.ExitStack) -> list[list[socket.socket]]:
    """Ends of the virtual network's cables for each machine: all lead to the first one."""
    ends: list[list[socket.socket]] = [[] for _ in plan.names]
    for number in range(1, plan.hosts):
        first, other = socket.socketpair()
        stack.callback(first.close)
        stack.callback(other.close)
        ends[0].append(first)
        ends[number].append(other)
    return ends


def _start(
    plan: Plan,
    machine: Machine,
    kernel: kernels.Kernel,
    ram_disk: Path,
    links: list[socket.socket],
    watch: selectors.BaseSelector,
    stack: contextlib.ExitStack,
) -> None:
    _write_orders(plan, machine)
    ours: dict[str, socket.socket] = {}
    theirs: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as passing:
        for name in ("console", "out", "err"):
            ours[name], theirs[name] = socket.socketpair()
            stack.callback(ours[name].close)
            passing.callback(theirs[name].close)
            ours[name].setblocking(False)
            watch.register(ours[name], selectors.EVENT_READ, (machine, name))
        disk = passing.enter_context(_disk(machine.directory / "disk", plan.disk_bytes))
        channels = qemu.Channels(
            theirs["console"].fileno(),
            theirs["out"].fileno(),
            theirs["err"].fileno(),
            disk.fileno(),
            [link.fileno() for link in links],
        )
        argv = qemu.command_line(
            plan, machine.name, kernel, ram_disk, machine.directory.parent, channels
        )
        with (machine.directory / "qemu.log").open("wb") as log:
            machine.process = subprocess.Popen(
                commands.dying_with_us(*argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=channels.all,
                # A Ctrl-C is for the command in a terminal, or for us: never for QEMU. Not a
                # session of its own, which would have a priority of its own (sched(7), autogroup).
                process_group=0,
            )
    if plan.terminal:
        watch.register(sys.stdin.fileno(), selectors.EVENT_READ, (machine, "in"))
        machine.keyboard = ours["out"]


def _disk(path: Path, size_bytes: int) -> BinaryIO:
    """An empty file system in a sparse file that has no name any more."""
    with path.open("wb") as file:
        file.truncate(size_bytes)
    argv = ("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1")
    commands.run(*argv, str(path), bound_s=_MKFS_S, what="cannot make the scratch disk")
    opened = path.open("r+b", buffering=0)
    path.unlink()
    return opened


def _kill(machine: Machine) -> None:
    if machine.process is not None:
        machine.process.kill()
        machine.process.wait()


# ---------------------------------------------------------------------------- waiting


def _wait(plan: Plan, machines: list[Machine], watch: selectors.BaseSelector) -> None:
    start_s = time.monotonic()
    while True:
        for key, _ in watch.select(_TICK_S):
            machine, name = key.data
            _pass_on(plan, machine, name, key, watch)
        now_s = time.monotonic()
        for machine in machines:
            machine.poll(now_s)
        for machine in machines:
            try:
                _check(plan, machine, start_s, now_s)
            except SystemCallError as error:
                none_up = all(one.up_s is None for one in machines)
                if plan.accel == "tcg" and machine.panicked and none_up:
                    raise _BootError(error.what, mend=error.mend) from None
                raise
        if all(machine.status is not None and not machine.running for machine in machines):
            break
    for key, _ in watch.select(0):
        machine, name = key.data
        while _pass_on(plan, machine, name, key, watch):
            pass


def _check(plan: Plan, machine: Machine, start_s: float, now_s: float) -> None:
    """Raises what has gone wrong."""
    if machine.status is not None:
        if machine.running and machine.ended_s is not None and now_s - machine.ended_s > _END_S:
            _kill(machine)
        return
    if not machine.running:
        # Between the two looks it may have ended as it should.
        if machine.poll(now_s) is None:
            raise SystemCallError(_why_it_ended(machine), mend=_MEND)
        return
    if machine.up_s is None and now_s - start_s > plan.boot_s:
        raise DeadlineError(
            f"machine {machine.name} (kernel {plan.kernel}, {plan.accel}) was not up after "
            f"{plan.boot_s:g} s. Its last messages:\n{machine.told()}",
            mend="More time: --boot-timeout.",
        )
    if (
        plan.timeout_s is not None
        and machine.up_s is not None
        and now_s - machine.up_s > plan.timeout_s
    ):
        raise DeadlineError(
            f"the command did not end within {plan.timeout_s:g} s in machine {machine.name}; "
            f"its kernel's last messages:\n{machine.told()}",
            mend="More time: --timeout.",
        )


_MEND = "What the kernel said is above; tools/vm shell boots the same machine by hand."


def _why_it_ended(machine: Machine) -> str:
    log = ""
    with contextlib.suppress(OSError):
        log = (machine.directory / "qemu.log").read_text(errors="replace").strip()
    told = machine.told()
    if machine.panicked:
        what = f"the kernel of machine {machine.name} panicked"
    elif machine.up_s is None:
        what = f"machine {machine.name} did not start"
    else:
        what = f"machine {machine.name} ended before its command did"
    return "\n".join(part for part in (what, log, told) if part)


def _pass_on(
    plan: Plan,
    machine: Machine,
    name: str,
    key: selectors.SelectorKey,
    watch: selectors.BaseSelector,
) -> bool:
    """Moves what there is; False when nothing more will come."""
    try:
        data = os.read(key.fd, _CHUNK)
    except BlockingIOError:
        return False
    except OSError:
        data = b""
    if not data:
        watch.unregister(key.fileobj)
    if name == "console":
        machine.keep(data)
    elif name == "in":
        if data and machine.keyboard is not None:
            machine.keyboard.setblocking(True)
            machine.keyboard.sendall(data)
            machine.keyboard.setblocking(False)
    else:
        target = sys.stderr if name == "err" else sys.stdout
        shown = data if plan.hosts == 1 else machine.lines(data, key.fd)
        _write(target.fileno(), shown)
    return bool(data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the guest's terminal, Ctrl-C as well."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
