# SPDX-License-Identifier: Apache-2.0
"""Hosts in network namespaces of the real kernel."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniswap.errors import SystemCallError
from infiniswap.system import netns
from infiniswap.system.netns import NetworkNamespaces
from infiniswap.system.programs import run_command

pytestmark = [pytest.mark.requires_netns, pytest.mark.requires_tool("ip", "nsenter")]

LISTEN = (
    "import socket\n"
    "server = socket.create_server(('0.0.0.0', 7000))\n"
    "print('up', flush=True)\n"
    "while True:\n"
    "    conn, _ = server.accept()\n"
    "    conn.sendall(b'hello')\n"
    "    conn.close()\n"
)
CONNECT = (
    "import socket, sys\n"
    "conn = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))\n"
    "print(conn.recv(5).decode())\n"
)


@pytest.fixture
def net() -> Iterator[NetworkNamespaces]:
    with NetworkNamespaces(["donor", "consumer"], root=True) as made:
        yield made


@pytest.fixture
def listener(net: NetworkNamespaces) -> Iterator[None]:
    child = subprocess.Popen(
        net.command("donor", [sys.executable, "-c", LISTEN]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield
    finally:
        child.kill()
        child.communicate()


def _connect(net: NetworkNamespaces, timeout_s: float = 60) -> str:
    script = [sys.executable, "-c", CONNECT, net.address("donor"), str(timeout_s)]
    return run_command(net.command("consumer", script), timeout_s=120)


@pytest.mark.usefixtures("listener")
def test_hosts_reach_each_other_and_are_reached_from_the_root(net: NetworkNamespaces) -> None:
    assert _connect(net) == "hello\n"
    with socket.create_connection((net.address("donor"), 7000), timeout=60) as conn:
        assert conn.recv(5) == b"hello"


@pytest.mark.usefixtures("listener")
def test_a_pulled_cable_answers_nothing_until_it_is_back(net: NetworkNamespaces) -> None:
    net.set_link("donor", up=False)
    with pytest.raises(SystemCallError, match=r"timed out|TimeoutError|No route"):
        _connect(net, timeout_s=1)
    net.set_link("donor", up=True)
    assert _connect(net) == "hello\n"


def test_only_the_network_differs_inside(net: NetworkNamespaces) -> None:
    links = run_command(net.command("donor", ["ip", "-o", "link"]))
    assert len(links.splitlines()) == 2  # lo, eth0
    cgroups = run_command(net.command("donor", ["cat", "/proc/self/mountinfo"]))
    assert ("cgroup" in cgroups) == ("cgroup" in Path("/proc/self/mountinfo").read_text())


def _root_link(net: NetworkNamespaces) -> bool:
    """Whether the set's own interface is in this machine's network."""
    number = net.namespace("a").split("-")[1]
    return f"isw{number}" in {name for _, name in socket.if_nameindex()}


def test_nothing_is_left_also_after_an_error() -> None:
    net = NetworkNamespaces(["a", "b"], root=True)
    mine = {net.namespace("a"), net.namespace("b")}
    with pytest.raises(RuntimeError), net:  # noqa: PT012 - the block is what is tested
        assert mine <= set(netns.namespaces())
        assert _root_link(net)
        raise RuntimeError
    assert not mine & set(netns.namespaces())
    assert not _root_link(net)
    net.close()


def test_without_the_root_nothing_appears_there() -> None:
    with NetworkNamespaces(["a"]) as net:
        assert not _root_link(net)
