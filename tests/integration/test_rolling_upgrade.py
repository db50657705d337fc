# SPDX-License-Identifier: Apache-2.0
"""Daemons and devices of different versions: each speaks its own protocol version and the previous,
from version 2 on. Version 1 had no TLS: it is refused, and told so.

Sessions are kept as text (tests/recorded/): today's donor must understand that consumer, today's
consumer that donor. The formulas of proofs and keys stand here once more, apart from the code.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.donors.donor_world import (
    IDENTITY,
    KEYS,
    SECRET,
    WAIT_S,
    Handler,
    World,
    client_config,
    raw,
    refusal,
    until,
    world,
)
from support.donors.hostile_donor import hostile_tls

from infiniswap.control import auth
from infiniswap.control import messages as m
from infiniswap.control.client import connect
from infiniswap.control.tls import peer_digest
from infiniswap.errors import ProtocolMismatchError
from infiniswap.units import HostPort

RECORDED = Path(__file__).parent.parent / "recorded"
VERSIONS = [version for version in (max(m.VERSIONS), max(m.VERSIONS) - 1) if version >= 2]
"""Our own and the previous."""

Json = dict[str, Any]


def session_of(version: int) -> list[tuple[str, Json]]:
    """Who said what: ">" is the consumer."""
    lines = (RECORDED / f"control-v{version}.txt").read_text(encoding="utf-8").splitlines()
    return [(line[0], json.loads(line[2:])) for line in lines if line and line[0] in "<>"]


def key_v2(purpose: str) -> bytes:
    """HKDF-SHA256 with an empty salt, by hand."""
    key = hmac.digest(bytes(32), bytes.fromhex(SECRET), "sha256")
    return hmac.digest(key, f"infiniswap v2 {purpose}".encode() + b"\1", "sha256")


def mac_v2(key: bytes, digest: str, role: str, *parts: str) -> str:
    """A proof under a certificate of that digest, by hand."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (role.encode(), bytes.fromhex(digest), *(part.encode() for part in parts)):
        mac.update(len(part).to_bytes(4, "big") + part)
    return mac.hexdigest()


def proof_v2(role: str, version: int, hello: Json, challenge: Json, digest: str) -> str:
    """The proof of a session, by hand."""
    return mac_v2(
        key_v2("session"),
        digest,
        f"infiniswap control {role}",
        str(version),
        ",".join(map(str, hello["versions"])),
        ",".join(map(str, challenge["versions"])),
        hello["device_id"],
        hello["nonce"],
        challenge["nonce"],
    )


PROOFS: dict[int, Callable[[str, int, Json, Json, str], str]] = {2: proof_v2}


def digest_of(version: int) -> str:
    """Of the certificate that the recorded donor had."""
    text = (RECORDED / f"control-v{version}.txt").read_text(encoding="utf-8")
    found = re.search(r"certificate: ([0-9a-f]{64})", text)
    assert found
    return found[1]


def test_every_version_that_must_be_spoken_is_and_has_its_recording() -> None:
    assert VERSIONS
    for version in VERSIONS:
        assert version in m.VERSIONS, f"version {version} is the previous one: speak it"
        assert (RECORDED / f"control-v{version}.txt").exists(), "record a session of it"
        assert version in PROOFS


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_proofs_fit_the_formula(version: int) -> None:
    said = session_of(version)
    hello, challenge, proof, welcome = (frame for _, frame in said[:4])
    formula, digest = PROOFS[version], digest_of(version)
    assert welcome["proof"] == formula("donor", version, hello, challenge, digest)
    assert proof["proof"] == formula("consumer", version, hello, challenge, digest)
    assert (key_v2("session"), key_v2("operator")) == (KEYS.session, KEYS.operator)
    transcript = auth.Transcript(
        bytes.fromhex(digest),
        version,
        tuple(hello["versions"]),
        tuple(challenge["versions"]),
        hello["device_id"],
        hello["nonce"],
        challenge["nonce"],
    )
    assert welcome["proof"] == auth.donor_proof(KEYS.session, transcript)
    assert proof["proof"] == auth.consumer_proof(KEYS.session, transcript)


def test_the_header_of_authenticated_requests() -> None:
    asked = ("GET", "/v1/status", "0" * 64)
    request = auth.HttpRequest(b"\x11" * 32, *asked)
    proof = mac_v2(KEYS.session, "11" * 32, "infiniswap control http", *asked)
    header = f"Infiniswap {'0' * 64}:{proof}"
    assert auth.http_authorization(KEYS.session, request) == header
    proof = mac_v2(KEYS.session, "11" * 32, "infiniswap control http donor", *asked)
    assert auth.http_donor_proof(KEYS.session, request) == proof
    assert (m.SESSION_PATH, m.SUBPROTOCOL) == ("/v1/session", "infiniswap")
    assert (m.VERSION_PATH, m.NONCE_PATH) == ("/v1/version", "/v1/nonce")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_frame_is_still_understood(version: int) -> None:
    for who, frame in session_of(version):
        decode = m.decode_to_donor if who == ">" else m.decode_to_consumer
        understood = json.loads(m.encode(decode(json.dumps(frame))))
        # What it said is all there; a newer program may add fields, which older ones pass over.
        assert {**understood, **frame} == understood
        decode(json.dumps({**frame, "of_a_newer_version": [1, {"x": None}]}))


# ------------------------------------------------------------------ an older consumer

RANDOM = re.compile(r"nonce|proof|donor_id|incarnation|ticket|reclaim|software|detail|_share")


def same(live: Json, recorded: Json) -> None:
    """The live frame says all that the recorded one did, in the same types."""
    for key, value in recorded.items():
        assert key in live, f"{recorded['type']}.{key} is gone"
        assert type(live[key]) is type(value), f"{recorded['type']}.{key} has changed its type"
        if not RANDOM.search(key):
            assert live[key] == value, f"{recorded['type']}.{key}"


async def hear(ws: aiohttp.ClientWebSocketResponse) -> Json:
    while True:
        frame: Json = json.loads(await ws.receive_str())
        if frame["type"] != "ping":
            return frame


def provoke(w: World, frame: Json, background: list[asyncio.Task[Any]]) -> None:
    """Makes the donor say what the recorded one did of its own accord."""
    service = w.donor.service
    match frame["type"]:
        case "activity":
            work: Any = w.donor.server.sessions[0].activity(frame["lease"], WAIT_S)
        case "evict":
            work = service.lent.evict(frame["lease"], frame["slot"], frame["deadline_ms"])
        case "drain":
            # The notice alone: a drain would also take the slabs back, which was not recorded.
            work = service.sessions.tell_draining(frame["draining"])
        case _:
            return
    background.append(asyncio.create_task(work))


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_recorded_consumer_is_served(version: int, secret_file: Path) -> None:
    background: list[asyncio.Task[Any]] = []
    hello: Json = {}
    challenge: Json = {}
    reclaim = ""
    async with world(cluster__secret_file=secret_file, daemon__name="donor1") as w, raw(w) as ws:
        await until(lambda: w.store.stats()["slabs_free"] == 2)  # as it was then
        formula, digest = PROOFS[version], peer_digest(ws).hex()
        for who, frame in session_of(version):
            if who == ">":
                say = dict(frame)
                if frame["type"] == "hello":
                    hello = frame
                elif frame["type"] == "auth":
                    say["proof"] = formula("consumer", version, hello, challenge, digest)
                elif "reclaim" in frame:
                    say["reclaim"] = reclaim
                await ws.send_str(json.dumps(say))
                continue
            provoke(w, frame, background)
            live = await hear(ws)
            if frame["type"] == "challenge":
                challenge = live
                assert live["version"] == version
                frame = {**frame, "versions": live["versions"]}
            elif frame["type"] == "welcome":
                assert live["proof"] == formula("donor", version, hello, challenge, digest)
                frame = {**frame, "data_port": live["data_port"]}
            elif frame["type"] == "memory_answer":
                frame = {**frame, "free_slabs": live["free_slabs"]}
            reclaim = live.get("reclaim", reclaim)
            same(live, frame)
        await asyncio.gather(*background)
        await until(lambda: not w.donor.server.sessions)
        assert w.donor.server.counters["protocol_errors"] == 0
        assert w.store.stats()["leases"] == 0


# --------------------------------------------------------------------- an older donor


class RecordedDonor:
    """Says what the recorded donor said, when the consumer says what the recorded one did."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._said = session_of(version)
        self._digest = hostile_tls().digest.hex()
        self.problem: BaseException | None = None
        self.finished = asyncio.Event()

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse(protocols=("infiniswap",))
        await ws.prepare(request)
        try:
            await self._play(ws)
        except BaseException as error:
            self.problem = error
            raise
        finally:
            self.finished.set()
        return ws

    async def _play(self, ws: web.WebSocketResponse) -> None:
        hello: Json = {}
        challenge = self._said[1][1]
        formula = PROOFS[self._version]
        number = 0
        for who, frame in self._said:
            if who == "<":
                say = dict(frame)
                if frame["type"] == "challenge":
                    assert self._version in hello["versions"]
                elif frame["type"] == "welcome":
                    say["proof"] = formula("donor", self._version, hello, challenge, self._digest)
                elif frame["type"] not in ("activity", "evict") and "id" in frame:
                    say["id"] = number
                await ws.send_str(json.dumps(say))
                continue
            if frame["type"] == "ping":
                self._said.remove(("<", {"type": "pong", "id": 0}))
                continue
            live = await self._hear(ws)
            assert live["type"] == frame["type"]
            if frame["type"] == "hello":
                hello = live
            elif frame["type"] == "auth":
                expected = formula("consumer", self._version, hello, challenge, self._digest)
                assert live["proof"] == expected
            if frame["type"] in ("activity_answer", "evict_done"):
                assert live["id"] == frame["id"]
            elif "id" in live:
                number = live["id"]
            known = {"id", "versions", "device_id", "device_name", "host_name", "nonce", "proof"}
            same(live, {key: value for key, value in frame.items() if key not in known})

    async def _hear(self, ws: web.WebSocketResponse) -> Json:
        while True:
            frame: Json = json.loads(await ws.receive_str())
            if frame["type"] == "ping":
                await ws.send_str(json.dumps({"type": "pong", "id": frame["id"]}))
            elif frame["type"] != "pong":
                return frame


@asynccontextmanager
async def recorded_donor(version: int) -> AsyncIterator[tuple[RecordedDonor, HostPort]]:
    donor = RecordedDonor(version)
    server = web.Server(donor.serve)
    listener = await asyncio.get_running_loop().create_server(
        server, "127.0.0.1", 0, ssl=hostile_tls().context
    )
    try:
        yield donor, HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
    finally:
        listener.close()
        await server.shutdown(1.0)


def frames(said: Iterable[tuple[str, Json]], kind: str) -> list[Json]:
    return [frame for _, frame in said if frame["type"] == kind]


@pytest.mark.parametrize("use", [None, m.LeaseUse(job="prep.py", user="ada", uid=1000)])
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_recorded_donor_is_used(version: int, use: m.LeaseUse | None) -> None:
    """Also by a device that says what its lease is for, and asks for tickets with it, of which that
    donor knows nothing."""
    said = session_of(version)
    handler = Handler()
    async with recorded_donor(version) as (donor, address), asyncio.timeout(WAIT_S):
        config = client_config(connect_s=WAIT_S, request_s=WAIT_S, renew_s=WAIT_S)
        session = await connect(address, replace(IDENTITY, use=use), config, handler)
        assert session.welcome.version == version
        assert session.welcome.incarnation == frames(said, "welcome")[0]["incarnation"]
        await session.memory()
        lease = await session.lease(4, 2)
        given = [frame["tickets"] for frame in frames(said, "tickets_answer")]
        assert await session.tickets(lease.lease, 0, 2) == given[0]
        first = await session.map(lease.lease, 17)
        assert (first.slot, first.generation) == (0, 1)
        assert await refusal(session.map(lease.lease + 7, 17)) == m.REFUSED_UNKNOWN_LEASE
        renewed = await session.renew(lease.lease, lease.reclaim, lease.epoch)
        assert renewed.slots == [m.SlotInfo(0, 1, 17)]
        assert await session.tickets(lease.lease, 0, 1) == given[1]
        assert [await session.lasting_ticket(lease.lease, 4)] == given[2]
        # It asks for the activity, evicts, drains and does so no more.
        await until(lambda: handler.drains == [True, False])
        assert handler.evicted == [(1, 0, 1)]
        second = await session.map(lease.lease, 18)
        await session.unmap(lease.lease, second.slot, second.generation)
        await session.release(lease.lease)
        await session.close()
        await donor.finished.wait()
    assert donor.problem is None


async def test_the_highest_common_version_is_chosen() -> None:
    async with world() as w, raw(w) as ws:
        offered = [*range(max(m.VERSIONS) + 3)]
        await ws.send_str(json.dumps({**session_of(2)[0][1], "versions": offered}))
        assert (await hear(ws))["version"] == max(m.VERSIONS)


# --------------------------------------------------------------------------- version 1


@pytest.mark.parametrize(
    "said", [b"GET /v1/session HTTP/1.1\r\nHost: x\r\n\r\n", b"\0", b"SSH-2.0"]
)
async def test_who_does_not_begin_tls_is_told_so(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(w.address.host, w.address.port)
        writer.write(said)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"this port speaks TLS" in answer
        assert b"protocol 2" in answer
        assert w.donor.server.counters["connections_plain"] == 1
        assert "that does not begin TLS: if it is an Infiniswap" in caplog.text
        assert "from 127.0.0.1 " in caplog.text


async def test_a_donor_of_version_1_is_named_as_too_old() -> None:
    """It answers TLS as any plain HTTP server does."""
    server = web.Server(lambda request: web.Response())  # type: ignore[arg-type,return-value]
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    address = HostPort("127.0.0.1", listener.sockets[0].getsockname()[1])
    try:
        with pytest.raises(ProtocolMismatchError, match="protocol version 1") as caught:
            await connect(address, IDENTITY, client_config(), Handler())
        assert "Install this release" in caught.value.mend
    finally:
        listener.close()
        await server.shutdown(1.0)
