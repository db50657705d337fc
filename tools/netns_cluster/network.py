# SPDX-License-Identifier: Apache-2.0
"""The hosts' network: a namespace each, joined by a bridge in a namespace of its own.

    iswc-NAME-h1: eth0 ══ h1 ┐
    iswc-NAME-h2: eth0 ══ h2 ┼ bridge  :iswc-NAME-net
    iswc-NAME-h3: eth0 ══ h3 ┘

Nothing of the machine's own network is touched, and nothing of it is reached from there. With a
delay a relay stands between port and bridge: `h2 ── relay ── h2.d ══ h2.b ─ bridge`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from infiniswap.errors import (
    InfiniswapError,
    UnavailableError,
    UsageError,
    from_oserror,
)
from infiniswap.system.netns import NAMES_DIRECTORY, namespaces
from infiniswap.system.programs import run_command
from netns_cluster.record import PREFIX

T = TypeVar("T")

HOSTS_MAX = 100
_NETWORK = "10.77.0"
_CLONE_NEWNET = 0x4000_0000
_RATE = re.compile(r"([1-9]\d{0,5})(kbit|mbit|gbit)", re.ASCII)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BURST_S = 0.004
_BURST_BYTES_MIN = 64 << 10


def _ip(*args: str) -> str:
    return run_command(["ip", *args], timeout_s=10.0, mend="It needs root (CAP_NET_ADMIN).")


def namespace(cluster: str, host: str) -> str:
    """Name of a host's namespace, or with "net" of the bridge's."""
    return f"{PREFIX}{cluster}-{host}"


def address(number: int) -> str:
    """Of the host with this number, from 1."""
    return f"{_NETWORK}.{number}"


def all_namespaces(cluster: str) -> tuple[str, ...]:
    """Every namespace of the cluster that there is."""
    return namespaces(f"{PREFIX}{cluster}-")


def inside(cluster: str, host: str, argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` in the host's namespace; only the network differs there."""
    return ["nsenter", f"--net={NAMES_DIRECTORY / namespace(cluster, host)}", "--", *argv]


def call_inside(cluster: str, host: str, function: Callable[[], T]) -> T:
    """Calls it in a thread that is in the host's namespace.

    Raises:
        InfiniswapError: what the function raises.
        SystemCallError: the namespace cannot be entered.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    path = NAMES_DIRECTORY / namespace(cluster, host)

    def body() -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
            finally:
                os.close(descriptor)
            results.append(function())
        except OSError as error:
            errors.append(from_oserror("cannot enter the namespace", error, where=str(path)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name=f"in {path.name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def check_rate(text: str) -> str:
    """The speed of a link, when it is one.

    Raises:
        UsageError: it is not.
    """
    if text and not _RATE.fullmatch(text):
        raise UsageError(f"{text!r} is no speed of a link: for example 100mbit, 1gbit")
    return text


# ------------------------------------------------------------------------- making


def make(cluster: str) -> None:
    """Makes the bridge.

    Raises:
        InfiniswapError: `ip` failed.
    """
    net = namespace(cluster, "net")
    _ip("netns", "add", net)
    _ip("-n", net, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
    _ip("-n", net, "link", "set", "bridge", "up")


def make_host(cluster: str, host: str, own: str, rate: str) -> None:
    """Makes a host's namespace and its cable, `rate` fast in either direction.

    Raises:
        InfiniswapError: `ip` or `tc` failed.
    """
    name, net = namespace(cluster, host), namespace(cluster, "net")
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", host, "netns", net)
    _ip("-n", net, "link", "set", host, "master", "bridge", "up")
    _ip("-n", name, "addr", "add", f"{own}/24", "dev", "eth0", "nodad")
    _ip("-n", name, "link", "set", "eth0", "up")
    if match := _RATE.fullmatch(rate):
        burst = max(_BURST_BYTES_MIN, int(float(match[1]) * _BITS[match[2]] / 8 * _BURST_S))
        shape = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
        for where, link in ((name, "eth0"), (net, host)):
            run_command(["tc", "-n", where, "qdisc", "add", "dev", link, *shape])


def set_link(cluster: str, host: str, *, up: bool) -> None:
    """Pulls the host's cable, or puts it back: packets vanish, nothing is refused.

    Raises:
        InfiniswapError: `ip` failed.
    """
    _ip("-n", namespace(cluster, "net"), "link", "set", host, "up" if up else "down")


def prepare_relay(cluster: str, host: str) -> tuple[str, str]:
    """Takes the port off the bridge; returns the two interfaces that a relay is to join.

    Raises:
        InfiniswapError: `ip` failed.
    """
    net, near, far = namespace(cluster, "net"), f"{host}.d", f"{host}.b"
    _ip("-n", net, "link", "add", near, "type", "veth", "peer", "name", far)
    _ip("-n", net, "link", "set", near, "up")
    _ip("-n", net, "link", "set", host, "nomaster")
    _ip("-n", net, "link", "set", far, "master", "bridge", "up")
    return host, near


def without_relay(cluster: str, host: str) -> None:
    """Puts the port back on the bridge; the relay has ended. Nothing to do without one.

    Raises:
        InfiniswapError: `ip` failed.
    """
    net = namespace(cluster, "net")
    with contextlib.suppress(InfiniswapError):
        _ip("-n", net, "link", "del", f"{host}.d")
    _ip("-n", net, "link", "set", host, "master", "bridge")


# ----------------------------------------------------------------------- removing


def pids(name: str) -> list[int]:
    """Processes in a namespace.

    Raises:
        InfiniswapError: `ip` failed.
    """
    return [int(pid) for pid in run_command(["ip", "netns", "pids", name]).split()]


def remove(cluster: str) -> None:
    """Removes every namespace of the cluster with what is in it; idempotent.

    Raises:
        InfiniswapError: the first failure, after everything was tried.
    """
    first: InfiniswapError | None = None
    # The bridge's goes first, and with it the ports: a process left in a host's keeps no link.
    for name in sorted(all_namespaces(cluster), key=lambda name: not name.endswith("-net")):
        try:
            _ip("netns", "del", name)
        except InfiniswapError as error:
            first = first or error
    if first is not None:
        raise first


def check_tools() -> None:
    """Whether namespaces can be made here.

    Raises:
        UnavailableError: not.
    """
    if not Path("/proc/self/ns/net").exists():
        raise UnavailableError(
            "this kernel has no network namespaces", mend="It needs CONFIG_NET_NS."
        )
    for argv in (["ip", "-V"], ["tc", "-V"], ["nsenter", "-V"]):
        run_command(argv)
