# SPDX-License-Identifier: Apache-2.0
"""What is left to a host whose certificate no longer counts, while its connections are open."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from support.donors.certificates import DAY, Authority, client_with
from support.donors.certified_world import donor, reload
from support.donors.donor_world import (
    IDENTITY,
    Handler,
    World,
    hello,
    say,
    until,
)

from infiniswap.control import admission
from infiniswap.control import messages as m
from infiniswap.control.channel import Ended
from infiniswap.control.client import ClientConfig, Identity, Session, connect
from infiniswap.control.roles import Role
from infiniswap.donor import credentials as donor_credentials
from infiniswap.donor.authority import Period
from infiniswap.errors import WrongCertificateError
from infiniswap.secret import CertificateFiles

OTHER = Identity("00000000-0000-0000-0000-00000000000b", "swap1", "consumer")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def leaving(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "leaving")


@pytest.fixture
def trusting(authority: Authority, leaving: Authority) -> CertificateFiles:
    """Of a donor that still trusts both authorities."""
    files = authority.files("donor1", [Role.DONOR])
    files.ca.write_bytes(authority.pair.certificate + leaving.pair.certificate)
    return files


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_credentials, "LOOK_S", 0.02)


def believing(files: CertificateFiles, authority: Authority) -> ClientConfig:
    """A client that shows these, and trusts that authority as well."""
    files.ca.write_bytes(files.ca.read_bytes() + authority.pair.certificate)
    return client_with(files)


def soon() -> Period:
    now = datetime.datetime.now(datetime.UTC)
    return Period(now - DAY, now + datetime.timedelta(seconds=2))


async def leave_out(w: World, files: CertificateFiles, authority: Authority) -> None:
    """From now on the donor trusts that authority alone."""
    files.ca.write_bytes(authority.pair.certificate)
    await reload(w)


def is_refused(ended: Ended) -> bool:
    return ended.by_peer and ended.reason == m.GOODBYE_CERTIFICATE


async def lending(w: World, config: ClientConfig, identity: Identity = IDENTITY) -> Session:
    """A session with one slab."""
    session = await connect(w.address, identity, config, Handler())
    granted = await session.lease(2)
    await session.map(granted.lease, 0)
    return session


# ------------------------------------------------------------------- a removed authority


async def test_a_session_ends_with_the_authority_of_its_certificate(
    authority: Authority, leaving: Authority, trusting: CertificateFiles
) -> None:
    stays = client_with(authority.files("host1", [Role.CONSUMER]))
    goes = believing(leaving.files("host2", [Role.CONSUMER]), authority)
    async with donor(authority, files=trusting) as w:
        async with await lending(w, stays) as one, await lending(w, goes, OTHER) as two:
            await reload(w)
            assert (one.ended, two.ended) == (None, None)
            await leave_out(w, trusting, authority)
            assert is_refused(await two.wait_ended())
            await one.memory()
        with pytest.raises(WrongCertificateError, match="another authority has signed it"):
            await connect(w.address, OTHER, goes, Handler())
        assert w.store.stats()["leases"] == 2
        await until(lambda: w.store.stats()["leases"] == 0)  # its time to come back is over


async def test_a_device_with_another_certificate_comes_back_with_its_slabs(
    authority: Authority, leaving: Authority, trusting: CertificateFiles
) -> None:
    goes = believing(leaving.files("host2", [Role.CONSUMER]), authority)
    async with donor(authority, files=trusting, daemon__lease_grace_s=60) as w:
        async with await connect(w.address, IDENTITY, goes, Handler()) as session:
            granted = await session.lease(2)
            await session.map(granted.lease, 0)
            await leave_out(w, trusting, authority)
            await session.wait_ended()
        renewed = client_with(authority.files("host2", [Role.CONSUMER]))
        async with await connect(w.address, IDENTITY, renewed, Handler()) as again:
            back = await again.renew(granted.lease, granted.reclaim, granted.epoch)
            assert [slot.slab for slot in back.slots] == [0]


@contextlib.asynccontextmanager
async def kept_connection(
    w: World, config: ClientConfig
) -> AsyncIterator[Callable[[str, str], aiohttp.client._RequestContextManager]]:
    """Requests over one connection, which is open already; TLS does not begin again."""
    assert config.credentials is not None
    begun = []
    trace = aiohttp.TraceConfig()

    async def begins(*_: object) -> None:
        begun.append(True)

    trace.on_connection_create_start.append(begins)
    connector = aiohttp.TCPConnector(ssl=config.credentials.client, limit=1)
    async with aiohttp.ClientSession(connector=connector, trace_configs=[trace]) as http:
        async with http.get(f"https://{w.address}{m.VERSION_PATH}") as answer:
            await answer.read()
        yield lambda method, path: http.request(method, f"https://{w.address}{path}")
        assert len(begun) == 1


@pytest.mark.parametrize("ask", [("GET", m.STATUS_PATH), ("POST", m.DRAIN_PATH)])
async def test_a_connection_that_was_open_before_gets_no_answer(
    authority: Authority, leaving: Authority, trusting: CertificateFiles, ask: tuple[str, str]
) -> None:
    goes = believing(leaving.files("host2", Role), authority)
    async with donor(authority, files=trusting) as w, kept_connection(w, goes) as request:
        async with request("GET", m.STATUS_PATH) as answer:
            assert answer.status == 200
            await answer.read()
        await leave_out(w, trusting, authority)
        async with request(*ask) as answer:
            assert answer.status == 403
            assert "no longer trusts the authority" in (await answer.json())["error"]
        assert not w.donor.service.drain.is_active


async def test_a_session_on_a_connection_that_was_open_before_is_refused(
    authority: Authority, leaving: Authority, trusting: CertificateFiles
) -> None:
    goes = believing(leaving.files("host2", Role), authority)
    assert goes.credentials is not None
    connector = aiohttp.TCPConnector(ssl=goes.credentials.client, limit=1)
    async with (
        donor(authority, files=trusting) as w,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        url = f"https://{w.address}{m.SESSION_PATH}"
        async with http.ws_connect(url, protocols=(m.SUBPROTOCOL,)) as ws:
            await leave_out(w, trusting, authority)
            answer = await say(ws, hello(nonce=""))
            assert isinstance(answer, m.Goodbye)
            assert answer.reason == m.GOODBYE_CERTIFICATE
        assert not w.donor.server.sessions


# --------------------------------------------------------------------------- out of date


@pytest.mark.usefixtures("quick_looks")
async def test_an_open_session_outlives_its_certificate_for_a_while(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = client_with(authority.files("host1", [Role.CONSUMER], soon()))
    async with donor(authority, daemon__lease_grace_s=60) as w, await lending(w, config) as session:
        (open_,) = w.donor.server.sessions
        await until(lambda: open_.expired_s is not None)
        await session.memory()
        monkeypatch.setattr(admission, "OVERDUE_S", 0.1)
        ended = await session.wait_ended()
        assert is_refused(ended)
        assert "the certificate of host1 has expired" in ended.detail
        with pytest.raises(WrongCertificateError, match="has expired"):
            await connect(w.address, IDENTITY, config, Handler())
        assert w.donor.service.table.leases()


@pytest.mark.usefixtures("quick_looks")
async def test_no_session_ends_while_the_donors_own_certificate_is_out_of_date(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could come back, and perhaps the donor's clock is wrong."""
    monkeypatch.setattr(admission, "OVERDUE_S", 0.0)
    config = client_with(authority.files("host1", [Role.CONSUMER], soon()))
    files = authority.files("donor1", [Role.DONOR], soon())
    async with donor(authority, files=files) as w, await lending(w, config) as session:
        await until(
            lambda: any("has expired" in each for each in w.donor.service.degraded["credentials"])
        )
        await asyncio.sleep(0.2)
        await session.memory()
        authority.renew(files, "donor1", [Role.DONOR])
        assert is_refused(await session.wait_ended())


async def test_a_request_gets_no_such_time(authority: Authority) -> None:
    config = client_with(authority.files("host1", Role, soon()))
    async with donor(authority) as w, kept_connection(w, config) as request:
        while True:
            async with request("GET", m.STATUS_PATH) as answer:
                if answer.status != 200:
                    break
                await answer.read()
            await asyncio.sleep(0.1)
        assert answer.status == 403
