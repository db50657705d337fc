# SPDX-License-Identifier: Apache-2.0
"""Addresses as administrators write them, with real daemons."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster
from support.donors.donor_world import IDENTITY, client_config
from support.machine.mount_space import changed_mounts
from support.machine.ran import ran

from infiniswap.control.client import QuietHandler, connect
from infiniswap.units import HostPort

pytestmark = pytest.mark.requires_native

DEBIAN = "127.0.0.1 localhost\n127.0.1.1 node1\n"
"""/etc/hosts as Debian writes it, of a host called node1."""


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The beginning of a command line on a host with that file."""
    hosts = tmp_path / "hosts"
    hosts.write_text(DEBIAN)
    with changed_mounts('mount --bind "$1" /etc/hosts', hosts) as prefix:
        yield prefix


@pytest.mark.requires_ipv6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_port_of_a_wildcard_is_open_to_ipv4(
    cluster: Cluster, secret_file: Path, host: str
) -> None:
    daemon = cluster.donor("--secret-file", str(secret_file), host="[::]")

    async def ask() -> str:
        config = client_config(connect_s=WAIT_S, request_s=WAIT_S)
        address = HostPort(host, daemon.control)
        async with await connect(address, IDENTITY, config, QuietHandler()) as session:
            await session.check_data_port()
            await session.lease(1)
            return str(session.data_address)

    assert asyncio.run(ask()) == str(HostPort(host, daemon.data))
    assert (
        f"control [::]:{daemon.control} (IPv6 and IPv4), pages [::]:{daemon.data} (" in daemon.log
    )
    row = json.loads(
        cluster.ok(
            "status",
            "--json",
            "--donors",
            str(HostPort(host, daemon.control)),
            "--secret-file",
            str(secret_file),
        )
    )["donors"][0]
    assert row["state"] == "serving"
    assert f"({host}:" in daemon.log.replace("[::1]", "::1"), "and not as ::ffff:127.0.0.1"


@pytest.mark.requires_root
def test_a_name_that_is_127_0_1_1_is_refused(
    cluster: Cluster, secret_file: Path, tmp_path: Path, debian: tuple[str, ...]
) -> None:
    config = tmp_path / "infiniswap.toml"
    config.write_text(
        f'[daemon]\nlisten = "node1:{free_port()}"\nslab = "4M"\nstate_dir = "{tmp_path}/state"\n'
        f'run_dir = "{tmp_path}/run"\n[device]\nslab = "4M"\n'
        f'[cluster]\nsecret_file = "{secret_file}"\n'
    )
    for command, code in (
        (("daemon",), 3),
        (("config", "check"), 3),
        (("invite",), 3),
        (("doctor",), None),
    ):
        argv = (*debian, *cluster.program, *command, "--config", str(config))
        done = ran(*argv, env=cluster.env, wait_s=WAIT_S)
        said = " ".join((done.stdout + done.stderr).split())
        assert code is None or done.returncode == code, said
        assert "the name node1 stands for 127.0.1.1, which no other host can reach" in said
        assert "Give an address of this host in place of the name" in said


@pytest.mark.requires_root
def test_an_invitation_names_no_loopback_address(
    cluster: Cluster, secret_file: Path, debian: tuple[str, ...]
) -> None:
    argv = (*debian, *cluster.program, "invite", "--listen", "node1", "--secret-file", secret_file)
    done = ran(*map(str, argv), env=cluster.env, wait_s=WAIT_S)
    assert done.returncode == 2
    assert "--listen node1:9403: on this host the name node1 stands for 127.0.1.1" in done.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.requires_root
def test_a_donor_named_like_this_host_is_refused_with_the_cause(
    cluster: Cluster, secret_file: Path, debian: tuple[str, ...]
) -> None:
    argv = (*debian, *cluster.program, "status", "--donors", f"node1:{free_port()}")
    done = ran(*map(str, (*argv, "--secret-file", secret_file)), env=cluster.env, wait_s=WAIT_S)
    said = " ".join((done.stdout + done.stderr).split())
    assert "on this host the name node1 stands for a loopback address" in said
    assert "Name the donor by its address in figures, or correct /etc/hosts" in said
