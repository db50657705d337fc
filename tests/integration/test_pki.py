# SPDX-License-Identifier: Apache-2.0
"""Certificates of a cluster's authority on both sides, in place of a cluster secret."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from support.donors.certificates import (
    BOTH,
    CLUSTER,
    DAY,
    EXPIRED,
    FUTURE,
    NOW,
    Authority,
    client_with,
)
from support.donors.certified_world import donor, reload
from support.donors.donor_world import (
    IDENTITY,
    SECRET,
    WAIT_S,
    Handler,
    World,
    client_config,
    until,
    world,
)

from infiniswap.cli.donor import _wait_empty
from infiniswap.control import messages as m
from infiniswap.control import pki
from infiniswap.control.client import (
    ClientConfig,
    Identity,
    connect,
    fetch_status,
    fetch_version,
    set_draining,
)
from infiniswap.control.figures import METRICS_PATH
from infiniswap.control.mutual import mutual_context
from infiniswap.control.pki import load
from infiniswap.control.roles import Role
from infiniswap.donor import credentials as donor_credentials
from infiniswap.donor.authority import Period
from infiniswap.errors import (
    ConfigError,
    InfiniswapError,
    NoDonorError,
    ProtocolMismatchError,
    WrongCertificateError,
)
from infiniswap.secret import CertificateFiles, write_secret
from infiniswap.units import HostPort


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def a_session(address: HostPort, config: ClientConfig) -> object:
    async with await connect(address, IDENTITY, config, Handler()) as session:
        return await session.memory()


async def a_status(address: HostPort, config: ClientConfig) -> object:
    return await fetch_status(address, config)


async def a_drain(address: HostPort, config: ClientConfig) -> object:
    return await set_draining(address, config, True)


async def metrics(address: HostPort, config: ClientConfig, **headers: str) -> str:
    """As Prometheus asks: `ssl` alone, of the same files."""
    assert config.credentials is not None
    connector = aiohttp.TCPConnector(ssl=config.credentials.client, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get(f"https://{address}{METRICS_PATH}", headers=headers) as answer,
    ):
        if answer.status == 403:
            raise WrongCertificateError((await answer.json())["error"])
        assert answer.status == 200
        return await answer.text()


Ask = Callable[[HostPort, ClientConfig], Awaitable[object]]
ASK: dict[str, Ask] = {"session": a_session, "status": a_status, "drain": a_drain}
EVERY: dict[str, Ask] = {**ASK, "metrics": metrics}


def got_nothing(w: World) -> None:
    assert not w.donor.server.sessions
    assert w.donor.server.counters["sessions_opened"] == 0
    assert w.store.stats()["leases"] == 0
    assert not w.donor.service.drain.is_active


# ------------------------------------------------------------------------------- roles


async def test_a_session_lends_memory(authority: Authority) -> None:
    consumer = client_with(authority.files("host1", [Role.CONSUMER]))
    async with donor(authority) as w:
        async with await connect(w.address, IDENTITY, consumer, Handler()) as session:
            lease = await session.lease(2)
            mapped = await session.map(lease.lease, 0)
            assert mapped.slot == 0
            assert len(await session.tickets(lease.lease, 0, 1)) == 1
            (open_,) = w.donor.server.sessions
            assert open_.consumer == "host1"
            assert open_.proof == session.welcome.proof == ""
        assert (await fetch_version(w.address, consumer)).versions == [2]


ALLOWED: dict[Role, set[str]] = {
    Role.CONSUMER: {"session", "status", "metrics"},
    Role.OPERATOR: {"status", "metrics", "drain"},
    Role.DONOR: set(),
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", EVERY)
async def test_a_role_may_do_what_it_is_for(authority: Authority, role: Role, name: str) -> None:
    config = client_with(authority.files("host1", [role]))
    async with donor(authority) as w:
        if name in ALLOWED[role]:
            assert await EVERY[name](w.address, config)
            assert w.donor.service.drain.is_active == (name == "drain")
            return
        with pytest.raises(WrongCertificateError) as caught:
            await EVERY[name](w.address, config)
        needed = {"session": "consumer", "drain": "operator"}.get(name, "consumer or operator")
        assert f"infiniswap://{CLUSTER}/{role}/host1" in str(caught.value)
        assert f"takes the role {needed}" in str(caught.value)
        assert w.donor.server.counters["certificates_refused"] == 1
        got_nothing(w)


async def test_one_certificate_may_have_several_roles(authority: Authority) -> None:
    config = client_with(authority.files("host1", Role))
    async with donor(authority) as w:
        for ask in EVERY.values():
            assert await ask(w.address, config)


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_host_that_is_no_donor_gets_no_request(authority: Authority, ask: Ask) -> None:
    """It has a certificate of the same authority, and listens where a donor should."""
    shows = load(authority.files("thief", BOTH), CLUSTER, Role.DONOR)
    names = authority.files("thief", [Role.CONSUMER, Role.OPERATOR])
    async with listening(shows, names) as thief:
        with pytest.raises(WrongCertificateError, match="no donor of this cluster") as caught:
            await ask(thief.address, client_with(authority.files("host1", Role)))
        assert f"infiniswap://{CLUSTER}/consumer/thief" in str(caught.value)
        assert not thief.asked


class Listener:
    """Serves TLS with somebody's certificate, and keeps what it was asked."""

    def __init__(self) -> None:
        self.address = HostPort("127.0.0.1", 0)
        self.asked: list[str] = []


@contextlib.asynccontextmanager
async def listening(shows: pki.Credentials, names: CertificateFiles) -> AsyncIterator[Listener]:
    context = mutual_context(
        server=True,
        authority=names.ca.read_text(),
        shown=names.certificate.read_bytes() + names.key.read_bytes(),
    )
    assert shows.server is not None
    made = Listener()

    async def answer(request: web.Request) -> web.Response:
        made.asked.append(request.path)
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        made.address = HostPort("127.0.0.1", runner.addresses[0][1])
        yield made
    finally:
        await runner.cleanup()


# ----------------------------------------------------------------- what is not accepted


@pytest.mark.parametrize("ask", EVERY.values(), ids=EVERY)
async def test_a_consumer_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path, ask: Ask
) -> None:
    """It trusts the donor, and a relay without the authority's key is such a host."""
    other = Authority(tmp_path / "other")
    config = client_with(other.files("relay", Role))
    assert config.credentials is not None
    trusting = client_with(authority.files("host1", Role))
    assert trusting.credentials is not None
    files = other.files("relay", Role)
    files.ca.write_bytes(authority.pair.certificate)
    shown = files.certificate.read_bytes() + files.key.read_bytes()
    context = mutual_context(server=False, authority=files.ca.read_text(), shown=shown)
    config = dataclasses.replace(
        config, credentials=dataclasses.replace(config.credentials, client=context)
    )
    async with donor(authority) as w:
        with pytest.raises((WrongCertificateError, aiohttp.ClientError)) as caught:
            await ask(w.address, config)
        if ask is not metrics:
            assert "another authority has signed it" in str(caught.value)
            assert f"infiniswap://{CLUSTER}/consumer/relay" in str(caught.value)
        assert w.donor.server.counters["certificates_refused"] >= 1
        got_nothing(w)


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_donor_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path, ask: Ask
) -> None:
    other = Authority(tmp_path / "other")
    async with donor(other) as w:
        with pytest.raises(WrongCertificateError, match="not signed by the authority") as caught:
            await ask(w.address, client_with(authority.files("host1", Role)))
        assert f"infiniswap://{CLUSTER}/donor/donor1" in str(caught.value)
        got_nothing(w)


@pytest.mark.parametrize("ask", EVERY.values(), ids=EVERY)
async def test_a_consumer_of_another_cluster_is_refused(authority: Authority, ask: Ask) -> None:
    """The same authority has signed for both clusters."""
    config = client_with(authority.files("host1", Role, cluster="lab"), "lab")
    if config.credentials is not None:  # it takes the donor for one of its own cluster
        subject = dataclasses.replace(config.credentials.subject, cluster=CLUSTER)
        credentials = dataclasses.replace(config.credentials, subject=subject)
        config = dataclasses.replace(config, credentials=credentials)
    async with donor(authority) as w:
        with pytest.raises(WrongCertificateError, match="for another cluster") as caught:
            await ask(w.address, config)
        assert "infiniswap://lab/" in str(caught.value)
        got_nothing(w)


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_donor_of_another_cluster_is_refused(authority: Authority, ask: Ask) -> None:
    config = client_with(authority.files("host1", Role, cluster="lab"), "lab")
    async with donor(authority) as w:
        with pytest.raises(WrongCertificateError, match="for another cluster") as caught:
            await ask(w.address, config)
        assert f"infiniswap://{CLUSTER}/donor/donor1" in str(caught.value)
        got_nothing(w)


TIMES = {
    "expired": (EXPIRED, "has expired"),
    "future": (FUTURE, "not valid yet"),
}


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_consumer_whose_certificate_is_out_of_date_is_told(
    authority: Authority, name: str, ask: Ask
) -> None:
    when, said = TIMES[name]
    config = client_with(authority.files("host1", Role, when))
    async with donor(authority) as w:
        with pytest.raises(WrongCertificateError, match=said) as caught:
            await ask(w.address, config)
        assert f"infiniswap://{CLUSTER}/consumer/host1" in str(caught.value)
        assert "correct the clocks" in caught.value.mend
        got_nothing(w)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_donor_whose_certificate_is_out_of_date_is_refused(
    authority: Authority, name: str, ask: Ask
) -> None:
    """It was good when the daemon started."""
    when, said = TIMES[name]
    files = authority.files("donor1", [Role.DONOR], when)
    shows = load(files, CLUSTER, Role.DONOR)
    assert shows.server is not None
    async with donor(authority) as w:
        w.donor.server.use_tls(shows.server)
        with pytest.raises(WrongCertificateError, match=said) as caught:
            await ask(w.address, client_with(authority.files("host1", Role)))
        assert f"infiniswap://{CLUSTER}/donor/donor1" in str(caught.value)
        got_nothing(w)


@pytest.mark.parametrize("when", [EXPIRED, FUTURE], ids=TIMES)
async def test_a_daemon_does_not_start_with_a_certificate_that_is_out_of_date(
    authority: Authority, when: Any
) -> None:
    files = authority.files("donor1", [Role.DONOR], when)
    with pytest.raises(ConfigError, match=f"infiniswap://{CLUSTER}/donor/donor1"):
        async with donor(authority, files=files):
            pass


# ------------------------------------------------------------------------- downgrades


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_consumer_with_a_secret_is_told_to_show_a_certificate(
    authority: Authority, ask: Ask
) -> None:
    async with donor(authority) as w:
        with pytest.raises(WrongCertificateError, match="asks for a certificate") as caught:
            await ask(w.address, client_config())
        assert "ca_file" in caught.value.mend
        assert w.donor.server.counters["certificates_refused"] == 1
        got_nothing(w)


@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
async def test_a_donor_with_a_secret_gets_nothing_of_a_consumer_with_a_certificate(
    authority: Authority, ask: Ask
) -> None:
    async with world() as w, asyncio.timeout(WAIT_S):
        with pytest.raises(WrongCertificateError, match="uses a cluster secret") as caught:
            await ask(w.address, client_with(authority.files("host1", Role)))
        assert "secret_file" in caught.value.mend
        got_nothing(w)


async def test_a_certificate_does_not_help_where_a_secret_is_asked_for(
    authority: Authority,
) -> None:
    """The donor keeps a certificate of the authority in place of its own, and has a secret."""
    shows = load(authority.files("donor1", [Role.DONOR]), CLUSTER, Role.DONOR)
    assert shows.server is not None
    async with world() as w, asyncio.timeout(WAIT_S):
        w.donor.server.use_tls(shows.server)
        config = client_with(authority.files("host1", Role))
        with pytest.raises(InfiniswapError, match="uses a cluster secret"):
            await a_session(w.address, config)
        for ask in (a_status, a_drain):
            with pytest.raises(InfiniswapError):
                await ask(w.address, config)
        got_nothing(w)


async def test_tls_1_2_is_refused(authority: Authority) -> None:
    config = client_with(authority.files("host1", Role))
    assert config.credentials is not None
    config.credentials.client.minimum_version = ssl.TLSVersion.TLSv1_2
    config.credentials.client.maximum_version = ssl.TLSVersion.TLSv1_2
    async with donor(authority) as w:
        with pytest.raises(ProtocolMismatchError, match=r"TLS 1\.3"):
            await a_status(w.address, config)
        got_nothing(w)


# ------------------------------------------------------------------------------ relay


@pytest.mark.parametrize("ask", EVERY.values(), ids=EVERY)
async def test_a_relay_of_another_authority_hears_nothing(
    authority: Authority, tmp_path: Path, ask: Ask
) -> None:
    """It was named as a donor. Neither end accepts what it can show."""
    files = Authority(tmp_path / "other").files("donor1", BOTH)
    files.ca.write_bytes(authority.pair.certificate)
    other = Authority(tmp_path / "third").files("donor1", [Role.DONOR])
    async with donor(authority) as w, listening(load(other, CLUSTER, Role.DONOR), files) as relay:
        with pytest.raises((WrongCertificateError, aiohttp.ClientError), match=r"signed|verify"):
            await ask(relay.address, client_with(authority.files("host1", Role)))
        assert not relay.asked
        got_nothing(w)


# ----------------------------------------------------------------------------- quotas


async def test_quotas_count_hosts_and_not_addresses(authority: Authority) -> None:
    """Two hosts have one address here. The one with too much gives a slab back to the other."""
    configs = [client_with(authority.files(name, [Role.CONSUMER])) for name in ("host1", "host2")]
    handlers = [Handler(), Handler()]
    async with donor(authority, daemon__pool="4M") as w, contextlib.AsyncExitStack() as stack:
        sessions = []
        for number, config in enumerate(configs):
            identity = Identity(f"00000000-0000-0000-0000-00000000000{number}", "swap0", "same")
            opened = await connect(w.address, identity, config, handlers[number])
            sessions.append(await stack.enter_async_context(opened))
        leases = [await session.lease(4) for session in sessions]
        for slab in range(4):
            await sessions[0].map(leases[0].lease, slab)
        await sessions[1].map(leases[1].lease, 0)
        assert len(handlers[0].evicted) == 1
        assert {lease.consumer for lease in w.donor.service.table.leases()} == {"host1", "host2"}


# ----------------------------------------------------------------------------- reload


async def shown_by(w: World, config: ClientConfig) -> bytes:
    """The certificate that the donor shows a new connection."""
    connection = config.connection(w.address)
    async with aiohttp.ClientSession(connector=connection) as http:
        await http.get(f"https://{w.address}{m.VERSION_PATH}")
        assert connection.transport is not None
        shown = connection.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return bytes(shown)


async def test_a_reload_shows_the_renewed_certificate_and_open_sessions_go_on(
    authority: Authority,
) -> None:
    files = authority.files("donor1", [Role.DONOR])
    consumer = client_with(authority.files("host1", [Role.CONSUMER]))
    async with donor(authority, files=files) as w:
        async with await connect(w.address, IDENTITY, consumer, Handler()) as session:
            before = await shown_by(w, consumer)
            authority.renew(files, "donor1", [Role.DONOR])
            assert await shown_by(w, consumer) == before
            await reload(w)
            assert await shown_by(w, consumer) != before
            await session.lease(1)
            assert session.ended is None
        assert not (await fetch_status(w.address, consumer)).degraded


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donor_credentials, "LOOK_S", 0.02)


@pytest.mark.usefixtures("quick_looks")
async def test_a_renewed_certificate_is_noticed_without_a_reload(authority: Authority) -> None:
    files = authority.files("donor1", [Role.DONOR])
    consumer = client_with(authority.files("host1", [Role.CONSUMER]))
    async with donor(authority, files=files) as w:
        before = await shown_by(w, consumer)
        authority.renew(files, "donor1", [Role.DONOR])
        while await shown_by(w, consumer) == before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


BROKEN: dict[str, Callable[[CertificateFiles, Authority], object]] = {
    "half a file": lambda f, a: f.certificate.write_bytes(f.certificate.read_bytes()[:300]),
    "another key": lambda f, a: f.key.write_bytes(a.files("x", Role).key.read_bytes()),
    "no file": lambda f, a: f.certificate.unlink(),
    "a readable key": lambda f, a: f.key.chmod(0o644),
    "another role": lambda f, a: a.renew(f, "donor1", [Role.CONSUMER]),
    "another cluster": lambda f, a: a.renew(f, "donor1", [Role.DONOR], cluster="lab"),
    "another authority": lambda f, a: Authority(a.directory / "y").renew(f, "donor1", [Role.DONOR]),
    "expired": lambda f, a: a.renew(f, "donor1", [Role.DONOR], EXPIRED),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_renewal_changes_nothing_and_is_told(
    authority: Authority, name: str
) -> None:
    files = authority.files("donor1", [Role.DONOR])
    consumer = client_with(authority.files("host1", [Role.CONSUMER]))
    async with donor(authority, files=files) as w:
        before = await shown_by(w, consumer)
        BROKEN[name](files, authority)
        await reload(w)
        assert await shown_by(w, consumer) == before
        (sentence,) = (await fetch_status(w.address, consumer)).degraded
        assert "the former certificate is still shown" in sentence
        authority.files("donor1", [Role.DONOR])
        await reload(w)
        assert await shown_by(w, consumer) != before
        assert not (await fetch_status(w.address, consumer)).degraded


async def test_the_status_says_when_little_of_its_life_is_left(authority: Authority) -> None:
    files = authority.files("donor1", [Role.DONOR], Period(NOW - 8 * DAY, NOW + 3 * DAY))
    consumer = client_with(authority.files("host1", [Role.CONSUMER]))
    async with donor(authority, files=files) as w:
        (sentence,) = (await fetch_status(w.address, consumer)).degraded
        assert "expires in 3 days" in sentence


async def test_the_mode_does_not_change_while_the_daemon_runs(
    authority: Authority, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    write_secret(secret, SECRET)
    consumer = client_with(authority.files("host1", [Role.CONSUMER]))
    async with donor(authority) as w:
        before = w.donor.service.config
        cluster = dataclasses.replace(
            before.cluster,
            secret_file=secret,
            ca_file=None,
            certificate_file=None,
            key_file=None,
        )
        wanted = dataclasses.replace(before, cluster=cluster)
        outcome = await w.donor.reloader.reload(lambda: wanted)
        assert "cluster.ca_file" in outcome.waiting
        assert "cluster.secret_file" in outcome.waiting
        with pytest.raises(WrongCertificateError):
            await fetch_status(w.address, client_config())
        await fetch_status(w.address, consumer)


# ---------------------------------------------------------------------- hostile peers


async def test_a_refused_peer_that_goes_on_talking_keeps_nothing(authority: Authority) -> None:
    """It has read the alert, and sends what it likes: the donor ends the connection soon."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with donor(authority) as w:
        reader, writer = await asyncio.open_connection(w.address.host, w.address.port, ssl=context)
        raw = writer.transport.get_extra_info("socket").dup()
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError), contextlib.closing(raw):
            for _ in range(10_000):
                await loop.sock_sendall(raw, bytes(65_536))
            pytest.fail("the donor has read 625 MiB of a peer that it had refused")
        with contextlib.suppress(OSError, ssl.SSLError):
            await reader.read()
        writer.transport.abort()
        await until(lambda: not w.donor.server._port._gate.places)


async def test_a_donor_that_says_too_little_is_an_error(authority: Authority) -> None:
    with pytest.raises(NoDonorError):
        await a_status(HostPort("127.0.0.1", 9), client_with(authority.files("host1", Role)))


# ------------------------------------------------------------------------------ names


async def test_a_donor_has_the_name_in_its_certificate_and_not_the_one_that_it_says(
    authority: Authority,
) -> None:
    config = client_with(authority.files("host1", Role))
    async with donor(authority, daemon__name="storage9") as w:
        assert (await fetch_status(w.address, config)).donor_name == "donor1"
        assert (await set_draining(w.address, config, False)).donor_name == "donor1"
        async with await connect(w.address, IDENTITY, config, Handler()) as session:
            assert session.welcome.donor_name == "donor1"


async def test_a_consumer_has_the_name_in_its_certificate_and_not_the_one_that_it_says(
    authority: Authority,
) -> None:
    config = client_with(authority.files("host1", Role))
    identity = dataclasses.replace(IDENTITY, host_name="storage9")
    async with (
        donor(authority) as w,
        await connect(w.address, identity, config, Handler()) as session,
    ):
        await session.lease(1)
        (lease,) = (await fetch_status(w.address, config)).leases
        assert (lease.host_name, lease.host_certified) == ("host1", True)
        assert "of host1 (" in str(w.donor.server.sessions[0])


async def test_a_drain_does_not_wait_for_another_donor_that_answers_there(
    authority: Authority,
) -> None:
    """It would say that a donor is empty which is not."""
    config = client_with(authority.files("host1", Role))
    async with donor(authority) as w:
        info = await set_draining(w.address, config, True)
        await _wait_empty(w.address, config, info)
        with pytest.raises(NoDonorError, match="another donor answers there now") as caught:
            await _wait_empty(w.address, config, msgspec.structs.replace(info, donor_name="donor2"))
        assert "donor1" in str(caught.value)
        assert "donor2" in caught.value.mend


async def test_a_reload_does_not_say_that_nothing_has_changed_when_a_certificate_has(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    files = authority.files("donor1", [Role.DONOR])
    async with donor(authority, files=files) as w:
        await reload(w)
        assert "reloaded: nothing has changed" in caplog.messages
        caplog.clear()
        authority.renew(files, "donor1", [Role.DONOR])
        await reload(w)
        files.key.unlink()
        await reload(w)
    said = [line for line in caplog.messages if line.startswith("reloaded")]
    assert said[0] == "reloaded: the files of certificates have changed"
    assert "cannot be used, so the former certificate is still shown" in said[1]
    assert len(said) == 2
