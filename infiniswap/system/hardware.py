# SPDX-License-Identifier: Apache-2.0
"""What hardware this host has, without anything that tells which host it is.

No names of interfaces or devices, no addresses, GUIDs or serial numbers: a report may be published.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.system import rdma
from infiniswap.system.files import PROC, SYS, try_read_int, try_read_text

_OS_RELEASE: Final = Path("/etc/os-release")


@dataclass(frozen=True, slots=True)
class Machine:
    """This host.

    Attributes:
        model: what the firmware calls it; empty where it says nothing.
        system, kernel: the distribution's name and release, the kernel's release.
        architecture, processor: such as "x86_64", and the processor's own name.
        processors: how many.
        is_guest: whether it is a virtual machine.
    """

    model: str
    system: str
    kernel: str
    architecture: str
    processor: str
    processors: int
    is_guest: bool


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A network interface with hardware, or with a virtual machine's stand-in, behind it.

    Attributes:
        driver: the kernel's.
        pci_id: "VENDOR:DEVICE"; empty where it is on no PCI bus.
        mbit_per_s: speed of the link; None: down, or the driver does not know.
        mtu_bytes: the largest packet.
    """

    driver: str
    pci_id: str
    mbit_per_s: int | None
    mtu_bytes: int | None


@dataclass(frozen=True, slots=True)
class RdmaPortHardware:
    """A port of an RDMA device as the kernel describes it: link layer, state, rate."""

    link: str
    state: str
    rate: str


@dataclass(frozen=True, slots=True)
class RdmaCard:
    """An RDMA device.

    Attributes:
        driver: the kernel's; "rdma_rxe" for soft-RoCE.
        pci_id: as of NetworkCard.
        board, firmware: as the driver tells them; empty where it does not.
        ports: in the kernel's order.
    """

    driver: str
    pci_id: str
    board: str
    firmware: str
    ports: tuple[RdmaPortHardware, ...]


def _text(path: Path) -> str:
    try:
        return (try_read_text(path) or "").strip()
    except UnicodeError:
        return ""


def _driver(device: Path) -> str:
    link = device / "driver"
    return os.path.basename(os.path.realpath(link)) if link.exists() else ""


def _pci_id(device: Path) -> str:
    vendor, model = _text(device / "vendor"), _text(device / "device")
    return f"{vendor.removeprefix('0x')}:{model.removeprefix('0x')}" if vendor and model else ""


def machine(*, proc: Path = PROC, sys: Path = SYS, os_release: Path = _OS_RELEASE) -> Machine:
    """This host."""
    facts: dict[str, str] = {}
    for line in _text(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    system = ""
    for line in _text(os_release).splitlines():
        if line.startswith("PRETTY_NAME="):
            system = line.partition("=")[2].strip('"')
    return Machine(
        model=_text(sys / "class/dmi/id/product_name"),
        system=system,
        kernel=platform.release(),
        architecture=platform.machine(),
        processor=facts.get("model name", ""),
        processors=os.cpu_count() or 0,
        is_guest="hypervisor" in facts.get("flags", "").split(),
    )


def network_cards(*, sys: Path = SYS) -> tuple[NetworkCard, ...]:
    """Every interface but purely software ones, such as bridges."""
    found = []
    for path in sorted((sys / "class/net").glob("*")):
        if (path / "device").exists():
            card = NetworkCard(
                driver=_driver(path / "device"),
                pci_id=_pci_id(path / "device"),
                mbit_per_s=try_read_int(path / "speed"),
                mtu_bytes=try_read_int(path / "mtu"),
            )
            found.append(card)
    return tuple(found)


def rdma_card(device: str, *, sys: Path = SYS) -> RdmaCard:
    """One of the kernel's RDMA devices (infiniswap.system.rdma.devices)."""
    base = sys / "class/infiniband" / device
    is_soft = not (base / "device").exists()
    return RdmaCard(
        driver="rdma_rxe" if is_soft and (base / "parent").exists() else _driver(base / "device"),
        pci_id=_pci_id(base / "device"),
        board=_text(base / "board_id") or _text(base / "hca_type"),
        firmware=_text(base / "fw_ver"),
        ports=tuple(
            RdmaPortHardware(
                link=_text(port / "link_layer"),
                state=_text(port / "state").partition(":")[2].strip(),
                rate=_text(port / "rate"),
            )
            for port in sorted((base / "ports").glob("*"))
        ),
    )


def rdma_cards(*, sys: Path = SYS) -> tuple[RdmaCard, ...]:
    """Every RDMA device, whether programs can use it or not."""
    return tuple(rdma_card(name, sys=sys) for name in rdma.devices(sys=sys))
