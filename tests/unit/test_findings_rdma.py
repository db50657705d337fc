# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap doctor` says of RDMA, on hosts that have this or that."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from infiniswap.cli import findings_rdma
from infiniswap.cli.findings import MISSING, OK, WARN, Finding
from infiniswap.config import Config, load
from infiniswap.engine import native_rdma
from infiniswap.engine.protocol import RdmaGid, RdmaPort
from infiniswap.errors import EngineError
from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

GIDS = (RdmaGid(0, "fe80::1", True), RdmaGid(1, "10.0.0.1", False), RdmaGid(2, "10.0.0.1", True))


def port(**changes: object) -> RdmaPort:
    fields = {
        "device": "mlx5_0",
        "port": 1,
        "link": "Ethernet",
        "is_active": True,
        "mtu_bytes": 4096,
        "regions_max": 65_536,
        "connections_max": 1024,
        "gids": GIDS,
    }
    return RdmaPort(**{**fields, **changes})  # type: ignore[arg-type]


def config(**keys: str) -> Config:
    return load(
        Path("/dev/null"), {key.replace("__", "."): value for key, value in keys.items()}, {}
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[RdmaPort | EngineError]:
    """Its ports, or the error that asking for them is."""
    has: list[RdmaPort | EngineError] = []

    def ports() -> list[RdmaPort]:
        if isinstance(has[0], EngineError):
            raise has[0]
        return [item for item in has if isinstance(item, RdmaPort)]

    def choose(name: str) -> tuple[RdmaPort, str]:
        if name == "far":
            raise EngineError("no RDMA: no RDMA device has a RoCE v2 GID", code=errno.EADDRNOTAVAIL)
        return ports()[0], "10.0.0.1"

    monkeypatch.setattr(native_rdma, "rdma_ports", ports)
    monkeypatch.setattr(native_rdma, "rdma_choose", choose)
    return has


def found(of: Config) -> list[Finding]:
    return list(findings_rdma.rdma(of))


@pytest.mark.parametrize(
    ("code", "transport", "state", "mend"),
    [
        (errno.ENODEV, "auto", OK, ""),
        (errno.ENODEV, "rdma", MISSING, "rdma_rxe"),
        (errno.ENOSYS, "auto", WARN, "modprobe ib_uverbs"),
        (errno.ENOSYS, "tcp", OK, ""),
        (errno.ENOENT, "auto", WARN, "ibverbs-providers"),
        (errno.EOPNOTSUPP, "rdma", MISSING, "libibverbs-dev"),
    ],
)
def test_a_host_without_it(
    host: list[RdmaPort | EngineError], code: int, transport: str, state: str, mend: str
) -> None:
    host.append(EngineError("no RDMA: this is why", code=code))
    (finding,) = found(config(device__transport=transport))
    assert (finding.name, finding.state) == ("rdma", state)
    assert finding.what.startswith("this is why")
    assert mend in finding.mend


def test_every_port_and_the_way_to_each_donor(host: list[RdmaPort | EngineError]) -> None:
    host += [
        port(),
        port(device="down0", is_active=False),
        port(device="bare0", gids=GIDS[1:2]),
        port(device="ib0", link="InfiniBand", gids=()),
    ]
    findings = found(config(cluster__peers="near,far"))
    ports = [finding for finding in findings if finding.name == "rdma"]
    assert [finding.state for finding in ports] == [OK, WARN, WARN, OK]
    assert "fe80::1, 10.0.0.1" in ports[0].what
    assert "1024 connections, 65536 regions" in ports[0].what
    assert "down0 port 1 is down" in ports[1].what
    assert "no RoCE v2 address" in ports[2].what
    near, far = (finding for finding in findings if finding.name == "rdma-donor")
    assert near.state == OK
    assert "mlx5_0 port 1 from 10.0.0.1" in near.what
    assert far.state == WARN
    assert "far: no RDMA device has a RoCE v2 GID" in far.what
    assert far.mend


@pytest.mark.parametrize(
    ("limit", "state"), [(resource.RLIM_INFINITY, OK), (MIB, WARN), (1024 * MIB, OK)]
)
def test_what_may_be_locked(
    host: list[RdmaPort | EngineError],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    state: str,
) -> None:
    host.append(port())
    monkeypatch.setattr(findings_rdma.resource, "getrlimit", lambda _what: (limit, limit))
    (finding,) = (one for one in found(config()) if one.name == "rdma-memlock")
    assert finding.state == state
    assert bool(finding.mend) == (state == WARN)
