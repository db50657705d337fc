# SPDX-License-Identifier: Apache-2.0
"""What `infiniswap doctor` says of RDMA, on hosts that have this or that."""

from __future__ import annotations

import errno
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from support.configs import configured
from support.machine.made_host import make_files

from infiniswap.cli.doctor import rdma
from infiniswap.cli.doctor.finding import MISSING, OK, WARN, Finding
from infiniswap.engine import native_rdma
from infiniswap.engine.rdma import RdmaGid, RdmaPort
from infiniswap.errors import EngineError
from infiniswap.system import rdma as system
from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

Host = list[RdmaPort | EngineError]
GIDS = (RdmaGid(0, "fe80::1", True), RdmaGid(1, "10.0.0.1", False), RdmaGid(2, "10.0.0.1", True))


PORT = RdmaPort("mlx5_0", 1, "Ethernet", True, 4096, 65_536, 1024, GIDS)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Its ports, or the error that asking for them is."""
    has: Host = []

    def ports() -> Host:
        if isinstance(has[0], EngineError):
            raise has[0]
        return has

    def choose(name: str) -> tuple[object, str]:
        if name == "far":
            raise EngineError("no RDMA: no RDMA device has a RoCE v2 GID", code=errno.EADDRNOTAVAIL)
        return has[0], "10.0.0.1"

    monkeypatch.setattr(native_rdma, "rdma_ports", ports)
    monkeypatch.setattr(system, "devices", lambda: ())
    monkeypatch.setattr(system, "interface", lambda device, _port: f"{device}-net")
    monkeypatch.setattr(system, "locks_without_limit", lambda: False)
    monkeypatch.setattr(native_rdma, "rdma_choose", choose)
    return has


def found(name: str, **keys: object) -> list[Finding]:
    return [finding for finding in rdma.rdma(configured(**keys)) if finding.name == name]


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
def test_a_host_without_it(host: Host, code: int, transport: str, state: str, mend: str) -> None:
    host.append(EngineError("no RDMA: this is why", code=code))
    (finding,) = rdma.rdma(configured(device__transport=transport))
    assert (finding.name, finding.state) == ("rdma", state)
    assert finding.what.startswith("this is why")
    assert mend in finding.mend


def test_every_port_and_the_way_to_each_donor(host: Host) -> None:
    host += [
        PORT,
        replace(PORT, device="down0", is_active=False),
        replace(PORT, device="bare0", gids=GIDS[1:2]),
        replace(PORT, device="ib0", link="InfiniBand", gids=()),
        replace(PORT, device="ib1", link="InfiniBand", gids=(), is_active=False),
    ]
    ports = found("rdma", cluster__peers="near,far")
    assert [finding.state for finding in ports] == [OK, WARN, WARN, OK, WARN]
    assert "fe80::1, 10.0.0.1" in ports[0].what
    assert "1024 connections, 65536 regions" in ports[0].what
    assert "down0 port 1 is down" in ports[1].what
    assert ports[1].mend == "ip link set down0-net up"
    assert "no RoCE v2 address" in ports[2].what
    assert ports[2].mend == "ip address add ADDRESS dev bare0-net"
    assert "ib1 port 1 is down" in ports[4].what
    assert "subnet manager" in ports[4].mend
    near, far = found("rdma-donor", cluster__peers="near,far")
    assert near.state == OK
    assert "mlx5_0 port 1 from 10.0.0.1" in near.what
    assert far.state == WARN
    assert "far: no RDMA device has a RoCE v2 GID" in far.what
    assert far.mend


def test_a_device_that_no_program_can_use(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "devices", lambda: ("mlx5_0", "rxe0"))
    host.append(EngineError("no RDMA: device rxe0 is of no use to programs", code=errno.ENODEV))
    for transport, state in (("auto", WARN), ("rdma", MISSING), ("tcp", OK)):
        (finding,) = rdma.rdma(configured(device__transport=transport))
        assert finding.state == state
        assert ("ibverbs-providers" in finding.mend) == (state != OK)
    # Beside one that they can.
    host[:] = [PORT]
    what = "no program can use rxe0: its provider is missing"
    assert Finding("rdma", WARN, what, "apt install ibverbs-providers") in found("rdma")
    assert len(found("rdma")) == 2


@pytest.mark.parametrize(
    ("limit", "staging", "capable", "state"),
    [
        (resource.RLIM_INFINITY, "64M", False, OK),
        (8 * MIB, "64M", False, WARN),
        (8 * MIB, "64M", True, OK),
        (64 * MIB, "64M", False, WARN),
        (68 * MIB, "64M", False, OK),
        (68 * MIB, "128M", False, WARN),
    ],
)
def test_what_may_be_locked(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    staging: str,
    capable: bool,
    state: str,
) -> None:
    host.append(PORT)
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (limit, limit))
    monkeypatch.setattr(system, "locks_without_limit", lambda: capable)
    (finding,) = found("rdma-memlock", device__staging=staging, device__queues="2")
    assert finding.state == state
    assert bool(finding.mend) == (state == WARN)


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({"pool": "16M"}, [OK, OK]),
        ({"pool": "18M"}, [OK, WARN]),
        ({"pool": "auto"}, [OK, WARN]),
        # No room for a probe's page of each lease beside it.
        ({"pool": "17M", "leases_max": "256"}, [OK, OK]),
        ({"pool": "17M", "leases_max": "257"}, [OK, WARN]),
        # A daemon that offers no RDMA, that serves this host alone, that could not start.
        ({"pool": "18M", "rdma": "off"}, [OK]),
        ({"pool": "18M", "listen": "127.0.0.1:9400"}, [OK]),
        ({"pool": "auto", "headroom": "1000000G"}, [OK]),
    ],
)
def test_what_a_donor_may_lock(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    states: list[str],
) -> None:
    host.append(PORT)
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (18 * MIB, 18 * MIB))
    donor = {"listen": "10.0.0.1:9400", "slab": "1M", **changes}
    keys = {f"daemon__{key}": value for key, value in donor.items()}
    findings = found("rdma-memlock", device__staging="2M", **keys)
    assert [finding.state for finding in findings] == states
    for finding in findings[1:]:
        assert "a pool of" in finding.what
        assert ("ulimit -l unlimited" in finding.mend) == (finding.state == WARN)


def test_what_the_kernel_lists(tmp_path: Path) -> None:
    assert system.devices(sys=tmp_path) == ()
    names = {"mlx5_0/ports/2/gid_attrs/ndevs/0": "eth4", "rxe0/parent": "eth0"}
    make_files(tmp_path / "class/infiniband", {**names, "ib0/node_type": "1: CA"})
    assert system.devices(sys=tmp_path) == ("ib0", "mlx5_0", "rxe0")
    assert system.interface("mlx5_0", 2, sys=tmp_path) == "eth4"
    assert system.interface("rxe0", 1, sys=tmp_path) == "eth0"
    assert system.interface("ib0", 1, sys=tmp_path) == ""


def test_who_locks_without_limit(tmp_path: Path) -> None:
    assert not system.locks_without_limit(proc=tmp_path)
    (tmp_path / "self").mkdir()
    for mask, is_free in ((1 << 14, True), (~(1 << 14) & 0x1FFFFFFFFFF, False)):
        (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{mask:016x}\n")
        assert system.locks_without_limit(proc=tmp_path) == is_free
