# SPDX-License-Identifier: Apache-2.0
"""`infiniswap doctor --report`: this host for somebody else's eyes (docs/hardware.md).

It has no names of hosts, users or files, no addresses and no keys. Findings that are made of such
words tell their state only; from all other text they are taken out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from infiniswap import __version__
from infiniswap.cli.doctor.finding import Finding
from infiniswap.config import Config
from infiniswap.control.host_name import host_name
from infiniswap.device.api import DeviceStatus, DonorRow
from infiniswap.device.control import client
from infiniswap.device.spec.rundir import DevicePaths, running_names
from infiniswap.errors import EngineError, InfiniswapError
from infiniswap.system import hardware
from infiniswap.system.memory import machine_memory
from infiniswap.units import PAGE_BYTES

FORMAT: Final = 1
"""Raised when a field changes its meaning."""

_TOLD: Final = frozenset(
    {
        *("host", "root", "library", "front-ends", "ublk", "nbd", "fuse", "loop"),
        *("memory-cgroup", "swap-accounting", "cap-sys-resource", "memory-lock", "open-files"),
        *("idle", "idle-donor", "overcommit", "swappiness", "page-cluster", "zswap"),
        *("rdma", "rdma-memlock", "rdma-donor"),
    }
)
"""Findings about the host alone. The others speak of files, devices, users and other hosts."""

_ADDRESS: Final = re.compile(
    r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|(?:[0-9a-f]{0,4}:){2,}[0-9a-f.]*)(?:%\w+)?",
    re.IGNORECASE,
)
_PATH: Final = re.compile(r"(?<![\w/])/(?!dev/|proc/|sys/)[\w.@+-]+(?:/[\w.@+-]*)+")
"""Of files; those of the kernel are the same everywhere."""


def report(config: Config, findings: Sequence[Finding]) -> dict[str, Any]:
    """The whole report, for JSON.

    Args:
        config: of this host; its donors' names are taken out.
        findings: of `doctor`.
    """
    statuses = list(_statuses(config))
    clean = cleaner(_names(config, statuses))
    machine = asdict(hardware.machine())
    machine |= {key: clean(machine[key]) for key in ("model", "system", "kernel")}
    return {
        "format": FORMAT,
        "infiniswap": __version__,
        "machine": machine | {"memory_bytes": machine_memory().total_bytes},
        "network": [asdict(card) for card in hardware.network_cards()],
        "rdma": [asdict(card) for card in hardware.rdma_cards()],
        "verbs": _verbs(clean),
        "findings": [_finding(found, clean) for found in findings],
        "devices": [device(status, clean) for status in statuses],
    }


def cleaner(names: Iterable[str]) -> Callable[[str], str]:
    """A function that takes addresses, paths and these names out of a text."""
    known = sorted({name for name in names if name}, key=len, reverse=True)
    # A host may be called vm, and `vm.swappiness` is none of its names.
    words = "|".join(rf"(?<!\w){re.escape(name)}(?!\w|\.\w)" for name in known)

    def clean(text: str) -> str:
        text = _PATH.sub("FILE", _ADDRESS.sub("ADDRESS", text))
        return re.sub(words, "NAME", text, flags=re.IGNORECASE) if words else text

    return clean


def _names(config: Config, statuses: Sequence[DeviceStatus]) -> Iterable[str]:
    host = host_name()
    yield from (host, host.partition(".")[0])
    for peer in config.peers():
        yield from (peer.host, peer.host.partition(".")[0])
    for status in statuses:
        for donor in status.donors:
            yield from (donor.name, donor.address, donor.address.rpartition(":")[0])


def _statuses(config: Config) -> Iterable[DeviceStatus]:
    run_dir = config.device.run_dir
    for name in running_names(run_dir):
        try:
            yield client.status(DevicePaths(name, run_dir / name, config.device.backup_dir))
        except InfiniswapError:
            continue  # the finding `devices` is not good then


def _verbs(clean: Callable[[str], str]) -> list[dict[str, Any]] | str:
    """Ports that programs can use, or why there is none."""
    from infiniswap.engine.native_rdma import rdma_ports

    try:
        ports = rdma_ports()
    except EngineError as error:
        return clean(error.what)
    return [
        {
            "link": port.link,
            "is_active": port.is_active,
            "mtu_bytes": port.mtu_bytes,
            "regions_max": port.regions_max,
            "connections_max": port.connections_max,
            "roce_v2_addresses": sum(gid.is_roce_v2 for gid in port.gids),
        }
        for port in ports
    ]


def _finding(found: Finding, clean: Callable[[str], str]) -> dict[str, str]:
    told = {"name": found.name, "state": found.state}
    return told | {"what": clean(found.what)} if found.name in _TOLD else told


def device(status: DeviceStatus, clean: Callable[[str], str]) -> dict[str, Any]:
    """A running device: how it is attached, and what it has done so far."""
    return {
        "frontend": status.frontend,
        "up_s": round(status.uptime_s),
        "size_bytes": status.size_bytes,
        "slab_bytes": status.slab_bytes,
        "has_backup": status.backup is not None,
        "is_sealed": status.sealed,
        "page_in_us_p50": round(status.page_in_us_p50, 1),
        "page_in_us_p99": round(status.page_in_us_p99, 1),
        "in_bytes": {
            "donors": status.stats["pages_in_remote"] * PAGE_BYTES,
            "staging": status.stats["pages_in_staging"] * PAGE_BYTES,
            "backup": status.stats["pages_in_backup"] * PAGE_BYTES,
        },
        "out_bytes": status.stats["pages_out"] * PAGE_BYTES,
        "donors": [_donor(row, clean) for row in status.donors],
        "degraded": [clean(text) for text in status.degraded],
        "alarms": len(status.alarms),
    }


def _donor(row: DonorRow, clean: Callable[[str], str]) -> dict[str, Any]:
    return {
        "state": row.state,
        "slabs": row.slabs,
        "transport": row.transport,
        "transport_reason": clean(row.transport_reason),
        "rdma_fallbacks": row.rdma_fallbacks,
        "rdma_probes": row.rdma_probes,
        "read_bytes": row.read_pages * PAGE_BYTES,
        "written_bytes": row.write_pages * PAGE_BYTES,
        "rdma_read_bytes": row.rdma_read_pages * PAGE_BYTES,
        "rdma_written_bytes": row.rdma_write_pages * PAGE_BYTES,
        "read_us_expected": round(row.expected_us, 1),
        "read_us_tail": round(row.read_tail_us, 1),
        "errors": row.errors,
        "connections_lost": row.connections_lost,
    }
