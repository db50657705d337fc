# SPDX-License-Identifier: Apache-2.0
"""What every comparison is given: settings, the run's scope, programs and peers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infiniswap.errors import DeadlineError, SystemCallError
from isw_bench import machine
from isw_bench.children import Child, output_of
from isw_bench.scope import Scope

START_S = 60.0
RUN_S = 120.0
"""Of a program that measures."""
_BUILD_S = 900.0
_QUIET_S_MAX = 60.0
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: of every comparison.
        seconds: of one measurement.
        donor_bytes: of the store in the comparisons of servers and of the engine.
        swap_bytes: what the swapping job fills.
        swap_limit_bytes: what of it may be in memory.
        swap_device_bytes: size of each swap area.
        page_out_bytes: what the job of `page-out` fills.
        page_out_limit_bytes: what of it may be in memory.
        idle_s: how long to watch idle processes.
        process_bytes: size of the device whose memory is looked at.
        demo_args: options for `infiniswap demo`.
        far_rows: names of rows of `far`; empty: all.
        far_size: of the inputs of its jobs.
        quiet_share: before each measurement wait until the processors are busy with other things
            for at most this share of their time; 1 does not wait.
        slab_bytes: of `make bench-faults`.
        host_bytes: memory of a donor's host there.
        depth: requests under way, of `make bench-rdma`.
        slab_sizes: in bytes, there.
        address: of the RDMA port there; empty: the first.
        soft_roce: whether such a port is made for the run.
    """

    rounds: int
    seconds: float
    swap_bytes: int = 0
    swap_limit_bytes: int = 0
    swap_device_bytes: int = 0
    page_out_bytes: int = 0
    page_out_limit_bytes: int = 0
    donor_bytes: int = 0
    idle_s: float = 0.0
    process_bytes: int = 0
    demo_args: tuple[str, ...] = ()
    far_rows: tuple[str, ...] = ()
    far_size: str = ""
    quiet_share: float = 1.0
    slab_bytes: int = 0
    host_bytes: int = 0
    depth: int = 0
    slab_sizes: tuple[int, ...] = ()
    address: str = ""
    soft_roce: bool = False


class SkipError(Exception):
    """A comparison cannot run here; the text says what is missing."""


class Bench:
    """Runs programs for comparisons.

    Args:
        settings: how much.
        scope: entered.
        root: the checkout.
        build: directory of the built programs.
    """

    def __init__(self, settings: Settings, scope: Scope, root: Path, build: Path) -> None:
        self.settings = settings
        self.scope = scope
        self.root = root
        self.build = build
        self.commands: dict[str, str] = {}

    def with_settings(self, settings: Settings) -> Bench:
        """The same run with other settings."""
        other = Bench(settings, self.scope, self.root, self.build)
        other.commands = self.commands
        return other

    @property
    def work(self) -> Path:
        """A directory on disk that goes away with the run."""
        return self.scope.work

    def say(self, text: str) -> None:
        """Progress."""
        print(f"bench: {text}", flush=True)

    def rounds(self, title: str) -> Iterator[int]:
        """Counts the rounds, with a line for each."""
        for number in range(1, self.settings.rounds + 1):
            self.say(f"{title}: round {number} of {self.settings.rounds}")
            yield number

    def await_quiet(self) -> None:
        """Waits for a quiet moment, for a while: on a machine that others use as well."""
        end_s = time.monotonic() + _QUIET_S_MAX
        while self.settings.quiet_share < 1.0 and time.monotonic() < end_s:
            if machine.busy_share(_LOOK_S) <= self.settings.quiet_share:
                return

    def program(self, name: str) -> str:
        """A program of tools/bench/c.

        Raises:
            SkipError: this build has none of that name.
        """
        path = self.build / "bench" / f"isw-bench-{name}"
        if not path.exists():
            raise SkipError(f"{path.name} was not built (see the messages of cmake)")
        return str(path)

    def note(self, label: str, argv: Sequence[str]) -> None:
        """Keeps a command for the report; the first with a label stays."""
        self.commands.setdefault(label, shlex.join(argv))

    @contextlib.contextmanager
    def running(
        self,
        name: str,
        argv: Sequence[str],
        *,
        changes: Mapping[str, str] | None = None,
        ends_on_eof: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> Iterator[Child]:
        """A program for the length of the block."""
        self.note(name, argv)
        with self.scope.interrupts.hold():
            child = Child(
                name,
                argv,
                self.scope.mark,
                self.work / f"{name.replace(' ', '-')}.log",
                changes=changes,
                ends_on_eof=ends_on_eof,
                pass_fds=pass_fds,
            )
        try:
            yield child
        finally:
            with self.scope.interrupts.hold():
                child.end()

    def json_of(self, label: str, argv: Sequence[str], timeout_s: float = RUN_S) -> Any:
        """Runs a program that prints JSON.

        Raises:
            SystemCallError: it failed, or printed something else.
            DeadlineError: it took too long.
        """
        text = self.run(label, argv, timeout_s)
        try:
            return json.loads(text[text.index("{") :])
        except ValueError as error:
            raise SystemCallError(f"`{argv[0]}` printed no JSON: {text[:300]!r}") from error

    def run(
        self,
        label: str,
        argv: Sequence[str],
        timeout_s: float,
        *,
        changes: Mapping[str, str] | None = None,
    ) -> str:
        """Runs a program to its end and returns what it printed.

        Raises:
            SystemCallError, DeadlineError: see output_of.
        """
        self.note(label, argv)
        return output_of(argv, self.scope.mark, timeout_s, changes)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> Any:
        """Waits until the condition gives something true, and returns that.

        Raises:
            DeadlineError: not in time.
        """
        end_s = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() >= end_s:
                raise DeadlineError(f"waited {timeout_s:g} s for {what}, without success")
            time.sleep(0.02)
        return value


def build_programs(root: Path, build: Path) -> None:
    """Configures and builds tools/bench/c, with the library beside it.

    Raises:
        SystemCallError: it does not compile.
    """
    for argv in (
        ["cmake", "-S", str(root), "-B", str(build), "-DISW_BENCH=ON"],
        ["cmake", "--build", str(build), "--parallel", "2"],
    ):
        output_of(argv, "", _BUILD_S)


# ----------------------------------------------------------------------------- servers


@dataclass(frozen=True, slots=True)
class Server:
    """An NBD server on loopback."""

    name: str
    port: int
    export: str
    pid: int
    size_bytes: int

    @property
    def uri(self) -> str:
        """For NBD clients."""
        return f"nbd://127.0.0.1:{self.port}/{self.export}"


@contextlib.contextmanager
def our_donor(bench: Bench, size_bytes: int) -> Iterator[Server]:
    """A donor's store, every slot mapped."""
    slots = 4
    argv = [bench.program("donor"), "--slots", str(slots)]
    argv += ["--slab-bytes", str(size_bytes // slots)]
    with bench.running("donor", argv, ends_on_eof=True) as child:
        told = child.answer(START_S)
        yield Server("infiniswap", told["port"], told["ticket"], child.pid, size_bytes)


@contextlib.contextmanager
def nbdkit_memory(bench: Bench, size_bytes: int, name: str = "nbdkit") -> Iterator[Server]:
    """`nbdkit memory` as it comes. It is given a listening socket, by systemd's protocol, so that
    no port has to be guessed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.fileno()
        script = 'fd=$1; shift; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@" 3<&"$fd"'
        command = ["nbdkit", "-f", "memory", str(size_bytes)]
        argv = ["sh", "-c", script, "sh", str(descriptor), *command]
        with bench.running(name, argv, pass_fds=[descriptor]) as child:
            listener.close()
            bench.until(lambda: _serves(child, port), "nbdkit to serve")
            yield Server("nbdkit memory", port, "", child.pid, size_bytes)


def _serves(child: Child, port: int) -> bool:
    if not child.is_running:
        raise child.failed("ended")
    with socket.create_connection(("127.0.0.1", port), timeout=START_S) as client:
        client.settimeout(START_S)
        return client.recv(8) == b"NBDMAGIC"


# --------------------------------------------------------------------------------- fio


@dataclass(frozen=True, slots=True)
class FioResult:
    """What one fio job measured."""

    requests: int
    iops: float
    mb_per_s: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class FioTarget:
    """Where fio reads and writes; `options` name it and the engine."""

    name: str
    size_bytes: int
    options: Sequence[str]


def fio(
    bench: Bench,
    target: Server | FioTarget,
    *,
    rw: str,
    block_bytes: int,
    depth: int,
    fill: bool = False,
    timeout_s: float = RUN_S,
) -> FioResult:
    """Runs fio against an NBD server, or another target: for the set time, or once over all of
    it."""
    if isinstance(target, Server):
        options = ["--ioengine=nbd", f"--uri={target.uri}"]
        target = FioTarget(target.name, target.size_bytes, options)
    argv = ["fio", "--name=bench", *target.options, f"--rw={rw}"]
    argv += [f"--bs={block_bytes}", f"--iodepth={depth}", f"--size={target.size_bytes}"]
    argv += ["--output-format=json", "--randrepeat=1", "--norandommap", "--lat_percentiles=1"]
    if not fill:
        argv += ["--time_based", f"--runtime={round(bench.settings.seconds * 1000)}ms"]
    what = "fill" if fill else f"{rw}, {block_bytes} bytes, depth {depth}"
    job = bench.json_of(f"fio {what}, {target.name}", argv, timeout_s)["jobs"][0]
    if job["error"]:
        raise SystemCallError(f"fio ended with error {job['error']} on {target.name}")
    part = job["write" if "write" in rw else "read"]
    percentiles = part["lat_ns"]["percentile"]
    return FioResult(
        requests=part["total_ios"],
        iops=part["iops"],
        mb_per_s=part["bw_bytes"] / 1e6,
        p50_us=percentiles["50.000000"] / 1e3,
        p99_us=percentiles["99.000000"] / 1e3,
    )


def require_programs(*programs: str) -> None:
    """Raises:
    SkipError: one of them is not installed.
    """
    for program in programs:
        if machine.find(program) is None:
            raise SkipError(f"{program} is not installed")


def require_root(what: str) -> None:
    """Raises:
    SkipError: not root.
    """
    if os.geteuid() != 0:
        raise SkipError(f"{what} needs root")
