# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces joined by a bridge.

The bridge lies in a namespace of its own, so that nothing of the machine's own network is touched;
only with `root=True` does one end of a cable appear there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from infiniswap import rights
from infiniswap.errors import InfiniswapError, NotFoundError, UsageError
from infiniswap.system.programs import run_command

PREFIX = "isw-"
NAMES_DIRECTORY = Path("/run/netns")
DEFAULT_NETWORK = "10.213.0.0/24"

_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,19}", re.ASCII)
_INTERFACE = "eth0"
_IP_S_MAX = 10.0


def _ip(*args: str) -> str:
    mend = rights.hint("CAP_NET_ADMIN") or rights.hint("CAP_SYS_ADMIN")
    return run_command(["ip", *args], timeout_s=_IP_S_MAX, mend=mend)


def namespaces(prefix: str = PREFIX) -> tuple[str, ...]:
    """Names of the network namespaces that start with `prefix`."""
    if not NAMES_DIRECTORY.is_dir():
        return ()
    return tuple(
        sorted(entry.name for entry in NAMES_DIRECTORY.iterdir() if entry.name.startswith(prefix))
    )


class NetworkNamespaces:
    """Context manager: makes the namespaces on entry and removes them on exit.

    Each host has one interface, `eth0`, on a common bridge, and its own loopback. Processes are
    started in a host with `command`, and must have ended before exit: a namespace with a process
    in it lives on without a name (its link is gone).

    Args:
        hosts: their names: lower-case letters, digits and `-`.
        network: a private IPv4 network; hosts get .2, .3, ... and the root namespace .1.
        root: also connect this machine's own network, by one interface named `isw` + digits.
    """

    def __init__(
        self, hosts: Sequence[str], *, network: str = DEFAULT_NETWORK, root: bool = False
    ) -> None:
        subnet = ipaddress.ip_network(network)
        if not isinstance(subnet, ipaddress.IPv4Network) or not subnet.is_private:
            raise UsageError(f"{network} is not a private IPv4 network")
        if len(set(hosts)) != len(hosts) or not all(_HOST_NAME.fullmatch(name) for name in hosts):
            raise UsageError(f"not usable as host names: {', '.join(hosts)}")
        if len(hosts) + 2 > subnet.num_addresses - 2:
            raise UsageError(f"{network} has too few addresses for {len(hosts)} hosts")
        self._hosts = tuple(hosts)
        self._subnet = subnet
        self._root = root
        self._id = secrets.token_hex(3)
        self._made: list[str] = []
        self._root_link: str | None = None

    def __enter__(self) -> NetworkNamespaces:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ names

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts' names."""
        return self._hosts

    @property
    def root_address(self) -> str:
        """Address of the root namespace, when it is connected."""
        return str(self._subnet[1])

    def namespace(self, host: str) -> str:
        """Name of the host's network namespace.

        Raises:
            NotFoundError: no such host.
        """
        self._index(host)
        return f"{PREFIX}{self._id}-{host}"

    def address(self, host: str) -> str:
        """The host's IPv4 address.

        Raises:
            NotFoundError: no such host.
        """
        return str(self._subnet[self._index(host) + 2])

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` in the host. Only the network differs there (`ip netns
        exec` would hide the cgroups as well).

        Raises:
            NotFoundError: no such host.
        """
        return ["nsenter", f"--net={NAMES_DIRECTORY / self.namespace(host)}", "--", *argv]

    # ------------------------------------------------------------------ links

    def set_link(self, host: str, *, up: bool) -> None:
        """Pulls the host's cable, or puts it back: nothing answers, nothing is refused.

        Raises:
            NotFoundError: no such host.
            SystemCallError, UnavailableError, DeadlineError: `ip` failed.
        """
        port = self._port(self._index(host))
        _ip("-n", self._bridge, "link", "set", port, "up" if up else "down")

    # ---------------------------------------------------------------- insides

    @property
    def _bridge(self) -> str:
        return f"{PREFIX}{self._id}.bridge"

    def _index(self, host: str) -> int:
        try:
            return self._hosts.index(host)
        except ValueError:
            raise NotFoundError(f"there is no host {host!r} among the namespaces") from None

    def _port(self, index: int) -> str:
        return f"port{index}"

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _make(self) -> None:
        bridge = self._bridge
        self._add_namespace(bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for index, host in enumerate(self._hosts):
            name, port = self.namespace(host), self._port(index)
            self._add_namespace(name)
            pair = ("type", "veth", "peer", "name", port, "netns", bridge)
            _ip("link", "add", _INTERFACE, "netns", name, *pair)
            self._connect(port)
            self._assign(("-n", name), _INTERFACE, self.address(host))
        if self._root:
            link, port = f"isw{self._id}", self._port(len(self._hosts))
            _ip("link", "add", link, "type", "veth", "peer", "name", port, "netns", bridge)
            self._root_link = link
            self._connect(port)
            self._assign((), link, self.root_address)

    def _connect(self, port: str) -> None:
        _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")

    def _assign(self, where: tuple[str, ...], link: str, address: str) -> None:
        # nodad: usable at once.
        address_with_length = f"{address}/{self._subnet.prefixlen}"
        _ip(*where, "addr", "add", address_with_length, "dev", link, "nodad")
        _ip(*where, "link", "set", link, "up")

    def close(self) -> None:
        """Removes everything; idempotent, bounded, goes on past what is gone already.

        Raises:
            SystemCallError, DeadlineError: the first failure, after everything was tried.
        """
        first: InfiniswapError | None = None
        if self._root_link is not None:
            with contextlib.suppress(InfiniswapError):
                _ip("link", "del", self._root_link)
            self._root_link = None
        # Ports first: a process left behind in a host's namespace must not keep its link.
        for index in range(len(self._hosts)):
            with contextlib.suppress(InfiniswapError):
                _ip("-n", self._bridge, "link", "del", self._port(index))
        while self._made:
            name = self._made.pop()
            try:
                if (NAMES_DIRECTORY / name).exists():
                    _ip("netns", "del", name)
            except InfiniswapError as error:
                first = first or error
        if first is not None:
            raise first
