# SPDX-License-Identifier: Apache-2.0
"""A client of a device's NBD socket: one request at a time, each of which must succeed."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

from support.devices import nbd_bytes
from support.devices.cluster import WAIT_S, Device, run, until


def connected(path: Path, wait_s: float = WAIT_S) -> socket.socket:
    """A connection that is ready for requests; waits until the socket is served."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(wait_s)

    def connect() -> bool:
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    until(connect, f"{path} to be served")
    assert nbd_bytes.open_export(client, "") == nbd_bytes.ACK
    return client


def ask(client: socket.socket, command: int, offset: int, data: bytes | int) -> bytes:
    """Writes bytes, or reads so many and returns them."""
    length = data if isinstance(data, int) else len(data)
    client.sendall(nbd_bytes.request(command, offset, length))
    if isinstance(data, bytes):
        client.sendall(data)
    answer = nbd_bytes.receive(client, 16)
    if len(answer) < 16:
        raise ConnectionError("it has gone")
    assert struct.unpack(">IIQ", answer)[1] == 0
    return nbd_bytes.receive(client, length) if isinstance(data, int) else b""


def nbdinfo(uri: str) -> Any:
    """What it tells of an export that can be written to and does all that ours do."""
    (described,) = json.loads(run("nbdinfo", "--json", uri))["exports"]
    assert described["is_read_only"] is False
    for ability in ("can_flush", "can_trim", "can_zero", "can_multi_conn", "can_fua"):
        assert described[ability] is True, ability
    return described


def fio_verifies(uri: str, directory: Path, *options: str) -> None:
    """fio writes at random, with these options, and reads back what it has written."""
    checks = ("--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0")
    job = ("--name=verify", "--ioengine=nbd", f"--uri={uri}", f"--aux-path={directory}")
    run("fio", *job, "--rw=randwrite", *options, *checks)


def bring_to_donor(device: Device, client: socket.socket, data: bytes) -> None:
    """Writes the first page until its slab is mapped and a donor has it."""

    def on_donor() -> bool:
        assert nbd_bytes.write(client, 0, data) == 0
        return int(device.status["pages_on_donors"]) > 0

    until(on_donor, "the page on the donor")
