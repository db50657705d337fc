# SPDX-License-Identifier: Apache-2.0
"""The interface between the control server and the donor behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from infiniswap.control import messages as m
from infiniswap.control.admission import Proved
from infiniswap.control.channel import Channel, Ended, Limits
from infiniswap.control.figures import Figures
from infiniswap.control.handshake_rate import OF_STRANGERS, PER_HOST
from infiniswap.control.http import web
from infiniswap.control.key_ring import KeyRing
from infiniswap.control.peer import Caller
from infiniswap.control.places import PROOF_S
from infiniswap.control.rate import Rate
from infiniswap.control.tls import ServerTls
from infiniswap.errors import InfiniswapError, RequestRefusedError

CONNECTIONS_MAX: Final = 2048
"""TCP connections at once, unless configured otherwise."""
SESSIONS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Bounds of the server.

    Attributes:
        tls: key and certificate.
        keys: of the cluster. They may change while the server runs.
        limits: of each session.
        request_s: how long a peer may take to read an answer; three times that for another request.
        proof_s: how long it may take to prove itself, the handshake of TLS included.
        connections_max: TCP connections at once.
        connections_per_host_max: see infiniswap.control.places.
        sessions_max: open sessions at once.
        flood_s: how long a peer whose session was ended for a flood is kept out.
        tls_per_host: TLS handshakes of one peer.
        tls_of_strangers: of all peers together that have not proved themselves lately.
        stop_s: how long stopping waits for sessions to close.
        metrics_token: also gives access to the metrics; None: only the secret does.
    """

    tls: ServerTls
    keys: KeyRing
    limits: Limits = Limits()
    request_s: float = 5.0
    proof_s: float = PROOF_S
    connections_max: int = CONNECTIONS_MAX
    connections_per_host_max: int = 128
    sessions_max: int = SESSIONS_MAX
    flood_s: float = 10.0
    tls_per_host: Rate = PER_HOST
    tls_of_strangers: Rate = OF_STRANGERS
    stop_s: float = 5.0
    metrics_token: bytes | None = None


class ServerSession:
    """A consumer's open session, as the service sees it."""

    def __init__(
        self,
        number: int,
        hello: m.Hello,
        caller: Caller,
        version: int,
        proof: str,
        proved: Proved | None = None,
    ) -> None:
        self.number = number
        self.proof = proof
        """The donor's, for the welcome."""
        self.device_id = hello.device_id
        self.device_name = hello.device_name
        self.address = caller.address
        self.peer = caller.peer
        self.proved = proved
        """By certificate; None: it has proved the cluster secret."""
        self.expired_s: float | None = None
        """Since when the donor sees that its certificate has expired; None: it has not."""
        self.certified_host = certified_host = "" if proved is None else proved.subject.host
        """As its certificate says; empty: it has shown none."""
        self.host_name = certified_host or hello.host_name
        self.consumer = certified_host or caller.peer
        self.version = version
        self._refused_maps: deque[int] = deque(maxlen=16)  # ids, the latest
        self._channel: Channel | None = None

    def __str__(self) -> str:
        return f"device {self.device_name} of {self.host_name} ({self.address})"

    @property
    def channel(self) -> Channel:
        """The channel for requests to the consumer."""
        assert self._channel is not None, "set before the service sees the session"
        return self._channel

    def attach(self, channel: Channel) -> None:
        """Binds the channel, once."""
        self._channel = channel

    async def map_once(
        self, request_id: int, answer: Callable[[], Awaitable[m.MapAnswer]]
    ) -> m.MapAnswer:
        """The answer to a MapRequest. A repeated request that was refused before is refused again:
        its sender no longer waits, and would not learn of a slab that it got now.

        Raises:
            InfiniswapError: as `answer`.
        """
        if request_id in self._refused_maps:
            raise RequestRefusedError("refused before", reason=m.REFUSED_NO_MEMORY)
        try:
            return await answer()
        except InfiniswapError:
            self._refused_maps.append(request_id)
            raise

    async def evict(
        self,
        lease: int,
        slot: int,
        generation: int,
        deadline_ms: int,
        move_ms: int = 0,
        *,
        last_copy: bool = False,
    ) -> None:
        """Asks the consumer to give a slab up; returns when it has.

        Args:
            lease: whose slab.
            slot: where.
            generation: of the slot.
            deadline_ms: how long that may take in all.
            move_ms: how much of that may be spent on copying the slab elsewhere.
            last_copy: a refusal will be of no use.

        Raises:
            DeadlineError, SessionLostError, RequestRefusedError: it has not.
        """
        await self.channel.request(
            m.EvictRequest(
                id=self.channel.next_id(),
                lease=lease,
                slot=slot,
                generation=generation,
                deadline_ms=deadline_ms,
                move_ms=move_ms,
                last_copy=last_copy,
            ),
            deadline_ms / 1000,
        )

    async def activity(self, lease: int, wait_s: float) -> m.ActivityAnswer:
        """Page I/O per second by slot, and what the device says of itself.

        Raises:
            DeadlineError, SessionLostError, RequestRefusedError: the consumer did not say.
        """
        request = m.ActivityRequest(id=self.channel.next_id(), lease=lease)
        return await self.channel.request(request, wait_s)


class Service(Protocol):
    """What the server needs from the donor. Nothing here may block the event loop."""

    def welcome(self, version: int, proof: str) -> m.Welcome:
        """The last message of a good handshake."""

    def status(self) -> m.Status:
        """Returns the answer to GET /v1/status."""

    async def refresh(self) -> None:
        """Asks devices for what the status says of their slabs, in bounded time."""

    def figures(self) -> Figures:
        """Returns the figures that GET /metrics shows."""

    async def set_draining(self, draining: bool, *, force: bool = False) -> m.DrainInfo:
        """Begins or ends a drain, as POST /v1/drain, /v1/drain/force and /v1/undrain ask."""

    def session_opened(self, session: ServerSession) -> None:
        """A consumer proved itself."""

    def session_closed(self, session: ServerSession, ended: Ended) -> None:
        """Called once for each opened session."""

    async def handle(self, session: ServerSession, request: Any) -> msgspec.Struct:
        """Carries a ConsumerRequest out; raises RequestRefusedError to refuse it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What TLS has told of a browser.

    Attributes:
        is_proved: it has shown a certificate with a role that may read.
        why: it may not, where the cluster has certificates.
    """

    is_proved: bool = False
    why: str = ""


class Page(Protocol):
    """The page for browsers (infiniswap.ui)."""

    def make_link(self) -> tuple[str, int]:
        """A link for one browser, and for how many seconds it is good."""

    async def moved(self, request: web.Request) -> web.StreamResponse:
        """Answers GET /ui."""

    async def file(self, request: web.Request) -> web.StreamResponse:
        """Answers GET /ui/NAME."""

    async def live(
        self, request: web.Request, admitted: Admitted, signed_in: Callable[[], None]
    ) -> web.StreamResponse:
        """Serves the WebSocket /ui/live; calls `signed_in` once the browser has signed in."""
