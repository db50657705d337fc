# SPDX-License-Identifier: Apache-2.0
"""Names and addresses of hosts in namespaces, and clean-up when `ip` fails half-way."""

from __future__ import annotations

from pathlib import Path

import pytest

from infiniswap.errors import NotFoundError, SystemCallError, UsageError
from infiniswap.system import netns
from infiniswap.system.netns import NetworkNamespaces


def test_addresses_and_commands() -> None:
    net = NetworkNamespaces(["a", "donor-b"], network="10.9.8.0/24")
    assert net.hosts == ("a", "donor-b")
    assert (net.address("a"), net.address("donor-b")) == ("10.9.8.2", "10.9.8.3")
    assert net.root_address == "10.9.8.1"
    namespace = net.namespace("a")
    assert namespace.startswith(netns.PREFIX)
    assert namespace.endswith("-a")
    assert net.command("a", ["true", "x"])[-2:] == ["true", "x"]
    assert f"--net=/run/netns/{namespace}" in net.command("a", ["true"])


def test_two_sets_of_hosts_have_different_names() -> None:
    assert NetworkNamespaces(["a"]).namespace("a") != NetworkNamespaces(["a"]).namespace("a")


def test_an_unknown_host() -> None:
    net = NetworkNamespaces(["a"])
    for ask in (net.namespace, net.address, lambda name: net.command(name, ["true"])):
        with pytest.raises(NotFoundError, match="'c'"):
            ask("c")


@pytest.mark.parametrize("hosts", [["a", "a"], ["A"], ["a b"], [""], ["x" * 21], ["-a"]])
def test_wrong_host_names(hosts: list[str]) -> None:
    with pytest.raises(UsageError):
        NetworkNamespaces(hosts)


@pytest.mark.parametrize("network", ["8.8.8.0/24", "fd00::/64", "10.0.0.0/30"])
def test_networks_that_are_public_or_too_small(network: str) -> None:
    with pytest.raises(UsageError):
        NetworkNamespaces(["a", "b"], network=network)


def test_what_was_made_is_removed_when_making_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever call of `ip` fails, every namespace that was added is deleted again."""
    calls_left = 0

    def ip(*args: str) -> str:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == -1:
            raise SystemCallError("refused")
        if args[:2] == ("netns", "add"):
            (tmp_path / args[2]).touch()
        if args[:2] == ("netns", "del"):
            (tmp_path / args[2]).unlink()
        return ""

    monkeypatch.setattr(netns, "_ip", ip)
    monkeypatch.setattr(netns, "NAMES_DIRECTORY", tmp_path)
    for calls_before in range(40):
        calls_left = calls_before
        try:
            with NetworkNamespaces(["a", "b"], root=True):
                assert len(list(tmp_path.iterdir())) == 3
        except SystemCallError:
            left = list(tmp_path.iterdir())
            assert len(left) <= 1  # only a failed `del` itself may leave one
            for path in left:
                path.unlink()
        else:
            return  # there were no more calls to fail
    pytest.fail("never came through")
