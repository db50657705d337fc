# SPDX-License-Identifier: Apache-2.0
"""Two donors: daemons in network namespaces of their own, reached over a bridge."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infiniswap.control.client import ClientConfig, fetch_status
from infiniswap.demo.children import Child, mortal
from infiniswap.errors import DeadlineError, InfiniswapError, UnavailableError, from_oserror
from infiniswap.system.files import PROC, read_text
from infiniswap.system.netns import NetworkNamespaces
from infiniswap.system.programs import infiniswap
from infiniswap.units import CONTROL_PORT, HostPort, format_size, format_size_short

HOSTS = ("donor-1", "donor-2")
_START_S_MAX = 60.0
_STOP_S = 20.0
_ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A donor's own counters: bytes of pages that it has sent and taken in since its start."""

    name: str
    read_bytes: int
    write_bytes: int


def routed_networks(text: str) -> list[ipaddress.IPv4Network]:
    """Networks this host has a route to, from the text of /proc/net/route; not the default."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            address, mask = (
                int.from_bytes(bytes.fromhex(fields[column]), "little") for column in (1, 7)
            )
            if mask:
                found.append(ipaddress.IPv4Network((address, mask.bit_count()), strict=False))
        except (IndexError, ValueError):
            continue
    return found


def free_network(*, proc: Path = PROC) -> str:
    """A private network that no route of this host leads to.

    Raises:
        UnavailableError: every candidate is taken.
        NotPermittedError, SystemCallError: the routes cannot be read.
    """
    taken = routed_networks(read_text(proc / "net/route", "cannot read the routes"))
    for third in range(256):
        network = ipaddress.IPv4Network(f"10.213.{third}.0/24")
        if not any(network.overlaps(other) for other in taken):
            return str(network)
    raise UnavailableError(
        "this host has routes to every network 10.213.0.0/24 ... 10.213.255.0/24"
    )


def write_secret(path: Path) -> None:
    """A fresh cluster secret, readable by root only.

    Raises:
        NotPermittedError, SystemCallError: it cannot be written.
    """
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    except OSError as error:
        raise from_oserror("cannot write the cluster secret", error, where=str(path)) from error


class Donors:
    """The daemons. `start`, `served` while they run, `stop`.

    Args:
        network: made already; each of HOSTS has a namespace there.
        work: directory for logs.
        config: configuration file; names the secret.
        secret: the cluster secret's file.
        pool_bytes: what each lends at most.
    """

    def __init__(
        self, network: NetworkNamespaces, work: Path, config: Path, secret: Path, pool_bytes: int
    ) -> None:
        self._network = network
        self._work = work
        self._config = config
        self._client = ClientConfig(secret=secret.read_bytes().strip(), connect_s=_ASK_S)
        self._pool_bytes = pool_bytes
        self._children: dict[str, Child] = {}

    @property
    def addresses(self) -> tuple[HostPort, ...]:
        """Control addresses."""
        return tuple(HostPort(self._network.address(host), CONTROL_PORT) for host in HOSTS)

    def start(self) -> None:
        """Starts them; the caller holds signals, as they are on record only afterwards.

        Raises:
            SystemCallError: a process cannot be started.
        """
        for host, address in zip(HOSTS, self.addresses, strict=True):
            argv = infiniswap(
                *("daemon", "--config", str(self._config), "--listen", str(address)),
                *("--name", host, "--pool", format_size(self._pool_bytes), "--headroom", "256M"),
                *("--ready-file", str(self._work / f"{host}.ready")),
            )
            command = self._network.command(host, mortal(argv, signal.SIGTERM))
            self._children[host] = Child(host, command, self._work / f"{host}.log")

    def await_ready(self) -> None:
        """Returns when both serve, with their first slabs at hand.

        Raises:
            SystemCallError: one ended; says what it printed.
            DeadlineError: one does not answer, or has no slab.
        """
        end_s = time.monotonic() + _START_S_MAX
        for host, address in zip(HOSTS, self.addresses, strict=True):
            while problem := self._not_ready(host, address):
                if time.monotonic() >= end_s:
                    raise DeadlineError(
                        f"{host} did not serve within {_START_S_MAX:g} s ({problem}); it last "
                        f"said: {self._children[host].log_tail() or 'nothing'}"
                    )
                time.sleep(0.1)

    def _not_ready(self, host: str, address: HostPort) -> str:
        """Why a donor cannot lend yet, "" when it can."""
        child = self._children[host]
        code = child.exit_code
        if code is not None:
            child.check(code or 1)
        if not (self._work / f"{host}.ready").exists():
            return "it is starting"
        try:
            status = asyncio.run(fetch_status(address, self._client))
        except InfiniswapError as error:
            return str(error)
        if status.pool.slabs_free:
            return ""
        available = format_size_short(status.memory.available_bytes)
        return f"it has no free slab, with {available} of memory available"

    def served(self) -> list[Served]:
        """Each donor's counters now, asked of the donor itself.

        Raises:
            NoDonorError: one does not answer.
        """
        found = []
        for host, address in zip(HOSTS, self.addresses, strict=True):
            counters = asyncio.run(fetch_status(address, self._client)).counters
            found.append(Served(host, counters["read_bytes"], counters["write_bytes"]))
        return found

    def stop(self) -> None:
        """Ends them. Idempotent.

        Raises:
            DeadlineError: one cannot be killed; raised when all were tried.
        """
        _end_all([child.end for child in self._children.values()])


def _end_all(ends: list[Callable[[float], None]]) -> None:
    first: InfiniswapError | None = None
    for end in ends:
        try:
            end(_STOP_S)
        except InfiniswapError as error:
            first = first or error
    if first is not None:
        raise first
