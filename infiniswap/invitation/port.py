# SPDX-License-Identifier: Apache-2.0
"""The end of the inviting host: a port that serves one invitation, and closes.

Everything that a stranger can make it hold is bounded: connections, in all and of one host; the
time for a handshake and a request; the size of a request. A connection that has not shown the
password gives way to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from infiniswap.control.listening import open_sockets
from infiniswap.control.peer import unmapped
from infiniswap.control.places import ConnectionPlaces
from infiniswap.control.socket_owner import peer_of_socket, trusted_users
from infiniswap.control.tls import ServerTls
from infiniswap.errors import (
    ConflictError,
    DeadlineError,
    InfiniswapError,
    UsageError,
    from_oserror,
)
from infiniswap.invitation import messages as m
from infiniswap.invitation.frames import close, receive, send
from infiniswap.invitation.once import Invitation, Verdict
from infiniswap.units import ANY_IPV6, HostPort, counted

_LOOK_S: Final = 1.0
"""How often a waiting invitation compares the clock: a host may have slept meanwhile."""
_FAILURES: Final = (OSError, EOFError, TimeoutError, InfiniswapError)
REFUSED: Final = "refused"
"""Beside the verdicts: this guest cannot be let in, and the invitation stays open."""


@dataclass(frozen=True, slots=True)
class InvitationLimits:
    """Bounds.

    Attributes:
        connections_max, connections_per_host_max: see infiniswap.control.places.
        request_s: for the handshake and the request.
        confirm_s: for the guest to write its files.
    """

    connections_max: int = 16
    connections_per_host_max: int = 4
    request_s: float = 10.0
    confirm_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Guest:
    """Who was invited.

    Attributes:
        name: as it calls itself.
        address: from which it came.
        problem: why it has not confirmed; empty: it has.
        note: what was done about its daemon.
    """

    name: str
    address: str
    problem: str = ""
    note: str = ""


def boot_clock() -> float:
    """Seconds since the host started, sleep included. Nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def listen(address: HostPort) -> list[socket.socket]:
    """Listening sockets; an empty host is every address of this host.

    Raises:
        ConflictError: the port is in use.
        UsageError: the name of the address cannot be resolved.
        NotPermittedError, SystemCallError: the address cannot be listened on.
    """
    where = f"--listen {address}" if address.host else f"TCP port {address.port}"
    try:
        if address.host:
            return open_sockets(address)
        try:
            return open_sockets(HostPort(ANY_IPV6, address.port))
        except OSError as error:  # IPv6 may be switched off, in one of many ways
            if error.errno == errno.EADDRINUSE:
                raise
            return open_sockets(HostPort("0.0.0.0", address.port))
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"the name cannot be resolved: {why}", where=where, mend="Give an address."
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConflictError(
                "the port is in use: perhaps another invitation is open on this host",
                where=where,
                mend="Wait for it or end it with Ctrl-C, or give --listen ADDRESS:PORT.",
            ) from error
        raise from_oserror("cannot listen", error, where=where) from error


class InvitingPort:
    """Serves one invitation.

    Args:
        invitation: decides.
        tls: certificate that the token names.
        offer: makes what a guest gets, from its request and the address of this host that it has
            reached. Called in a thread. Raises InfiniswapError: this guest cannot get it.
        take_up: told of the address of a guest's own daemon; returns a sentence for both ends.
            Called in a thread.
        limits: bounds.
        clock: seconds, as of `invitation`.
    """

    def __init__(
        self,
        invitation: Invitation,
        tls: ServerTls,
        offer: Callable[[m.InvitationRequest, str], m.Offer],
        take_up: Callable[[str], str],
        limits: InvitationLimits | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._invitation = invitation
        self._tls = tls
        self._offer = offer
        self._take_up = take_up
        self._limits = limits or InvitationLimits()
        self._clock = clock
        self._places: ConnectionPlaces[socket.socket] = ConnectionPlaces(
            self._limits.connections_max, self._limits.connections_per_host_max, trusted_users()
        )
        self._tasks: dict[socket.socket, asyncio.Task[None]] = {}

    async def serve(self, listeners: Sequence[socket.socket]) -> Guest:
        """Waits for the guest, and closes the listeners.

        Raises:
            DeadlineError: nobody came in time.
        """
        guest: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()
        accepting = [
            asyncio.create_task(self._accept(listener, guest), name="invitation: accept")
            for listener in listeners
        ]
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            try:
                return await self._wait(guest)
            finally:
                running = {*accepting, *self._tasks.values()}
                for task in running:
                    task.cancel()
                await asyncio.wait(running)

    async def _wait(self, guest: asyncio.Future[Guest]) -> Guest:
        while True:
            left_s = self._invitation.left_s(self._clock())
            is_given = bool(self._invitation.given_to)
            if not left_s and not is_given:
                wrong = self._invitation.wrong
                tried = f"; {counted(wrong, 'wrong password')} came" if wrong else ""
                raise DeadlineError(
                    f"the invitation has ended, and nobody has used it{tried}",
                    mend="Run `infiniswap invite` again for another token.",
                )
            # A guest's own time is bounded by InvitationLimits.confirm_s.
            done, _ = await asyncio.wait({guest}, timeout=_LOOK_S)
            if done:
                return guest.result()

    async def _accept(self, listener: socket.socket, guest: asyncio.Future[Guest]) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError:  # of that connection, or too many files are open
                await asyncio.sleep(0.1)
                continue
            address = unmapped(where[0])
            peer = peer_of_socket(sock, where)
            is_in, lost = self._places.enter(peer, sock, self._clock())
            for loser in lost:
                self._tasks[loser].cancel()
            if not is_in:
                sock.close()
                continue
            serving = self._serve(sock, address, peer, guest)
            task = asyncio.create_task(serving, name=f"guest {peer}")
            self._tasks[sock] = task
            task.add_done_callback(functools.partial(self._ended, sock))

    def _ended(self, sock: socket.socket, _task: asyncio.Task[None]) -> None:
        # Also of one that was cancelled before it began.
        sock.close()
        self._places.leave(sock)
        del self._tasks[sock]

    async def _serve(
        self, sock: socket.socket, address: str, peer: str, guest: asyncio.Future[Guest]
    ) -> None:
        """One connection. What goes wrong with it ends this connection only."""
        with contextlib.suppress(*_FAILURES):
            await self._converse(sock, address, peer, guest)

    async def _converse(
        self, sock: socket.socket, address: str, peer: str, guest: asyncio.Future[Guest]
    ) -> None:
        loop = asyncio.get_running_loop()
        own = unmapped(sock.getsockname()[0])
        async with asyncio.timeout(self._limits.request_s):
            reader = asyncio.StreamReader(limit=m.REQUEST_BYTES_MAX)
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._limits.request_s,
                ssl_shutdown_timeout=2.0,
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            async with asyncio.timeout(self._limits.request_s):
                request = await receive(reader, m.InvitationRequest, m.REQUEST_BYTES_MAX)
                answer = await self._answer(request, sock, peer, own)
                if answer.verdict != Verdict.GIVEN:
                    await send(writer, answer)
                    return
            about = Guest(request.host, address)
            try:
                about = await self._hand_over(reader, writer, answer, about)
            except Exception as error:  # whatever it is: the invitation is given away
                about = dataclasses.replace(about, problem=str(error) or type(error).__name__)
                raise
            finally:
                guest.set_result(about)
        except asyncio.CancelledError:  # its place is another's: it holds nothing any longer
            transport.abort()
            raise
        finally:
            await close(writer)

    async def _answer(
        self, request: m.InvitationRequest, sock: socket.socket, peer: str, own: str
    ) -> m.InvitationAnswer:
        def present(*, preview: bool) -> Verdict:
            now_s = self._clock()
            return self._invitation.present(request.password, peer, now_s, preview=preview)

        if request.version != m.VERSION:
            return m.InvitationAnswer(
                REFUSED, why="the two hosts have different releases of Infiniswap"
            )
        verdict = present(preview=True)
        if verdict is not Verdict.PREVIEWED:
            return m.InvitationAnswer(verdict)
        self._places.proved(sock, self._clock())
        try:
            offer = await asyncio.to_thread(self._offer, request, own)
        except InfiniswapError as error:
            return m.InvitationAnswer(REFUSED, why=str(error))
        # Another guest may have been quicker meanwhile.
        verdict = present(preview=request.preview)
        is_given = verdict in (Verdict.GIVEN, Verdict.PREVIEWED)
        return m.InvitationAnswer(verdict, offer if is_given else None)

    async def _hand_over(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: m.InvitationAnswer,
        about: Guest,
    ) -> Guest:
        """Sends the offer, and waits until the guest has written its files. The invitation is given
        away, whatever happens now."""
        try:
            async with asyncio.timeout(self._limits.confirm_s):
                await send(writer, answer)
                joined = await receive(reader, m.Joined, m.REQUEST_BYTES_MAX)
        except _FAILURES as error:
            return dataclasses.replace(about, problem=str(error) or type(error).__name__)
        note = await asyncio.to_thread(self._take_up, joined.lends) if joined.lends else ""
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(self._limits.request_s):
                await send(writer, m.Noted(note))
        return dataclasses.replace(about, note=note)
