# SPDX-License-Identifier: Apache-2.0
"""A test of a donor's data port: pages go there and come back, and no slab is taken for them.

It finds what a connection alone does not: a firewall that closes only this port, and a network that
drops the large packets that pages travel in while everything smaller passes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from infiniswap.control.host_name import host_name
from infiniswap.errors import InfiniswapError, NoDonorError, ProtocolMismatchError
from infiniswap.units import PAGE_BYTES, HostPort

if TYPE_CHECKING:
    from infiniswap.control.client import ClientConfig

_ROUND_TRIPS: Final = 32
_AT_ONCE: Final = 32
"""Pages under way in a batch; two batches are, so that the link never waits for this end."""
_HEADERS_BYTES: Final = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Of a ping: what its size (-s) leaves out of a packet."""
_MTU_OPTIONS: Final = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (41, 24)}
"""IP_MTU and IPV6_MTU of Linux, which Python has no names for."""

# The NBD protocol, as csrc/wire/nbd.h has it.
_GREETING: Final = b"NBDMAGICIHAVEOPT"
_FLAGS: Final = 3
_GO: Final = 7
_ACK: Final = 1
_ERROR: Final = 1 << 31
_OPTION_REPLY: Final = struct.Struct(">QIII")
_REQUEST: Final = struct.Struct(">IHHQQI")
_REQUEST_MAGIC: Final = 0x25609513
_REPLY: Final = struct.Struct(">IIQ")
_REPLY_MAGIC: Final = 0x67446698
_READ, _WRITE = 0, 1


@dataclass(frozen=True, slots=True)
class DataPortTest:
    """What a test has measured.

    Attributes:
        round_trip_s: median time for a page to come, in seconds.
        mtu_bytes: largest packet on the way to the donor, as this host knows it; 0: unknown.
        in_bytes_per_s, out_bytes_per_s: bandwidth from and to the donor; None: not measured.
    """

    round_trip_s: float
    mtu_bytes: int
    in_bytes_per_s: float | None = None
    out_bytes_per_s: float | None = None


async def check_data_port(
    address: HostPort, client: ClientConfig, speed_s: float = 0.0
) -> DataPortTest | None:
    """Tests the data port of a donor. A donor of an earlier release, which has no test page, is
    only connected to (None).

    Args:
        address: of its control port.
        client: keys or certificate; each wait is bounded by its `connect_s`.
        speed_s: how long bandwidth is measured in each direction, in seconds; 0: it is not.

    Raises:
        NoDonorError: it cannot be reached, or pages do not pass.
        InfiniswapError: it refuses.
    """
    from infiniswap.control.client import Identity, QuietHandler, connect

    identity = Identity(_device_id(), "doctor", host_name())
    async with await connect(address, identity, client, QuietHandler()) as session:
        await session.check_data_port()
        if not session.welcome.test_page:
            return None
        lease = (await session.lease(0, 1)).lease
        try:
            (ticket,) = await session.tickets(lease, 0, 1)
            # The host that has answered, and in sentences as the user knows it.
            shown = HostPort(address.host, session.data_address.port)
            port = _Connection(session.data_address, shown, client.connect_s)
            return await asyncio.to_thread(port.test, ticket, speed_s)
        finally:
            if session.ended is None:
                await session.release(lease)


def accepts(address: HostPort, wait_s: float) -> bool:
    """Whether a TCP connection to the address is made within `wait_s` seconds. Blocking."""
    try:
        socket.create_connection((address.host, address.port), timeout=wait_s).close()
    except (OSError, UnicodeError):
        return False
    return True


def _device_id() -> str:
    import uuid

    return str(uuid.uuid4())


class _Connection:
    """One connection to the data port. Blocking; each wait is bounded.

    Args:
        address: of the data port.
        shown: the same in sentences.
        wait_s: for each answer.
    """

    def __init__(self, address: HostPort, shown: HostPort, wait_s: float) -> None:
        self._address = address
        self._shown = shown
        self._wait_s = wait_s

    def test(self, ticket: str, speed_s: float) -> DataPortTest:
        """Moves pages.

        Raises:
            NoDonorError, ProtocolMismatchError: see check_data_port.
        """
        where = f"donor {self._shown}"
        address = (self._address.host, self._address.port)
        try:
            with socket.create_connection(address, timeout=self._wait_s) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                mtu_bytes = _mtu_bytes(sock)
                _open_export(sock, ticket)
                self._first_page(sock, mtu_bytes)
                round_trip_s = _round_trip_s(sock)
                if not speed_s:
                    return DataPortTest(round_trip_s, mtu_bytes)
                rates = (_bytes_per_s(sock, command, speed_s) for command in (_READ, _WRITE))
                return DataPortTest(round_trip_s, mtu_bytes, *rates)
        except InfiniswapError as error:
            error.where = error.where or where
            raise
        except TimeoutError:
            raise NoDonorError(
                f"the data port does not answer within {self._wait_s:g} s",
                where=where,
                mend=f"Let TCP port {self._shown.port} in at the firewalls of that host and "
                "between the two.",
            ) from None
        except OSError as error:
            raise NoDonorError(
                f"the connection for pages was lost: {error.strerror or error}",
                where=where,
                mend="See the log of its daemon.",
            ) from error

    def _first_page(self, sock: socket.socket, mtu_bytes: int) -> None:
        """After the handshake, whose packets are small."""
        page = os.urandom(PAGE_BYTES)
        way = "to"
        try:
            sock.sendall(_request(_WRITE) + page)
            _take_replies(sock, 1, b"")
            way = "from"
            sock.sendall(_request(_READ))
            came = bytearray(PAGE_BYTES)
            _take_replies(sock, 1, came)
        except TimeoutError:
            mtu = f" (the MTU here is {mtu_bytes})" if mtu_bytes else ""
            ping = max(0, mtu_bytes - _HEADERS_BYTES.get(sock.family, 28))
            raise NoDonorError(
                f"no page of 4 KiB gets {way} that host within {self._wait_s:g} s, and smaller "
                f"messages do: something in between drops large packets{mtu}",
                where=f"donor {self._shown}",
                mend="Give both hosts, and every switch and tunnel in between, one MTU: `ip link "
                f"set INTERFACE mtu 1500`. `ping -M do -s {ping} {self._shown.host}` shows "
                "whether packets of this size pass.",
            ) from None
        if came != page:
            raise ProtocolMismatchError(
                "a page came back with other bytes",
                mend="Test the memory of that host and the network to it.",
            )


def _mtu_bytes(sock: socket.socket) -> int:
    option = _MTU_OPTIONS.get(sock.family)
    try:
        return 0 if option is None else sock.getsockopt(*option)
    except OSError:
        return 0


def _take(sock: socket.socket, into: bytearray | memoryview) -> None:
    view = memoryview(into)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionResetError("the donor closed it")
        view = view[count:]


def _taken(sock: socket.socket, count: int) -> bytes:
    into = bytearray(count)
    _take(sock, into)
    return bytes(into)


def _open_export(sock: socket.socket, ticket: str) -> None:
    """The fixed newstyle handshake."""
    if _taken(sock, 18)[:16] != _GREETING:
        raise ProtocolMismatchError(
            "the service at the data port is no donor's", mend="See what listens there: ss -ltnp."
        )
    name = ticket.encode("ascii")
    said = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    sock.sendall(struct.pack(">I", _FLAGS) + _GREETING[8:] + struct.pack(">II", _GO, len(said)))
    sock.sendall(said)
    while True:
        _magic, _option, kind, count = _OPTION_REPLY.unpack(_taken(sock, _OPTION_REPLY.size))
        if count > PAGE_BYTES or kind & _ERROR:
            raise NoDonorError(
                "the data port does not accept the ticket that the control port gave",
                mend="Something between the hosts may forward the two ports to different daemons.",
            )
        _taken(sock, count)
        if kind == _ACK:
            return


def _request(command: int) -> bytes:
    return _REQUEST.pack(_REQUEST_MAGIC, 0, command, 0, 0, PAGE_BYTES)


def _take_replies(sock: socket.socket, count: int, page: bytearray | bytes) -> None:
    """Simple replies, each followed by a page if `page` has room for one."""
    for _ in range(count):
        magic, error, _cookie = _REPLY.unpack(_taken(sock, _REPLY.size))
        if magic != _REPLY_MAGIC or error:
            raise ProtocolMismatchError(
                f"the data port answers a request with error {error}",
                mend="See the log of its daemon.",
            )
        if isinstance(page, bytearray):
            _take(sock, page)


def _round_trip_s(sock: socket.socket) -> float:
    page, request, times = bytearray(PAGE_BYTES), _request(_READ), []
    for _ in range(_ROUND_TRIPS):
        begun_s = time.perf_counter()
        sock.sendall(request)
        _take_replies(sock, 1, page)
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def _bytes_per_s(sock: socket.socket, command: int, for_s: float) -> float:
    """Pages in one direction, with always one or two batches under way."""
    page = bytes(PAGE_BYTES) if command == _WRITE else b""
    batch = (_request(command) + page) * _AT_ONCE
    answer = bytearray((_REPLY.size + (PAGE_BYTES if command == _READ else 0)) * _AT_ONCE)
    begun_s = time.perf_counter()
    sock.sendall(batch)
    done = 0
    while time.perf_counter() - begun_s < for_s:
        sock.sendall(batch)
        _take(sock, answer)
        done += 1
    _take(sock, answer)
    return (done + 1) * _AT_ONCE * PAGE_BYTES / (time.perf_counter() - begun_s)
