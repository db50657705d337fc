# SPDX-License-Identifier: Apache-2.0
"""A process that listens to a broker for a device (`python -m` this module).

A device's process is locked in memory, must wait for nothing, and must not hold what strangers
send. So the MQTT library, its TLS and everything that a broker makes it keep are in this process.
It may be swapped out, may hit its memory limit, and may be killed: the device goes on with the
donors it knows, and starts another one.

The first line of its standard input is its order. The end of that input is the end of the device,
and ends this process. It writes a line, a `Report`, after each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from infiniswap import logs
from infiniswap.control.host_name import host_name
from infiniswap.discovery.directory import Directory
from infiniswap.discovery.listener import Listener
from infiniswap.discovery.order import NOTES_MAX, ORDER_BYTES_MAX, Order, Report
from infiniswap.errors import InfiniswapError
from infiniswap.keys import announcement_keys
from infiniswap.secret import read_secret
from infiniswap.system.process import make_ordinary
from infiniswap.units import MIB

log = logging.getLogger("infiniswap.discovery")

MEMORY_BYTES_MAX: Final = 256 * MIB
_GATHER_S: Final = 0.2
_OOM_SCORE_ADJ: Final = 500


def main() -> int:
    """Runs until standard input ends."""
    make_ordinary(_OOM_SCORE_ADJ)
    # A broker that lies about lengths makes the library hold what comes.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    # To where the device's own lines go, and as part of them.
    logs.set_up("infiniswap-device", to_journal=logs.is_journal())
    line = sys.stdin.buffer.readline(ORDER_BYTES_MAX)
    if not line:
        return 0  # the device has ended
    order = msgspec.json.decode(line, type=Order, dec_hook=lambda kind, text: kind(text))
    logs.identify(order.device)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_run(order))
    return 0


async def _run(order: Order) -> None:
    changed = asyncio.Event()
    try:
        files = [path for path in (order.secret_file, order.second_secret_file) if path is not None]
        accepted = [read_secret(Path(path), Path(order.state_dir)) for path in files]
    except InfiniswapError as error:
        _tell(Report(donors=None, problem=str(error), notes=[]))
        raise SystemExit(error.exit_code) from None
    broker = order.mqtt.broker
    directory = Directory(
        order.cluster,
        announcement_keys(accepted),
        slab_bytes=order.slab_bytes,
        loopback_ok=broker is not None and broker.is_loopback,
    )
    listener = Listener(order.mqtt, order.cluster, directory, Random(), changed.set)
    asyncio.get_running_loop().add_reader(0, _stop_at_end)
    listening = asyncio.create_task(listener.run(), name="listener")
    while not listening.done():
        await changed.wait()
        changed.clear()
        others = [address for address in directory.addresses() if not is_own(address.host)]
        _tell(
            Report(
                donors=[str(address) for address in others] if listener.is_settled else None,
                problem=listener.problem,
                notes=[*directory.conflicts(), *directory.clocks()][:NOTES_MAX],
            )
        )
        await asyncio.sleep(_GATHER_S)  # many changes at once are one report
    await listening


def is_own(host: str) -> bool:
    """Whether this is an address of this host: its daemon would lend memory that the device's host
    is short of itself. Loopback addresses are for trials on one machine, and count as others'."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == host_name()
    if address.is_loopback:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def _tell(report: Report) -> None:
    """Blocks while the device does not read."""
    data = msgspec.json.encode(report) + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _stop_at_end() -> None:
    if not os.read(0, 4096):
        os._exit(0)  # a thread of the library may be waiting for the broker


if __name__ == "__main__":
    sys.exit(main())
