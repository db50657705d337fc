# SPDX-License-Identifier: Apache-2.0
"""Both ends of an invitation on loopback, and what strangers, liars and lost packets do to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from support.devices.cluster import WAIT_S
from support.donors.hostile_donor import hostile_tls

from infiniswap.control.tls import ServerTls, client_context
from infiniswap.errors import (
    DeadlineError,
    DonorRefusedError,
    InfiniswapError,
    NoDonorError,
    ProtocolMismatchError,
    SessionLostError,
    WrongCertificateError,
)
from infiniswap.invitation import guest, port
from infiniswap.invitation import messages as m
from infiniswap.invitation.frames import new_tls, receive, send
from infiniswap.invitation.once import LIFETIME_S, Invitation
from infiniswap.invitation.token import Token
from infiniswap.units import HostPort

HOST = "127.0.0.1"
PASSWORD = bytes(range(16))
SECRET = "5ec2e7" * 10 + "abcd"
OFFER = m.Offer("h1", "default", "secret", 1 << 30, ["10.0.0.2:9400"], secret=SECRET)
REQUEST = m.InvitationRequest(m.VERSION, PASSWORD, "h2")
QUICK = port.InvitationLimits(request_s=2.0, confirm_s=1.0)
"""For those who are silent."""


@dataclass
class World:
    """An inviting port.

    Attributes:
        token: that it has given out.
        now_s: the time, for the invitation.
        taken_up: daemons that it was told of.
        asked: requests for which it made an offer.
    """

    tls: ServerTls
    now_s: float = 0.0
    token: Token = field(init=False)
    invitation: Invitation = field(init=False)
    served: asyncio.Task[port.Guest] = field(init=False)
    taken_up: list[str] = field(default_factory=list)
    asked: list[m.InvitationRequest] = field(default_factory=list)
    refuses: InfiniswapError | None = None
    was_asked: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def offer(self, request: m.InvitationRequest, reached: str) -> m.Offer:
        assert reached == HOST
        self.asked.append(request)
        self.was_asked.set()
        assert self.may_answer.wait(WAIT_S)
        if self.refuses is not None:
            raise self.refuses
        return OFFER

    def take_up(self, lends: str) -> str:
        self.taken_up.append(lends)
        return f"added {lends}"


@contextlib.asynccontextmanager
async def world(limits: port.InvitationLimits | None = None) -> AsyncIterator[World]:
    w = World(new_tls())
    w.may_answer.set()
    w.invitation = Invitation(PASSWORD, w.now_s)
    serving = port.InvitingPort(w.invitation, w.tls, w.offer, w.take_up, limits, lambda: w.now_s)
    (listener,) = port.listen(HostPort(HOST, 0))
    w.token = Token((HostPort(HOST, listener.getsockname()[1]),), w.tls.digest, PASSWORD)
    w.served = asyncio.create_task(serving.serve([listener]))
    try:
        async with asyncio.timeout(WAIT_S):
            yield w
    finally:
        w.may_answer.set()
        w.served.cancel()
        await asyncio.wait({w.served})
        assert not serving._tasks
        assert listener.fileno() == -1


async def ask(token: Token, request: m.InvitationRequest = REQUEST) -> m.Offer:
    async with guest.connected(token) as connection:
        return await guest.present(connection, request)


async def join(token: Token, lends: str = "") -> tuple[m.Offer, str | None]:
    async with guest.connected(token) as connection:
        offer = await guest.present(connection, REQUEST)
        return offer, await guest.confirm(connection, lends)


async def test_a_host_joins_and_both_ends_know_it() -> None:
    async with world() as w:
        assert await join(w.token, "10.0.0.3:9400") == (OFFER, "added 10.0.0.3:9400")
        found = await w.served
        assert (found.name, found.address, found.problem) == ("h2", HOST, "")
        assert found.note == "added 10.0.0.3:9400"


async def test_the_second_gets_nothing_and_is_told() -> None:
    async with world() as w, guest.connected(w.token) as first:
        await guest.present(first, REQUEST)
        with pytest.raises(DonorRefusedError, match="used before, and it is good once"):
            await ask(w.token)
        await guest.confirm(first, "")
        await w.served
        with pytest.raises(NoDonorError, match=r"does not answer.*good once and for ten minutes"):
            await ask(w.token)


async def test_of_two_at_a_time_one_gets_it() -> None:
    async with world() as w:
        async with guest.connected(w.token) as one, guest.connected(w.token) as other:
            done = await asyncio.gather(
                *(guest.present(each, REQUEST) for each in (one, other)), return_exceptions=True
            )
        assert [type(each) for each in done if each != OFFER] == [DonorRefusedError]


async def test_who_comes_late_is_told_so() -> None:
    async with world() as w:
        async with guest.connected(w.token) as connection:
            w.now_s += LIFETIME_S
            with pytest.raises(DonorRefusedError, match=r"more than ten minutes old.* again"):
                await guest.present(connection, REQUEST)
        with pytest.raises(DeadlineError, match="nobody has used it"):
            await w.served


async def test_a_preview_gives_no_password_away_and_leaves_it_open() -> None:
    async with world() as w:
        assert (
            await ask(w.token, m.InvitationRequest(m.VERSION, PASSWORD, "h2", preview=True))
            == OFFER
        )
        assert w.asked[0].preview  # whoever makes the offer leaves secrets out
        assert await join(w.token) == (OFFER, "")


async def test_wrong_passwords_keep_nobody_out_at_their_address() -> None:
    """Attacker and guest have one address, as behind a NAT."""
    async with world() as w:
        wrong = dataclasses.replace(w.token, password=b"x" * 16)
        for _ in range(70):
            with pytest.raises(DonorRefusedError, match="of another invitation"):
                await ask(wrong, m.InvitationRequest(m.VERSION, b"x" * 16, "h2"))
        assert not w.asked
        assert (await join(w.token))[0] == OFFER


async def test_who_invites_is_told_of_wrong_passwords() -> None:
    async with world() as w:
        for number in range(64):
            w.invitation.present(b"", f"10.0.0.{number}", 0.0, preview=False)
        w.now_s += LIFETIME_S
        with pytest.raises(DeadlineError, match="nobody has used it; 64 wrong passwords came"):
            await w.served


async def test_a_host_that_cannot_be_let_in_is_told_why_and_the_invitation_stays() -> None:
    async with world() as w:
        w.refuses = DonorRefusedError("the request for a certificate is none")
        with pytest.raises(DonorRefusedError, match="the request for a certificate is none"):
            await ask(w.token)
        w.refuses = None
        assert (await join(w.token))[0] == OFFER


async def test_another_release_is_told() -> None:
    async with world() as w:
        with pytest.raises(DonorRefusedError, match="different releases"):
            await ask(w.token, m.InvitationRequest(m.VERSION + 1, PASSWORD, "h2"))


# ------------------------------------------------------------------ somebody in between


class Relay:
    """Forwards what it gets, and keeps it.

    Attributes:
        heard: every byte that it could read, of both ends.
        token: as the guest has it, but leading here.
    """

    def __init__(self, there: Token, tls: ServerTls | None) -> None:
        self.heard = bytearray()
        self.token = there
        self._there = there.addresses[0]
        self._tls = tls
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Ends every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = None if self._tls is None else client_context()
        other = await asyncio.open_connection(self._there.host, self._there.port, ssl=context)
        self._writers += [writer, other[1]]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forward(reader, other[1]), name="there")
            tasks.create_task(self._forward(other[0], writer), name="back")

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while data := await reader.read(65536):
                self.heard += data
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def relayed(token: Token, tls: ServerTls | None) -> AsyncIterator[Relay]:
    relay = Relay(token, tls)
    context = None if tls is None else tls.context
    server = await asyncio.start_server(relay.serve, HOST, 0, ssl=context)
    number = server.sockets[0].getsockname()[1]
    relay.token = dataclasses.replace(token, addresses=(HostPort(HOST, number),))
    try:
        yield relay
    finally:
        server.close()
        relay.cut()
        await asyncio.sleep(0)


async def test_a_relay_with_a_certificate_of_its_own_gets_nothing() -> None:
    async with world() as w, relayed(w.token, hostile_tls()) as relay:
        with pytest.raises(WrongCertificateError, match="so nothing was sent"):
            await ask(relay.token)
        assert not relay.heard
        assert not w.asked
        # The way that leads to the right host is still open.
        both = dataclasses.replace(
            w.token,
            addresses=(*relay.token.addresses, *w.token.addresses),
        )
        assert (await join(both))[0] == OFFER


async def test_a_relay_that_passes_bytes_on_learns_nothing() -> None:
    async with world() as w, relayed(w.token, None) as relay:
        assert (await join(relay.token))[0] == OFFER
        assert len(relay.heard) > 1000
        for private in (SECRET.encode(), bytes.fromhex(SECRET), PASSWORD, b"10.0.0.2", b'h2"'):
            assert private not in relay.heard


async def test_a_relay_that_loses_the_answer_uses_the_token_up_and_both_are_told() -> None:
    async with world() as w, relayed(w.token, None) as relay:
        async with guest.connected(relay.token) as connection:
            w.may_answer.clear()
            there = asyncio.create_task(guest.present(connection, REQUEST))
            await asyncio.to_thread(w.was_asked.wait)
            relay.cut()
            w.may_answer.set()
            with pytest.raises(SessionLostError, match=r"may be used up.* invite` again"):
                await there
        found = await w.served
        assert found.address == HOST
        assert found.problem


# ---------------------------------------------------------------- strangers at the port


def raw(token: Token) -> socket.socket:
    return socket.create_connection((token.addresses[0].host, token.addresses[0].port))


async def closed(sock: socket.socket) -> bool:
    """Whether the other end has closed it, within the time of the test."""
    sock.setblocking(False)
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(sock, 65536):
            pass
    return True


async def test_who_says_nothing_is_closed() -> None:
    async with world(QUICK) as w:
        silent = [raw(w.token) for _ in range(QUICK.connections_per_host_max)]
        try:
            for sock in silent:
                assert await closed(sock)
            assert (await join(w.token))[0] == OFFER
        finally:
            for sock in silent:
                sock.close()


async def test_who_says_nothing_gives_way_to_a_guest_of_the_same_host() -> None:
    async with world() as w:
        silent = [raw(w.token) for _ in range(port.InvitationLimits().connections_per_host_max)]
        try:
            assert (await join(w.token))[0] == OFFER
        finally:
            for sock in silent:
                sock.close()


async def test_half_a_request_is_closed() -> None:
    async with world(QUICK) as w, guest.connected(w.token) as connection:
        connection.writer.write(m.encode(REQUEST)[:-1])
        assert await connection.reader.read() == b""
        assert not w.asked


@pytest.mark.parametrize(
    "junk",
    [
        m.HEAD.pack(m.REQUEST_BYTES_MAX + 1),
        m.HEAD.pack(0xFFFF_FFFF) + b"x" * 1000,
        m.HEAD.pack(2) + b"[]",
        m.HEAD.pack(20000) + b"[" * 20000,
        m.HEAD.pack(12000) + b"[" * 12000,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_junk_is_closed_and_harms_nobody(junk: bytes) -> None:
    async with world() as w:
        async with guest.connected(w.token) as connection:
            connection.writer.write(junk)
            with contextlib.suppress(ConnectionError):
                assert await connection.reader.read() == b""
        assert (await join(w.token))[0] == OFFER


async def test_plain_http_at_the_port_harms_nobody() -> None:
    async with world() as w:
        with raw(w.token) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert await closed(sock)
        assert (await join(w.token))[0] == OFFER


async def test_a_guest_that_never_confirms_is_reported() -> None:
    async with world(QUICK) as w, guest.connected(w.token) as connection:
        assert await guest.present(connection, REQUEST) == OFFER
        found = await w.served
        assert (found.name, bool(found.problem)) == ("h2", True)
        assert await guest.confirm(connection, "") is None


# --------------------------------------------------------------- liars that have the certificate


@contextlib.asynccontextmanager
async def liar(
    said: bytes,
) -> AsyncIterator[Token]:
    """A host with the certificate of the token that says this."""
    tls = new_tls()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ssl.SSLError, ProtocolMismatchError):
            await receive(reader, m.InvitationRequest, m.REQUEST_BYTES_MAX)
            writer.write(said)
            await writer.drain()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0, ssl=tls.context)
    number = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(WAIT_S):
            yield Token((HostPort(HOST, number),), tls.digest, PASSWORD)
    finally:
        server.close()


@pytest.mark.parametrize(
    "said",
    [
        m.HEAD.pack(m.ANSWER_BYTES_MAX + 1),
        m.HEAD.pack(4) + b"null",
        m.encode(m.InvitationAnswer("given")),
        m.encode(m.InvitationAnswer("??")),
    ],
)
async def test_an_answer_that_is_none_is_told(said: bytes) -> None:
    async with liar(said) as token:
        with pytest.raises(ProtocolMismatchError):
            await ask(token)


async def test_what_a_liar_says_does_not_move_the_terminal() -> None:
    said = m.encode(m.InvitationAnswer(port.REFUSED, why="\x1b[2J no"))
    async with liar(said) as token:
        with pytest.raises(DonorRefusedError, match=r"\?\[2J no"):
            await ask(token)


async def test_nobody_at_any_address_names_each() -> None:
    with socket.create_server((HOST, 0)) as taken:
        number = taken.getsockname()[1]
    token = Token((HostPort(HOST, number), HostPort("127.0.0.2", number)), bytes(32), PASSWORD)
    with pytest.raises(NoDonorError, match=rf"{number} refuses the.*127.0.0.2:{number} refuses"):
        await ask(token)


async def test_send_and_receive_are_each_others_inverse() -> None:
    """A frame is read as it was written, however it arrives."""
    async with world() as w, guest.connected(w.token) as connection:
        for byte in m.encode(REQUEST):
            connection.writer.write(bytes((byte,)))
            await connection.writer.drain()
        answer = await receive(connection.reader, m.InvitationAnswer, m.ANSWER_BYTES_MAX)
        assert answer.offer == OFFER
        await send(connection.writer, m.Joined())
        assert (await w.served).problem == ""
