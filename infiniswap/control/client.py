# SPDX-License-Identifier: Apache-2.0
"""The consumer's end of the control API.

`connect` opens a session, `fetch_status` and `fetch_version` ask once over HTTP. Each failure has
an error of its own with a remedy: nothing listens, no route or no answer, another protocol on the
port, another secret, another version, another slab size.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct, structs

from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.admission import Proved, proved_by
from infiniswap.control.channel import HURRIED_S, Channel, Ended, Limits, close, receive, send
from infiniswap.control.explain import (
    cannot_connect,
    errors_explained,
    full,
    not_a_daemon,
    not_a_donor,
    older,
    refused_role,
    slab_mismatch,
    version_mismatch,
    wrong_secret,
)
from infiniswap.control.http import aiohttp
from infiniswap.control.one_connection import OneConnection
from infiniswap.control.pki import Credentials
from infiniswap.control.roles import Role
from infiniswap.control.text import clean_name, clean_text
from infiniswap.control.tls import client_context, peer_digest
from infiniswap.errors import (
    NoDonorError,
    NotPermittedError,
    ProtocolMismatchError,
)
from infiniswap.keys import Keys
from infiniswap.rdma_address import RdmaEnd
from infiniswap.units import HostPort

BodyT = TypeVar("BodyT")
NamedT = TypeVar("NamedT", m.Welcome, m.Status, m.DrainInfo, m.PageLink)
AnswerT = TypeVar("AnswerT", bound=m.Answer)

log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = m.MESSAGE_BYTES_MAX
"""Longest HTTP body accepted. A donor's status stays below it (infiniswap.donor.report)."""

_HEARTBEAT_S: Final = (0.05, 60.0)
_MISSED: Final = (1, 100)
"""Bounds of what a donor may ask for, as those of cluster.heartbeat_s and
cluster.heartbeats_missed_max: a donor must not make us ping without a pause, or trust a silent
session for days."""
_SECRETS_DIFFER: Final = "the cluster secrets differ"
_NO_KEYS: Final = "the donor asks for a cluster secret, and none is configured here"
_NOT_PROVED: Final = (
    "the donor does not prove that it knows the cluster secret: it has another one, or another "
    "host is in between"
)
_DONORS: Final = frozenset({Role.DONOR})
_FIRST_TICKETS_S: Final = 5.0
"""How long tickets that came with a lease are used: half of their life."""
_NO_TICKETS: Final[tuple[int, list[str], float]] = (0, [], 0.0)
"""Of which lease, the tickets, and until when they are used."""
_FAILED_CLOSE_S: Final = 0.5
"""How long a peer that failed the handshake may take to agree to the close."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the consumer is.

    Attributes:
        device_id: UUID of the device, lower case; the same over restarts.
        device_name: for tables.
        host_name: for tables.
        use: what its leases are for; None: that is not told.
    """

    device_id: str
    device_name: str
    host_name: str
    use: m.LeaseUse | None = None


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Bounds of the client, in seconds.

    Attributes:
        keys: of the cluster; None: none are configured, so that donors refuse.
        credentials: of this host, where the cluster has certificates in place of keys.
        connect_s: for the whole way to an open session, or a whole HTTP request.
        request_s: for the answer to one request.
        renew_s: for the answer to a renewal: the donor drains old connections first.
        send_s: for one message to leave.
        http: what sessions are opened over; None: aiohttp over TCP.
        tls: made once, as a take-over must read no file; unused with credentials.
    """

    keys: Keys | None = None
    connect_s: float = 3.0
    request_s: float = 2.0
    renew_s: float = 10.0
    send_s: float = 5.0
    http: Callable[[], aiohttp.ClientSession] | None = None
    tls: ssl.SSLContext = field(default_factory=client_context)
    credentials: Credentials | None = None

    @property
    def shown(self) -> str:
        """The names that this host shows, for sentences; empty: it shows no certificate."""
        return "" if self.credentials is None else self.credentials.shown

    def connection(self, address: HostPort) -> OneConnection:
        """For one session or request with the donor there. With certificates it ends before
        anything is sent, unless the other end is a donor of the cluster."""
        own = self.credentials
        if own is None:
            return OneConnection(self.tls)

        def check(shown: asyncio.Transport) -> Proved:
            try:
                return proved_by(shown, own.subject.cluster, _DONORS)
            except ValueError as error:
                raise not_a_donor(address, str(error)) from None

        return OneConnection(own.client, check)


_EVICTIONS_MAX = 4096
"""Evictions handled at once, each while its slab is copied elsewhere. The donor takes further slabs
by force."""


class SessionHandler(Protocol):
    """What a session asks of the consumer. Called on the event loop."""

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        """Stops using the slab; returns when no transfer is in flight there (DONE).

        Past `deadline_s` seconds the donor takes it anyway. The slab's pages may be copied
        elsewhere before, for at most `move_s` seconds. The donor may ask for it again meanwhile.
        With `last_copy` it takes the slab even if it holds the only copy of some pages.
        """

    async def activity(self, lease: int) -> Mapping[int, float]:
        """Page I/O per second by slot."""

    def figures(self) -> m.DeviceFigures | None:
        """What the device says of itself, for the donor's status; None: nothing."""

    def draining(self, draining: bool) -> None:
        """The donor lends no more slabs, or lends again."""

    def ended(self, ended: Ended) -> None:
        """The session has ended; called once. Leases live on for their grace period."""


class QuietHandler:
    """A SessionHandler for sessions that only ask: refuses nothing, knows nothing."""

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_s: float,
        move_s: float,
        *,
        last_copy: bool = False,
    ) -> None:
        """Nothing is ever in use."""

    async def activity(self, lease: int) -> Mapping[int, float]:
        """Knows of none."""
        return {}

    def figures(self) -> m.DeviceFigures | None:
        """There is no device."""
        return None

    def draining(self, draining: bool) -> None:
        """Not of interest."""

    def ended(self, ended: Ended) -> None:
        """Not of interest."""


class Session:
    """An open session with one donor; made by `connect`. Also an async context manager.

    Every request raises RequestRefusedError when the donor says no (its `reason` says why),
    SessionLostError when the session ends first and DeadlineError when no answer comes in time.
    """

    def __init__(
        self,
        address: HostPort,
        welcome: m.Welcome,
        channel: Channel,
        config: ClientConfig,
        http: aiohttp.ClientSession,
        handler: SessionHandler,
        peer: str = "",
        proved: Proved | None = None,
        use: m.LeaseUse | None = None,
    ) -> None:
        self.peer = peer
        """The donor's address in figures; empty where it needs more than that."""
        self.proved = proved
        """By the donor's certificate; None: it has proved the cluster secret."""
        self.address = address
        self.welcome = welcome
        self._channel = channel
        self._config = config
        self._use = use
        self._first_tickets = _NO_TICKETS
        self._http = http
        self._task = asyncio.create_task(self._run(handler), name=f"session with {address}")

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def data_address(self) -> HostPort:
        """Where the donor serves pages: the host that has answered, the port of the welcome.

        In figures: at a reconnect the resolver's memory may be swapped out.
        """
        return HostPort(self.peer or self.address.host, self.welcome.data_port)

    @property
    def ended(self) -> Ended | None:
        """Why the session ended, None while it is open."""
        return self._channel.ended

    async def wait_ended(self) -> Ended:
        """Waits until the session ends."""
        return await self._channel.wait_ended()

    def end(self) -> None:
        """Says goodbye without waiting. Idempotent; `close` must follow."""
        self._channel.end(m.GOODBYE_DONE)

    async def close(self) -> None:
        """Says goodbye and closes, in bounded time. Idempotent. Leases enter their grace.

        Not from within a SessionHandler's coroutines: it waits for them.
        """
        self.end()
        await asyncio.wait({self._task})
        await self._http.close()

    async def check_data_port(self) -> None:
        """Connects to the data port and disconnects. A firewall that lets only the control port in
        is found here, before any page is sent.

        Raises:
            NoDonorError: nothing there, or no answer.
        """
        address = HostPort(self.address.host, self.welcome.data_port)  # as the user knows it
        async with errors_explained(address, self._config.connect_s):
            try:
                _, writer = await asyncio.open_connection(self.data_address.host, address.port)
            except TimeoutError:
                raise
            except OSError as error:
                raise cannot_connect(address, error) from error
            writer.close()

    async def memory(self) -> m.MemoryAnswer:
        """The donor's memory use, now."""
        tenant = self._use.tenant if self._use else ""
        return await self.ask(m.MemoryRequest(id=self.next_id(), tenant=tenant))

    async def lease(self, slots_max: int, connections: int = 0) -> m.LeaseAnswer:
        """A new lease of `slots_max` empty slots. `tickets` for so many data connections come with
        it where the donor is new enough."""
        answer = await self.ask(
            m.LeaseRequest(
                id=self.next_id(), slots_max=slots_max, use=self._use, tickets=connections
            )
        )
        until_s = asyncio.get_running_loop().time() + _FIRST_TICKETS_S
        self._first_tickets = answer.lease, answer.tickets, until_s
        return answer

    async def map(self, lease: int, slab: int, *, ahead: bool = False) -> m.MapAnswer:
        """Asks for a slab in a slot of the lease; `ahead`: see MapRequest."""
        return await self.ask(m.MapRequest(id=self.next_id(), lease=lease, slab=slab, ahead=ahead))

    async def keep(self, lease: int, slot: int, generation: int) -> None:
        """A slab that was mapped ahead is in use."""
        await self.ask(
            m.KeepRequest(id=self.next_id(), lease=lease, slot=slot, generation=generation)
        )

    async def unmap(self, lease: int, slot: int, generation: int) -> None:
        """Gives a slab back (DONE): no transfer is in flight there."""
        await self.ask(
            m.UnmapRequest(id=self.next_id(), lease=lease, slot=slot, generation=generation)
        )

    async def renew(self, lease: int, reclaim: str, epoch: int) -> m.RenewAnswer:
        """Reclaims a lease of an earlier session; its old tickets and connections are dead."""
        return await self.ask(
            m.RenewRequest(
                id=self.next_id(), lease=lease, reclaim=reclaim, epoch=epoch, use=self._use
            ),
            self._config.renew_s,
        )

    async def rdma(self, lease: int, ends: Sequence[RdmaEnd]) -> m.RdmaAnswer:
        """RDMA connections to these ends; refused with REFUSED_NO_RDMA where there can be none."""
        return await self.ask(
            m.RdmaRequest(id=self.next_id(), lease=lease, ends=list(ends)), self._config.renew_s
        )

    async def tickets(self, lease: int, first: int, count: int) -> list[str]:
        """A ticket for each data connection of these numbers."""
        (of, came, until_s), self._first_tickets = self._first_tickets, _NO_TICKETS
        is_good = of == lease and asyncio.get_running_loop().time() < until_s
        if is_good and not first and count <= len(came):
            return came[:count]
        answer = await self.ask(
            m.TicketsRequest(id=self.next_id(), lease=lease, first=first, count=count),
            self._config.renew_s,
        )
        if len(answer.tickets) != count:
            raise ProtocolMismatchError(
                f"the donor gave {len(answer.tickets)} tickets, not {count}",
                where=f"donor {self.address}",
            )
        return answer.tickets

    async def lasting_ticket(self, lease: int, connections: int) -> str:
        """A ticket for so many connections, which ends with the session."""
        answer = await self.ask(
            m.LastingTicketRequest(id=self.next_id(), lease=lease, connections=connections)
        )
        if len(answer.tickets) != 1:
            raise ProtocolMismatchError("the donor gave no ticket", where=f"donor {self.address}")
        return answer.tickets[0]

    async def release(self, lease: int) -> None:
        """Gives a lease and every slab in it back."""
        await self.ask(m.ReleaseRequest(id=self.next_id(), lease=lease), self._config.renew_s)

    def next_id(self) -> int:
        """The number of the next request."""
        return self._channel.next_id()

    async def ask(
        self, request: m.ConsumerRequest[AnswerT], wait_s: float | None = None
    ) -> AnswerT:
        """Asks the donor; waits for `wait_s` seconds at most, or as long as is configured."""
        return await self._channel.request(request, wait_s or self._config.request_s)

    async def _run(self, handler: SessionHandler) -> None:
        def ended(ended: Ended) -> None:
            if ended.is_broken:
                log.warning("donor %s: %s; the session is ended", self.address, ended.detail)
            handler.ended(ended)

        try:
            await self._channel.run(ended)
        finally:
            await self._http.close()


async def connect(
    address: HostPort,
    identity: Identity,
    config: ClientConfig,
    handler: SessionHandler,
    *,
    slab_bytes: int | None = None,
    peer: str = "",
) -> Session:
    """Opens a session; the caller closes it.

    Args:
        address: of the donor's control port.
        identity: who asks.
        config: bounds and secret.
        handler: for what the donor asks.
        slab_bytes: slab size that is needed, None: any.
        peer: the donor's address in figures, if the name must not be resolved.

    Raises:
        NoDonorError: nothing there, or no answer.
        ProtocolMismatchError: no Infiniswap daemon, or one of another version.
        WrongSecretError: the ends do not share a secret.
        SlabSizeMismatchError: the donor lends slabs of another size.
    """
    connection = None
    if config.http is not None:
        http = config.http()
    else:
        connection = config.connection(address)
        http = _http_session(connection)
    ws: aiohttp.ClientWebSocketResponse | None = None
    try:
        async with errors_explained(address, config.connect_s, config.shown):
            ws = await http.ws_connect(
                f"https://{HostPort(peer or address.host, address.port)}{m.SESSION_PATH}",
                protocols=(m.SUBPROTOCOL,),
                max_msg_size=m.MESSAGE_BYTES_MAX,
                compress=0,
                autoping=False,
            )
            if ws.protocol != m.SUBPROTOCOL:
                raise not_a_daemon(address, "a WebSocket server of another kind answered")
            handshake = _handshake if config.credentials is None else _certified
            welcome = _as_certified(await handshake(ws, address, identity, config), connection)
            if slab_bytes is not None and welcome.slab_bytes != slab_bytes:
                await send(ws, m.Goodbye(reason=m.GOODBYE_DONE), config.send_s)
                raise slab_mismatch(address, welcome.slab_bytes, slab_bytes)
        channel = _open_channel(ws, address, welcome, config, handler)
        proved = None if connection is None else connection.proved
        return Session(
            address, welcome, channel, config, http, handler, _peer_of(ws), proved, identity.use
        )
    except BaseException:
        if ws is not None:
            await close(ws, HURRIED_S)
        await http.close()
        raise


def _as_certified(said: NamedT, connection: OneConnection | None) -> NamedT:
    """What a donor has said of itself, with the name in its certificate in place of its own word
    for it."""
    proved = None if connection is None else connection.proved
    return said if proved is None else structs.replace(said, donor_name=proved.subject.host)


def _peer_of(ws: aiohttp.ClientWebSocketResponse) -> str:
    name = ws.get_extra_info("peername")
    # An address of IPv6 with a scope is one of this link: it means nothing without its interface.
    return str(name[0]) if name and not any(name[3:]) else ""


def _open_channel(
    ws: aiohttp.ClientWebSocketResponse,
    address: HostPort,
    welcome: m.Welcome,
    config: ClientConfig,
    handler: SessionHandler,
) -> Channel:
    async def evict(request: m.EvictRequest) -> m.EvictAnswer:
        await handler.evict(
            request.lease,
            request.slot,
            request.generation,
            request.deadline_ms / 1000,
            min(request.move_ms, request.deadline_ms) / 1000,
            last_copy=request.last_copy,
        )
        return m.EvictAnswer(id=request.id)

    async def activity(request: m.ActivityRequest) -> m.ActivityAnswer:
        slots = await handler.activity(request.lease)
        return m.ActivityAnswer(
            id=request.id,
            slots=[m.SlotActivity(slot, max(0.0, rate)) for slot, rate in slots.items()],
            device=handler.figures(),
        )

    handlers: dict[type[Struct], Callable[[Any], Awaitable[m.Answer]]] = {
        m.EvictRequest: evict,
        m.ActivityRequest: activity,
    }

    async def handle(request: Struct) -> Struct:
        return await handlers[type(request)](request)

    def notice(message: Struct) -> None:
        if isinstance(message, m.DrainNotice):
            handler.draining(message.draining)

    return Channel(
        ws,
        decode=m.decode_to_consumer,
        handle=handle,
        notice=notice,
        peer=f"donor {address}",
        limits=limits_of(welcome, config.send_s),
    )


def limits_of(welcome: m.Welcome, send_s: float) -> Limits:
    """Bounds of a session. The donor says how often to ping, so that both ends agree on when the
    other counts as gone."""
    heartbeat_s = _within(welcome.heartbeat_ms / 1000, *_HEARTBEAT_S)
    return Limits(
        heartbeat_s=heartbeat_s,
        missed_max=round(_within(welcome.silence_ms / 1000 / heartbeat_s, *_MISSED)),
        send_s=send_s,
        handling_max=_EVICTIONS_MAX,
    )


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


async def _certified(
    ws: aiohttp.ClientWebSocketResponse,
    address: HostPort,
    identity: Identity,
    config: ClientConfig,
) -> m.Welcome:
    """TLS has proved who both ends are."""
    await send(ws, _hello(identity, ""), config.send_s)
    welcome = await _expect(ws, address, m.Welcome)
    if welcome.version not in m.VERSIONS:
        raise version_mismatch(address, str(welcome.version))
    return welcome


def _hello(identity: Identity, nonce: str) -> m.Hello:
    return m.Hello(
        versions=list(m.VERSIONS),
        device_id=identity.device_id,
        device_name=clean_name(identity.device_name, "unnamed"),
        host_name=clean_name(identity.host_name, "unnamed"),
        nonce=nonce,
    )


async def _handshake(
    ws: aiohttp.ClientWebSocketResponse,
    address: HostPort,
    identity: Identity,
    config: ClientConfig,
) -> m.Welcome:
    if config.keys is None:
        raise wrong_secret(address, _NO_KEYS)
    nonce = secrets.token_hex(auth.NONCE_BYTES)
    await send(ws, _hello(identity, nonce), config.send_s)
    challenge = await _expect(ws, address, m.Challenge)
    if challenge.version != m.choose_version(m.VERSIONS, challenge.versions):
        raise version_mismatch(address, ", ".join(map(str, challenge.versions)))
    transcript = auth.Transcript(
        digest=peer_digest(ws),
        version=challenge.version,
        versions_consumer=m.VERSIONS,
        versions_donor=tuple(challenge.versions),
        device_id=identity.device_id,
        nonce_consumer=nonce,
        nonce_donor=challenge.nonce,
    )
    key = config.keys.session
    await send(ws, m.Auth(proof=auth.consumer_proof(key, transcript)), config.send_s)
    welcome = await _expect(ws, address, m.Welcome)
    if not auth.proofs_equal(welcome.proof, auth.donor_proof(key, transcript)):
        await send(ws, m.Goodbye(reason=m.GOODBYE_SECRET, detail=_NOT_PROVED), config.send_s)
        raise wrong_secret(address, _NOT_PROVED)
    return welcome


async def _expect(
    ws: aiohttp.ClientWebSocketResponse, address: HostPort, kind: type[BodyT]
) -> BodyT:
    frame = await receive(ws)
    if frame is None:
        raise NoDonorError(
            "the connection was closed in the middle of the handshake",
            where=f"donor {address}",
            mend="The daemon may be stopping; its log says why.",
        )
    message = m.decode_to_consumer(frame)
    if isinstance(message, kind):
        return message
    if not isinstance(message, m.Goodbye):
        raise ProtocolMismatchError(
            f"a {type(message).__name__} where a {kind.__name__} was due", where=f"donor {address}"
        )
    detail = message.detail or message.reason
    if message.reason == m.GOODBYE_SECRET:
        raise wrong_secret(address, detail)
    if message.reason == m.GOODBYE_CERTIFICATE:
        raise refused_role(address, detail)
    if message.reason == m.GOODBYE_VERSION:
        raise version_mismatch(address, detail)
    if message.reason == m.GOODBYE_PROTOCOL:
        raise ProtocolMismatchError(
            f"the donor did not understand the handshake ({detail})", where=f"donor {address}"
        )
    raise NoDonorError(
        f"the donor refused the session: {detail}",
        where=f"donor {address}",
        mend="Try again later, or name another donor.",
    )


# ------------------------------------------------------------------------------ HTTP


async def fetch_status(address: HostPort, config: ClientConfig) -> m.Status:
    """A donor's state.

    Raises:
        NoDonorError, ProtocolMismatchError, WrongSecretError: as for `connect`.
    """
    key = None if config.keys is None else config.keys.session
    return await _fetch_proved(address, config, key, "GET", m.STATUS_PATH, m.Status)


async def set_draining(
    address: HostPort, config: ClientConfig, draining: bool, *, force: bool = False
) -> m.DrainInfo:
    """Tells a donor to take every slab back, with `force` the only copies of pages as well; or to
    lend again.

    Raises:
        NoDonorError, ProtocolMismatchError, WrongSecretError: as for `connect`.
        NotPermittedError: this host has the session key alone.
    """
    path = m.UNDRAIN_PATH
    if draining:
        path = m.DRAIN_FORCE_PATH if force else m.DRAIN_PATH
    key = None if config.keys is None else config.keys.operator
    if key is None and config.keys is not None and config.credentials is None:
        raise NotPermittedError(
            "this host has a session key alone, and with that nobody may drain donors",
            where=f"donor {address}",
            mend="Run this command on a host that has the cluster secret.",
        )
    return await _fetch_proved(address, config, key, "POST", path, m.DrainInfo)


async def make_page_link(address: HostPort, config: ClientConfig) -> m.PageLink:
    """Has a donor let one browser in at its page.

    Raises:
        NoDonorError, ProtocolMismatchError, WrongSecretError: as for `connect`.
    """
    key = None if config.keys is None else config.keys.session
    return await _fetch_proved(address, config, key, "POST", m.PAGE_LINK_PATH, m.PageLink)


async def _fetch_proved(
    address: HostPort,
    config: ClientConfig,
    key: bytes | None,
    method: str,
    path: str,
    kind: type[NamedT],
) -> NamedT:
    """Nonce and request go over one connection. The proof covers the certificate that was shown on
    it, so it is of use on no other. With certificates on both sides there is no more to prove."""
    connection = config.connection(address)
    async with (
        errors_explained(address, config.connect_s, config.shown),
        _http_session(connection) as http,
    ):
        if config.credentials is not None:
            body, _ = await _fetch(http, address, method, path, kind)
            return _as_certified(body, connection)
        given, _ = await _fetch(http, address, "GET", m.NONCE_PATH, m.NonceInfo)
        if key is None:
            raise wrong_secret(address, _NO_KEYS)
        digest = peer_digest(connection.transport)
        request = auth.HttpRequest(digest, method, path, given.nonce)
        authorization = auth.http_authorization(key, request)
        body, proof = await _fetch(http, address, method, path, kind, authorization)
        if not auth.proofs_equal(proof, auth.http_donor_proof(key, request)):
            raise wrong_secret(address, _NOT_PROVED)
        return body


async def fetch_version(address: HostPort, config: ClientConfig) -> m.VersionInfo:
    """Who answers at an address; needs no secret.

    Raises:
        NoDonorError, ProtocolMismatchError: as for `connect`.
    """
    connection = config.connection(address)
    async with (
        errors_explained(address, config.connect_s, config.shown),
        _http_session(connection) as http,
    ):
        return (await _fetch(http, address, "GET", m.VERSION_PATH, m.VersionInfo))[0]


async def _fetch(
    http: aiohttp.ClientSession,
    address: HostPort,
    method: str,
    path: str,
    kind: type[BodyT],
    authorization: str = "",
) -> tuple[BodyT, str]:
    """The body, and the donor's proof."""
    url = f"https://{address}{path}"
    headers = {"Authorization": authorization} if authorization else {}
    async with http.request(method, url, headers=headers, allow_redirects=False) as response:
        proof = response.headers.get(auth.PROOF_HEADER, "")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > BODY_BYTES_MAX:
                raise not_a_daemon(address, f"an answer of more than {BODY_BYTES_MAX} bytes")
        if response.status == 401:
            raise wrong_secret(address, _SECRETS_DIFFER)
        if response.status == 403:
            raise refused_role(address, _said_of(bytes(body)))
        if response.status == 503:
            raise full(address)
        if response.status == 404 and (lacks := _lacks_without(path)):
            raise older(address, lacks)
        if response.status != 200:
            raise not_a_daemon(address, f"HTTP status {response.status}")
    try:
        return m.decode_body(bytes(body), kind), proof
    except ProtocolMismatchError as error:
        raise not_a_daemon(address, error.what) from None


def _lacks_without(path: str) -> str:
    """What a daemon of an earlier release lacks that knows no such path; empty: all know it."""
    later = {m.PAGE_LINK_PATH: "has no page", m.DRAIN_FORCE_PATH: "cannot drain by force"}
    return later.get(path, "")


def _said_of(body: bytes) -> str:
    try:
        return clean_text(m.decode_body(body, m.HttpError).error)
    except ProtocolMismatchError:
        return "the donor does not say why"


def _http_session(connection: OneConnection) -> aiohttp.ClientSession:
    # No proxies from the environment, no cookies. No compression: a few bytes could become many
    # before they are counted.
    return aiohttp.ClientSession(
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        connector=connection,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )
