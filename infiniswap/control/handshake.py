# SPDX-License-Identifier: Apache-2.0
"""The donor's end of a handshake: who may begin one, and what both ends prove to each other, unless
their certificates have done that.

Each handshake is bounded in time; infiniswap.control.places bounds how many there are. A peer that
has flooded a session is refused for a while.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from typing import Any, Final

from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.admission import Admission
from infiniswap.control.channel import LOST, WebSocket, receive, send
from infiniswap.control.peer import Caller
from infiniswap.control.roles import Role
from infiniswap.control.service import ServerConfig, ServerSession
from infiniswap.errors import ProtocolMismatchError

log = logging.getLogger(__name__)


BORROWERS: Final = frozenset({Role.CONSUMER})
"""Who may open a session."""


class PeerLog:
    """Logs what peers do, at most once a second: they could fill the disk.

    Args:
        counters: gets `log_lines_suppressed`.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._logged_s = float("-inf")

    def __call__(self, text: str, *args: object) -> None:
        """Logs it as a warning, or counts it in `log_lines_suppressed`."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= 1.0:
            self._logged_s = now_s
            log.warning(text, *args)
        else:
            self._counters["log_lines_suppressed"] += 1


class Handshakes:
    """The handshakes of one server.

    Args:
        config: bounds and keys.
        admission: of those with certificates.
        counters: gets `sessions_refused`, `secret_errors`, `certificates_refused`,
            `protocol_errors` and `handshakes_ended_REASON`.
        log_peer: logs what peers do.
    """

    def __init__(
        self,
        config: ServerConfig,
        admission: Admission,
        counters: Counter[str],
        log_peer: PeerLog,
    ) -> None:
        self._config = config
        self._admission = admission
        self._counters = counters
        self._log = log_peer
        self._number = 0  # of the last session
        self._floods_s: dict[str, float] = {}  # by peer: kept out until then

    def keep_out(self, peer: str) -> None:
        """Refuses a peer that has flooded a session, for a while."""
        now_s = asyncio.get_running_loop().time()
        self._floods_s = {p: until_s for p, until_s in self._floods_s.items() if until_s > now_s}
        self._floods_s[peer] = now_s + self._config.flood_s

    async def perform(
        self, ws: WebSocket, caller: Caller, sessions: int, due_s: float, *, is_stopping: bool
    ) -> ServerSession | None:
        """The session of a peer that has proved itself; None: it was turned away, and knows why.

        Args:
            ws: the connection.
            caller: the peer.
            sessions: how many are open.
            due_s: until when the peer has to prove itself, by the loop's clock; at most `proof_s`.
            is_stopping: whether the server takes no more.
        """
        if sessions >= self._config.sessions_max:
            await self._turn_away(ws, m.GOODBYE_BUSY, "too many sessions", caller)
            return None
        if self._is_kept_out(caller.peer):
            detail = "a session of this host has flooded the donor: try again later"
            await self._turn_away(ws, m.GOODBYE_FLOOD, detail, caller)
            return None
        if is_stopping:
            await self._turn_away(ws, m.GOODBYE_SHUTDOWN, "", caller)
            return None
        try:
            limit_s = asyncio.get_running_loop().time() + self._config.proof_s
            async with asyncio.timeout_at(min(due_s, limit_s)):
                return await self._handshake(ws, caller)
        except TimeoutError:
            await self._turn_away(ws, m.GOODBYE_SILENCE, "the handshake took too long", caller)
        except ProtocolMismatchError as error:
            self._counters["protocol_errors"] += 1
            await self._turn_away(ws, m.GOODBYE_PROTOCOL, error.what, caller)
        return None

    def _is_kept_out(self, peer: str) -> bool:
        return self._floods_s.get(peer, float("-inf")) > asyncio.get_running_loop().time()

    async def _handshake(self, ws: WebSocket, caller: Caller) -> ServerSession | None:
        frame = await receive(ws, m.HELLO_BYTES_MAX)
        if frame is None:
            return None
        hello = m.decode_to_donor(frame)
        if not isinstance(hello, m.Hello):
            raise ProtocolMismatchError("the first message is not a hello")
        version = m.choose_version(m.VERSIONS, hello.versions)
        if version is None:
            detail = f"this donor speaks protocol {_list(m.VERSIONS)}, not {_list(hello.versions)}"
            await self._turn_away(ws, m.GOODBYE_VERSION, detail, caller)
            return None
        if self._config.tls.cluster:
            return await self._certified(ws, hello, version, caller)
        return await self._challenged(ws, hello, version, caller)

    async def _certified(
        self, ws: WebSocket, hello: m.Hello, version: int, caller: Caller
    ) -> ServerSession | None:
        """TLS has verified the certificate: what it says decides."""
        try:
            proved = self._admission.admit(ws, BORROWERS, time.time())
        except ValueError as error:
            self._counters["certificates_refused"] += 1
            await self._turn_away(ws, m.GOODBYE_CERTIFICATE, str(error), caller)
            return None
        self._number += 1
        return ServerSession(self._number, hello, caller, version, "", proved)

    async def _challenged(
        self, ws: WebSocket, hello: m.Hello, version: int, caller: Caller
    ) -> ServerSession | None:
        if not hello.nonce:
            detail = (
                "this donor uses a cluster secret, and no certificates of a cluster's authority"
            )
            await self._turn_away(ws, m.GOODBYE_SECRET, detail, caller)
            return None
        nonce = secrets.token_hex(auth.NONCE_BYTES)
        transcript = auth.Transcript(
            digest=self._config.tls.digest,
            version=version,
            versions_consumer=tuple(hello.versions),
            versions_donor=m.VERSIONS,
            device_id=hello.device_id,
            nonce_consumer=hello.nonce,
            nonce_donor=nonce,
        )
        challenge = m.Challenge(version=version, versions=list(m.VERSIONS), nonce=nonce)
        if not await send(ws, challenge, self._config.limits.send_s):
            return None
        frame = await receive(ws, m.HELLO_BYTES_MAX)
        if frame is None:
            return None
        answer = m.decode_to_donor(frame)
        if isinstance(answer, m.Goodbye):
            self._counters[f"handshakes_ended_{known(answer.reason)}"] += 1
            self._log("%s broke the handshake off: %s", caller, _said(answer))
            return None
        if not isinstance(answer, m.Auth):
            raise ProtocolMismatchError("the second message is not an auth")
        for keys in self._config.keys.accepted():
            if auth.proofs_equal(answer.proof, auth.consumer_proof(keys.session, transcript)):
                break
        else:
            self._counters["secret_errors"] += 1
            detail = "the cluster secrets differ"
            await self._turn_away(ws, m.GOODBYE_SECRET, detail, caller)
            return None
        self._config.keys.used(keys, f"device {hello.device_name} on {hello.host_name}")
        self._number += 1
        proof = auth.donor_proof(keys.session, transcript)
        return ServerSession(self._number, hello, caller, version, proof)

    async def _turn_away(self, ws: WebSocket, reason: str, detail: str, caller: Caller) -> None:
        self._counters["sessions_refused"] += 1
        self._log("refused a session from %s: %s", caller, detail or reason)
        goodbye = m.Goodbye(reason=reason, detail=detail[:512])
        await send(ws, goodbye, self._config.limits.send_s)


def _list(versions: Any) -> str:
    return ", ".join(map(str, versions))


def known(reason: str) -> str:
    """A reason of a goodbye that may name a counter: a peer may send any text, and one counter for
    each would be memory without end."""
    return reason if reason in (*m.GOODBYE_REASONS, LOST) else "other"


def _said(goodbye: m.Goodbye) -> str:
    # repr: a peer's text must not forge log lines.
    return f"{goodbye.reason!r} {goodbye.detail!r}"
