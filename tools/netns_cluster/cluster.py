# SPDX-License-Identifier: Apache-2.0
"""What can be done to a cluster. Every operation may be repeated, by any process of root's."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infiniswap import config as configuration
from infiniswap.control.client import ClientConfig, fetch_status
from infiniswap.control.messages import Status
from infiniswap.demo.children import placed
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    InfiniswapError,
    MemoryLimitError,
    NotFoundError,
    NotPermittedError,
    SystemCallError,
    UsageError,
    from_oserror,
)
from infiniswap.secret import read_secret
from infiniswap.system.files import try_read_text
from infiniswap.system.memory import CgroupMemory
from infiniswap.units import CONTROL_PORT, MIB, HostPort, format_size
from netns_cluster import leftovers, memory, network, processes, record
from netns_cluster import plan as plans
from netns_cluster.plan import Plan
from netns_cluster.record import Host, Process, Record

_READY_S_MAX = 60.0
_STOP_S = 20.0
_ASK_S = 3.0
_DELAY_MS_MAX = 5000.0

_SQUEEZER = """
import signal, sys, time
open("/proc/self/oom_score_adj", "w").write("1000")  # rather this one than the daemon
held = []
for _ in range(int(sys.argv[1])):  # a MiB at a time: no host fills up in a blink
    held.append(b"x" * 1048576)
    time.sleep(0.004)
print("taken", flush=True)
while True:
    signal.pause()
"""
_SQUEEZE_S_MAX = 120.0
_STOPPED_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class HostState:
    """A host as it is now.

    Attributes:
        host: what is recorded.
        daemon: "serving", "frozen", "dead", or "silent" for one that runs and does not answer.
        memory: of its cgroup.
        status: what its daemon says, None where it says nothing.
    """

    host: Host
    daemon: str
    memory: CgroupMemory
    status: Status | None


def check_machine() -> None:
    """Whether this machine can have clusters, as this user.

    Raises:
        NotPermittedError, UnavailableError: not, with the remedy.
    """
    if os.geteuid() != 0:
        raise NotPermittedError(
            "network namespaces and memory cgroups need root", mend="Run it with sudo."
        )
    network.check_tools()
    memory.cluster_cgroup("probe")


def up(plan: Plan) -> Cluster:
    """Makes a cluster; first takes away what a killed command has left of one of that name.

    Raises:
        ConflictError: there is one.
        MemoryLimitError: this machine has not that much memory.
        InfiniswapError: something could not be made; then nothing stays.
    """
    record.check_name(plan.name)
    plans.check(plan)
    with record.locked(plan.name):
        there = record.load(plan.name)
        if there is not None and (there.keeper is None or there.keeper.state):
            raise ConflictError(
                f"there is a cluster {plan.name}",
                where=str(record.state_directory(plan.name)),
                mend=f"Take it down (tools/netns-cluster down --name {plan.name}), or choose "
                "another --name.",
            )
        leftovers.sweep(plan.name)
        plans.check_memory(plan)
        cluster = Cluster(plan.name)
        try:
            cluster._make(plan)
        except BaseException:
            leftovers.sweep(plan.name)
            raise
    return cluster


def down(name: str) -> bool:
    """Takes a cluster away, or what is left of it. False when there was nothing.

    Raises:
        InfiniswapError: something is in use.
    """
    record.check_name(name)
    with record.locked(name):
        there = leftovers.exists(name)
        leftovers.sweep(name)
    return there


class Cluster:
    """A cluster that is up, known by its name to any process of root's.

    Args:
        name: its name.
    """

    def __init__(self, name: str = record.DEFAULT_NAME) -> None:
        self.name = record.check_name(name)

    @property
    def record(self) -> Record:
        """What is recorded now.

        Raises:
            NotFoundError: no such cluster.
        """
        found = record.load(self.name)
        if found is None:
            raise NotFoundError(
                f"there is no cluster {self.name}",
                mend="Start one: tools/netns-cluster up --hosts 3 (--name says which).",
            )
        return found

    def directory(self, host: str) -> Path:
        """Configuration, run directory and logs of a host."""
        return record.state_directory(self.name) / host

    def backup_directory(self, host: str) -> Path:
        """Backups of the host's devices."""
        return record.work_directory(self.name) / host

    @property
    def secret_file(self) -> Path:
        """The cluster's secret."""
        return record.state_directory(self.name) / "secret"

    # ------------------------------------------------------------------------ making

    def _make(self, plan: Plan) -> None:
        hosts = [
            Host(f"h{number}", network.address(number), one.memory_bytes, one.pool, one.link)
            for number, one in enumerate(plan.hosts, 1)
        ]
        keeper = None if plan.keep else Process.of(os.getpid())
        # While it is being made it is this process's, so that nobody takes half of one for whole.
        whole = Record(self.name, Process.of(os.getpid()), hosts, plan.slab_bytes, plan.headroom)
        whole.settings = dict(plan.settings)
        try:
            record.work_directory(self.name).mkdir(mode=0o700)
            record.state_directory(self.name).mkdir(mode=0o700)
            self.secret_file.touch(mode=0o600)
            self.secret_file.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
            for host in hosts:
                self.directory(host.name).mkdir()
                self.backup_directory(host.name).mkdir()
                self._write_config(whole, host)
        except OSError as error:
            raise from_oserror("cannot make the cluster's directories", error) from error
        record.save(whole)
        memory.make(self.name)
        network.make(self.name)
        for host in hosts:
            memory.make_host(self.name, host.name, host.memory_bytes)
            network.make_host(self.name, host.name, host.address, host.link)
            self._start_daemon(host)
            record.save(whole)
        for host in hosts:
            self._await_daemon(host)
        whole.keeper = keeper
        record.save(whole)

    def _write_config(self, whole: Record, host: Host) -> None:
        """Raises ConfigError for a setting that cannot be one."""
        sections: dict[str, dict[str, str]] = {
            "daemon": {
                "listen": f'"{host.address}:{CONTROL_PORT}"',
                "name": f'"{host.name}"',
                "pool": f'"{host.pool}"',
                "headroom": f'"{whole.headroom}"',
                "slab": f'"{whole.slab_bytes}"',
                "state_dir": f'"{self.directory(host.name)}"',
                # A mount of one process here, not of a host: a killed daemon loses what it lends.
                "run_dir": '""',
            },
            "device": {
                "slab": f'"{whole.slab_bytes}"',
                "staging": '"16M"',
                "run_dir": f'"{self.directory(host.name) / "devices"}"',
                "backup_dir": f'"{self.backup_directory(host.name)}"',
            },
            "cluster": {
                "secret_file": f'"{self.secret_file}"',
                "peers": str(
                    [f"{other.address}" for other in whole.hosts if other.name != host.name]
                ).replace("'", '"'),
            },
        }
        for key, value in whole.settings.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, {})[name] = value
        path = self.directory(host.name) / "infiniswap.toml"
        path.write_text(
            "\n".join(
                f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
                for section, keys in sections.items()
            ),
            encoding="utf-8",
        )
        configuration.load(path, environ={})

    def _start_daemon(self, host: Host) -> None:
        directory = self.directory(host.name)
        (directory / "ready").unlink(missing_ok=True)
        argv = [sys.executable, "-m", "infiniswap", "daemon"]
        argv += ["--memory-cgroup", str(memory.host_cgroup(self.name, host.name).path)]
        argv += ["--ready-file", str(directory / "ready")]
        leaf = memory.leaf(self.name, host.name, memory.SYSTEM)
        host.daemon = processes.start(
            placed(network.inside(self.name, host.name, argv), [leaf]),
            directory / "daemon.log",
            processes.environment(directory / "infiniswap.toml"),
        )

    def _await_daemon(self, host: Host) -> None:
        directory = self.directory(host.name)
        if host.daemon is not None:
            processes.await_ready(
                host.daemon,
                directory / "daemon.log",
                f"the daemon of {host.name}",
                (directory / "ready").exists,
                _READY_S_MAX,
            )

    # ----------------------------------------------------------------------- running

    def command(self, host: str, argv: Sequence[str], *, cgroup: bool = True) -> list[str]:
        """The command that runs `argv` on a host; to be run with `environment`.

        Args:
            host: its name.
            argv: the command.
            cgroup: also within the host's memory. Not for what serves a device (the command that
                starts one included): when the host's memory runs out, that process would wait for
                pages that only it can bring.

        Raises:
            NotFoundError: no such cluster or host.
        """
        self.record.host(host)
        inside = network.inside(self.name, host, argv)
        return placed(inside, [memory.leaf(self.name, host, memory.JOBS)]) if cgroup else inside

    def environment(self, host: str) -> dict[str, str]:
        """For commands on a host: this checkout's `infiniswap`, the host's configuration."""
        return processes.environment(self.directory(host) / "infiniswap.toml")

    # ------------------------------------------------------------------------- links

    def cut(self, host: str) -> None:
        """Pulls a host's cable: packets vanish.

        Raises:
            NotFoundError: no such cluster or host.
            InfiniswapError: `ip` failed.
        """
        self._link(host, cut=True)

    def heal(self, host: str) -> None:
        """Makes a host's cable as it was: neither cut nor slow. Raises as `cut`."""
        self._link(host, cut=False)
        self.delay(host, 0.0)

    def _link(self, name: str, *, cut: bool) -> None:
        with record.locked(self.name):
            whole = self.record
            host = whole.host(name)
            network.set_link(self.name, name, up=not cut)
            host.cut = cut
            record.save(whole)

    def delay(self, name: str, delay_ms: float) -> None:
        """Holds every packet of a host back for so long, in either direction; 0: no longer.

        Raises:
            UsageError: not a usable delay.
            NotFoundError: no such cluster or host.
            InfiniswapError: the relay could not be started; then the link is as without one.
        """
        if delay_ms != 0.0 and not 1.0 <= delay_ms <= _DELAY_MS_MAX:
            raise UsageError(f"a delay is 1 to {_DELAY_MS_MAX:g} ms, or 0 for none")
        with record.locked(self.name):
            whole = self.record
            host = whole.host(name)
            if host.relay is not None:
                self._end_relay(host)
                record.save(whole)
            if delay_ms > 0.0:
                try:
                    self._start_relay(host, delay_ms)
                except BaseException:
                    self._end_relay(host)
                    raise
                finally:
                    record.save(whole)

    def _start_relay(self, host: Host, delay_ms: float) -> None:
        log = self.directory(host.name) / "relay.log"
        log.unlink(missing_ok=True)
        one, other = network.prepare_relay(self.name, host.name)
        script = str(Path(__file__).with_name("relay.py"))
        argv = [sys.executable, "-I", script, one, other, f"{delay_ms:g}"]
        host.relay = processes.start(network.inside(self.name, "net", argv), log)
        processes.await_ready(
            host.relay,
            log,
            f"the relay of {host.name}",
            lambda: "ready" in (try_read_text(log) or ""),
            _READY_S_MAX,
        )
        host.delay_ms = delay_ms

    def _end_relay(self, host: Host) -> None:
        if host.relay is not None:
            host.relay.send(signal.SIGKILL)
            host.relay.wait(_STOP_S)
        network.without_relay(self.name, host.name)
        host.relay, host.delay_ms = None, 0.0

    # ----------------------------------------------------------------------- daemons

    def freeze(self, host: str) -> None:
        """Stops a host's daemon in its tracks: its connections stay, nothing is answered.

        Raises:
            NotFoundError: no such cluster or host.
            ConflictError: the daemon is dead.
        """
        daemon = self._send(host, signal.SIGSTOP)
        # The signal is there at once; each of its threads stops at its next step.
        end_s = time.monotonic() + _STOPPED_S_MAX
        while daemon.state not in ("T", "") and time.monotonic() < end_s:
            time.sleep(0.01)

    def thaw(self, host: str) -> None:
        """Lets a frozen daemon go on. Raises as `freeze`."""
        self._send(host, signal.SIGCONT)

    def _send(self, name: str, number: signal.Signals) -> Process:
        with record.locked(self.name):
            host = self.record.host(name)
            if host.daemon is None or not host.daemon.send(number):
                raise ConflictError(
                    f"the daemon of {name} is dead",
                    mend=f"Start it: tools/netns-cluster restart --name {self.name} {name}.",
                )
            return host.daemon

    def kill(self, name: str) -> None:
        """Kills a host's daemon (SIGKILL); a dead one stays dead.

        Raises:
            NotFoundError: no such cluster or host.
            DeadlineError: it does not die.
        """
        with record.locked(self.name):
            self._end(self.record.host(name).daemon, signal.SIGKILL)

    def restart(self, name: str, *, wait: bool = True) -> None:
        """Ends a host's daemon in order, if it runs, and starts it again.

        Args:
            name: of the host.
            wait: until it serves; without, `await_serving` does that.

        Raises:
            NotFoundError: no such cluster or host.
            SystemCallError, DeadlineError: it does not come up.
        """
        with record.locked(self.name):
            whole = self.record
            host = whole.host(name)
            self._end(host.daemon, signal.SIGTERM)
            self._start_daemon(host)
            record.save(whole)
        if wait:
            self.await_serving(name)

    def await_serving(self, name: str) -> None:
        """Waits until a daemon that was started serves. Raises as `restart`."""
        self._await_daemon(self.record.host(name))

    def _end(self, process: Process | None, number: signal.Signals) -> None:
        if process is None:
            return
        process.send(number)
        process.send(signal.SIGCONT)
        if not process.wait(_STOP_S):
            process.send(signal.SIGKILL)
            if not process.wait(_STOP_S):
                raise DeadlineError(f"process {process.pid} does not die", mend="See dmesg.")

    # ------------------------------------------------------------------------ memory

    def squeeze(self, name: str, size_bytes: int) -> None:
        """Takes that much of a host's memory, as its applications would: within a second or so,
        and holds it. A second one takes the place of the first.

        Raises:
            NotFoundError: no such cluster or host.
            UsageError: more than the host has.
            MemoryLimitError: the host's memory ran out.
            DeadlineError: it took too long.
        """
        with record.locked(self.name):
            whole = self.record
            host = whole.host(name)
            if host.squeezer is not None and host.squeezer.state:
                if host.squeeze_bytes == size_bytes:
                    return
                self._end(host.squeezer, signal.SIGKILL)
            host.squeezer, host.squeeze_bytes = None, 0
            if not MIB <= size_bytes < host.memory_bytes:
                record.save(whole)
                raise UsageError(
                    f"{name} has {format_size(host.memory_bytes)}: squeeze it by 1M or more, and "
                    "by less than that"
                )
            self._take(whole, host, size_bytes)

    def _take(self, whole: Record, host: Host, size_bytes: int) -> None:
        log = self.directory(host.name) / "squeeze.log"
        log.unlink(missing_ok=True)
        leaf = memory.leaf(self.name, host.name, memory.SYSTEM)
        argv = [sys.executable, "-I", "-S", "-c", _SQUEEZER, str(-(-size_bytes // MIB))]
        host.squeezer = processes.start(placed(argv, [leaf]), log)
        host.squeeze_bytes = size_bytes
        record.save(whole)
        try:
            processes.await_ready(
                host.squeezer,
                log,
                f"squeezing {host.name}",
                lambda: "taken" in (try_read_text(log) or ""),
                _SQUEEZE_S_MAX,
            )
        except BaseException as error:
            self._end(host.squeezer, signal.SIGKILL)
            host.squeezer, host.squeeze_bytes = None, 0
            record.save(whole)
            if isinstance(error, SystemCallError):
                raise MemoryLimitError(
                    f"the memory of {host.name} ran out before {format_size(size_bytes)} were "
                    "taken, and the kernel has ended what took it",
                    mend="Squeeze it by less, or in steps; its daemon needs a moment to give back.",
                ) from error
            raise

    def release(self, name: str) -> None:
        """Gives back what `squeeze` has taken; nothing to do without. Raises as `kill`."""
        with record.locked(self.name):
            whole = self.record
            host = whole.host(name)
            self._end(host.squeezer, signal.SIGKILL)
            host.squeezer, host.squeeze_bytes = None, 0
            record.save(whole)

    # ------------------------------------------------------------------------ status

    def states(self) -> list[HostState]:
        """Every host as it is now; each daemon is asked from within its own host.

        Raises:
            NotFoundError: no such cluster.
        """
        return [self.state(host.name) for host in self.record.hosts]

    def state(self, name: str) -> HostState:
        """One host as it is now. Raises as `states`, and NotFoundError for no such host."""
        host = self.record.host(name)
        figures = memory.host_cgroup(self.name, name).memory()
        process_state = host.daemon.state if host.daemon is not None else ""
        status = self._ask(host) if process_state not in ("", "T") else None
        daemon = "serving" if status is not None else "silent"
        daemon = {"": "dead", "T": "frozen"}.get(process_state, daemon)
        return HostState(host, daemon, figures, status)

    def _ask(self, host: Host) -> Status | None:
        client = ClientConfig(keys=read_secret(self.secret_file), connect_s=_ASK_S)
        address = HostPort(host.address, CONTROL_PORT)
        try:
            return network.call_inside(
                self.name, host.name, lambda: asyncio.run(fetch_status(address, client))
            )
        except InfiniswapError:
            return None


def wait_gone(name: str, keeper: Process, poll_s: float = 0.2) -> None:
    """Returns when the cluster of this keeper is gone."""
    while (there := record.load(name)) is not None and there.keeper == keeper:
        time.sleep(poll_s)
