# SPDX-License-Identifier: Apache-2.0
"""Devices that find their donors, in a file that changes and on a real broker: real daemons, a real
engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.devices.cluster import SLAB, WAIT_S, Cluster, Device, run, until
from support.devices.copied import Copied
from support.donors.announcements import announcement, fresh, topic, withdrawn
from support.donors.broker import PATH, Broker
from support.donors.donor_world import KEYS

from infiniswap.config import load
from infiniswap.discovery import broker as mqtt
from infiniswap.discovery.announcement import (
    Announcement,
    MemoryTelemetry,
    encode,
    memory_topic,
)
from infiniswap.discovery.announcer import Announcer
from infiniswap.discovery.broker import BrokerError, connected
from infiniswap.discovery.directory import Directory
from infiniswap.discovery.listener import Listener
from infiniswap.keys import Keys, announcement_keys, derive
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_tool("nbdcopy")]

SIZE = 32 * MIB
SLABS = SIZE // SLAB


def on_loopback(**changes: Any) -> Announcement:
    """Somebody's, for devices of this test."""
    made = {"session": "00000000000000aa", "addresses": ["127.0.0.1:1"], "slab_bytes": SLAB}
    return announcement(0xAA, **{**made, **changes})


def start(cluster: Cluster, **changes: str) -> Device:
    """A device that is told of no donor but by its configuration."""
    name = cluster.name()
    options = ("--frontend", "nbd-socket", "--size", str(SIZE))
    cluster.ok("device", "start", name, *options, **changes)
    return Device(cluster, name)


def slabs(device: Device) -> dict[str, int]:
    """How many each donor has, by address."""
    return {row["address"]: row["slabs"] for row in device.status["donors"]}


def troubles(device: Device) -> list[str]:
    """What keeps it from finding donors; not what this host refuses a device."""
    degraded = device.status["degraded"]
    return [text for text in degraded if "peers" in text or "broker" in text]


def until_mapped(device: Device, data: Copied, count: int = SLABS) -> dict[str, int]:
    """Until so many slabs have a donor; returns how many each donor has that has any."""

    def mapped() -> dict[str, int] | None:
        data.write()
        found = {address: number for address, number in slabs(device).items() if number}
        return found if sum(found.values()) == count else None

    return dict(until(mapped, f"{count} slabs that are mapped"))


def test_a_file_of_peers_is_read_again_and_a_broken_one_changes_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    small, other = cluster.donor(pool=str(SLAB)), cluster.donor()
    peers = cluster.root / "peers"
    done = cluster.cli("device", "start", "x", "--size", "8M", INFINISWAP_CLUSTER_PEERS_FILE="/no")
    assert (done.returncode, "/no: cannot read the list" in done.stderr) == (3, True)
    peers.write_text(f"# the only one\n{small.address}\n")
    device = start(cluster, INFINISWAP_CLUSTER_PEERS_FILE=str(peers))
    data = Copied(device, tmp_path)
    data.draw(SIZE)
    assert until_mapped(device, data, 1) == {small.address: 1}
    peers.write_text(f"{small.address}\nno address\n{other.address}\n")
    until(lambda: troubles(device), "word of the broken file")
    assert "line 2 is not an address" in troubles(device)[0]
    assert slabs(device) == {small.address: 1}
    table = cluster.ok("device", "show", device.name)
    assert "line 2" in table
    # Who is taken off the list keeps what it has.
    peers.write_text(f"{other.address}\n")
    assert until_mapped(device, data) == {small.address: 1, other.address: SLABS - 1}
    assert not troubles(device)
    status = cluster.ok("status", "--json", INFINISWAP_CLUSTER_PEERS_FILE=str(peers))
    assert [row["address"] for row in json.loads(status)["donors"]] == [other.address]
    assert "line 2 is not an address" in device.log


@pytest.fixture
def announced(cluster: Cluster, broker: Broker, secret_file: Path) -> Cluster:
    """A cluster whose donors announce themselves."""
    cluster.env |= {
        "INFINISWAP_CLUSTER_SECRET_FILE": str(secret_file),
        "INFINISWAP_CLUSTER_DISCOVERY": "mqtt",
        "INFINISWAP_MQTT_BROKER": broker.address,
        "INFINISWAP_MQTT_ANNOUNCE_S": "5",
    }
    return cluster


def findings(cluster: Cluster, **changes: str) -> str:
    """What `infiniswap doctor` says of the broker and of donors."""
    found = json.loads(cluster.cli("doctor", "--json", **changes).stdout)
    return "\n".join(
        f"{finding['state']}: {finding['what']}; {finding['mend']}"
        for finding in found
        if finding["name"] in ("discovery", "donors")
    )


def until_degraded(device: Device, words: str) -> None:
    """Until the device says so in its status."""
    until(lambda: any(words in sentence for sentence in troubles(device)), words)


@pytest.mark.requires_tool("mosquitto")
def test_donors_are_found_on_a_broker_and_nothing_is_lost_with_it(
    announced: Cluster, broker: Broker, tmp_path: Path
) -> None:
    cluster = announced
    done = cluster.cli("device", "start", "x", "--size", "8M", "--frontend", "nbd-socket")
    assert (done.returncode, "no donor is named or announced" in done.stderr) == (6, True)
    # A broker full of what is no announcement, as anybody who may write to it can make it.
    junk = "infiniswap/default/donors/00000000-0000-0000-0000-00000000000#/000000000000000#"
    broker.retain(junk, b"junk", b'{"schema": 3, "body": {}}', b"x" * 9000, b"\xff" * 20)
    broker.retain("infiniswap/default/donors/#/#", *[os.urandom(64) for _ in range(2000)])
    other = on_loopback(cluster="default", addresses=["10.255.255.1:1"], slab_bytes=SLAB)
    broker.retain(
        topic(other), encode(fresh(replace(other, cluster="elsewhere")), KEYS.announcement)
    )
    small, peers = cluster.donor(pool=str(SLAB)), cluster.root / "peers"
    peers.write_text("# nobody yet\n")
    device = start(cluster, INFINISWAP_CLUSTER_PEERS_FILE=str(peers))
    data = Copied(device, tmp_path)
    data.draw(SIZE)
    assert until_mapped(device, data, 1) == {small.address: 1}
    report = findings(cluster, INFINISWAP_CLUSTER_PEERS="127.0.0.1:2")
    for words in (
        "degraded: 127.0.0.1:2: ",
        f"ok: broker {broker.address}: 1 donor announced",
        f"ok: {small.address}",
        "an announcement of schema 3; this release reads schema 2",
        "9000 bytes; an announcement has 4096 most",
        "it is for the cluster 'elsewhere'",
        "the topic is none of a donor's",
    ):
        assert words in report
    # Without a broker: a donor that has slabs keeps them, and a newcomer is not found.
    broker.kill()
    second = cluster.donor()
    until_degraded(device, f"broker {broker.address}: Connection refused")
    data.write()
    assert slabs(device) == {small.address: 1}
    words = "this donor is not announced"
    until(lambda: words in cluster.ok("status", "--donors", second.address), words)
    assert "[broker-lost]" in second.log
    assert "those that are known stay known [broker-lost]" in device.log
    assert "degraded: broker" in findings(cluster)
    # It comes back without what it had retained: everybody announces himself again. And it lies: it
    # names hosts that are none, one with a closed port and one that says nothing; so does the file.
    broker.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = ["127.0.0.1:1", f"127.0.0.1:{silent.getsockname()[1]}"]
        liars = [
            on_loopback(donor_id=other.donor_id[:-1] + str(number), addresses=[address])
            for number, address in enumerate(addresses)
        ]
        for liar in liars:
            broker.retain(topic(liar), encode(fresh(liar), KEYS.announcement))
        peers.write_text("127.0.0.1:2\n")
        nobody = {*addresses, "127.0.0.1:2"}
        until(lambda: nobody <= slabs(device).keys(), "hosts that are none")
        # What was written meanwhile may have a place on the newcomer already, and nowhere else.
        assert slabs(device)[small.address] == 1
        assert not any(slabs(device)[address] for address in nobody)
        assert until_mapped(device, data) == {small.address: 1, second.address: SLABS - 1}
        for liar in liars:
            broker.retain(topic(liar), encode(withdrawn(liar), KEYS.announcement))
        peers.write_text("# nobody any more\n")
        until(lambda: not nobody & slabs(device).keys(), "hosts that are withdrawn")
    # It may have heard of them before it has said that the broker is back.
    until(lambda: not troubles(device), "nothing that is degraded")
    # The will of a donor that is killed withdraws it; what another one has is untouched.
    small.end(signal.SIGKILL)
    until(lambda: list(slabs(device)) == [second.address], "a donor that is withdrawn")
    assert until_mapped(device, data) == {second.address: SLABS}
    # One that stops in order withdraws itself, and the device lives on.
    second.end(signal.SIGINT)
    until(lambda: not slabs(device), "a donor that has withdrawn itself")
    data.write()
    assert "0 donors announced" in findings(cluster)
    # The process that listens is killed: what it told stays known, and another one is started. It
    # finds a broker that takes connections and says nothing.
    third = cluster.donor()
    until_mapped(device, data)
    (listener,) = [
        pid for pid, command in cluster.processes().items() if "listener_process" in command
    ]
    assert "aiomqtt" not in Path(f"/proc/{device.pid}/maps").read_text()
    broker.send(signal.SIGSTOP)
    os.kill(listener, signal.SIGKILL)
    until_degraded(device, "is started again")
    silence = f"broker {broker.address}: no answer in MQTT within 5 s"
    until_degraded(device, silence)
    assert slabs(device) == {third.address: SLABS}
    before = device.status["donors"][0]["read_pages"]
    data.read_back()
    assert device.status["donors"][0]["read_pages"] > before
    data.write()
    until(lambda: f"this donor is not announced: {silence}" in third.log, "a donor's word of it")
    broker.send(signal.SIGCONT)
    until(lambda: not troubles(device), "another listener")
    until(lambda: third.log.count("announced as") == 2, "a donor that is announced again")
    assert slabs(device) == {third.address: SLABS}


@pytest.mark.requires_tool("mosquitto", "openssl")
def test_credentials_and_certificates_are_checked_and_explained(
    announced: Cluster, tmp_path: Path
) -> None:
    cluster, files = announced, tmp_path / "tls"
    files.mkdir()
    for name, subject, extra in (
        ("ca", "/CN=test ca", ["-x509"]),
        ("server", "/CN=localhost", ["-addext", "subjectAltName=DNS:localhost"]),
        ("client", "/CN=h1", []),
        ("other", "/CN=other ca", ["-x509"]),
    ):
        command = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        command += ["-nodes", "-subj", subject, "-keyout", f"{files}/{name}.key", *extra]
        run(*command, "-out", f"{files}/{name}.pem", "-days", "9")
    for name in ("server", "client"):
        command = ["openssl", "x509", "-req", "-in", f"{files}/{name}.pem", "-days", "9"]
        command += ["-CA", f"{files}/ca.pem", "-CAkey", f"{files}/ca.key", "-CAcreateserial"]
        run(*command, "-copy_extensions", "copy", "-out", f"{files}/{name}.signed.pem")
    (files / "users").write_text("h1:right\n")
    program = shutil.which("mosquitto_passwd", path=PATH)
    assert program is not None
    run(program, "-U", files / "users")
    broker = Broker(
        tmp_path,
        *(f"certfile {files}/server.signed.pem", f"keyfile {files}/server.key"),
        *(f"cafile {files}/ca.pem", "require_certificate true"),
        *("allow_anonymous false", f"password_file {files}/users"),
    )
    password = files / "password"
    password.write_text("wrong")
    password.chmod(0o600)
    cluster.env |= {
        "INFINISWAP_MQTT_BROKER": f"localhost:{broker.port}",
        "INFINISWAP_MQTT_TLS": "on",
        "INFINISWAP_MQTT_CA_FILE": f"{files}/ca.pem",
        "INFINISWAP_MQTT_CERT_FILE": f"{files}/client.signed.pem",
        "INFINISWAP_MQTT_KEY_FILE": f"{files}/client.key",
        "INFINISWAP_MQTT_USERNAME": "h1",
        "INFINISWAP_MQTT_PASSWORD_FILE": str(password),
    }
    broker.start()
    try:
        donor = cluster.donor()
        until(lambda: "this donor is not announced" in donor.log, "a donor that is refused")
        assert "it refuses user 'h1'" in donor.log
        assert "mqtt.password_file" in donor.log
        files_of_tls = ("CA_FILE", "CERT_FILE", "KEY_FILE")
        for changes, words in (
            ({}, "it refuses user 'h1'"),
            ({"CA_FILE": f"{files}/other.pem"}, "its certificate is not to be trusted"),
            ({"CA_FILE": f"{files}/none.pem"}, "mqtt.ca_file: cannot be used: No such file"),
            ({"BROKER": f"127.0.0.1:{broker.port}"}, "its certificate is not to be trusted"),
            ({"TLS": "off", **dict.fromkeys(files_of_tls, "")}, "broker localhost"),
            ({"BROKER": f"127.0.0.1:{donor.data}"}, "no TLS connection"),
        ):
            report = findings(cluster, **{f"INFINISWAP_MQTT_{k}": v for k, v in changes.items()})
            assert words in report, changes
            assert "degraded: " in report
        password.write_text("right")
        until(lambda: "announced as" in donor.log, "a donor that is announced")
        assert "1 donor announced" in findings(cluster)
    finally:
        broker.kill()


@pytest.fixture
def other_broker(announced: Cluster, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Starts another one, with these lines in its configuration, for the cluster."""
    made: list[Broker] = []

    def begin(*options: str) -> Broker:
        made.append(Broker(tmp_path, *options))
        made[0].start()
        announced.env["INFINISWAP_MQTT_BROKER"] = made[0].address
        return made[0]

    yield begin
    for each in made:
        each.kill()


@pytest.mark.requires_tool("mosquitto")
@pytest.mark.parametrize("protocol", ["auto", "3.1.1"])
def test_a_broker_that_keeps_nothing_is_served_by_repetition(
    announced: Cluster, other_broker: Callable[..., Broker], protocol: str
) -> None:
    cluster = announced
    broker = other_broker("retain_available false")
    cluster.env |= {"INFINISWAP_MQTT_PROTOCOL": protocol, "INFINISWAP_MQTT_ANNOUNCE_S": "3600"}
    donor = cluster.donor()
    until(lambda: "announced as" in donor.log, "a donor that is announced")
    assert "the broker keeps no messages, so this is repeated more often" in donor.log
    assert "lost" not in donor.log
    rows = json.loads(cluster.ok("status", "--json"))["donors"]
    assert [row["address"] for row in rows] == [donor.address]
    report = findings(cluster)
    assert f"ok: broker {broker.address}: the daemon of this host can announce itself" in report
    assert f"degraded: broker {broker.address}: it keeps no retained messages" in report
    assert "TLS" not in report


@pytest.mark.requires_tool("mosquitto")
def test_doctor_asks_the_broker_for_what_the_daemon_asks(
    announced: Cluster, other_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    access = tmp_path / "acl"
    access.write_text("topic read infiniswap/#\n")
    other_broker(f"acl_file {access}")
    report = findings(announced)  # a consumer needs no more
    assert "no daemon runs on this host; one would also need the right to write" in report
    assert "degraded: broker" not in report
    donor = announced.donor()
    words = "this donor is not announced"
    until(lambda: words in donor.log, words)
    assert "it refuses the announcement (not authorized). Let this user write" in donor.log
    announced.env["INFINISWAP_DAEMON_LISTEN"] = donor.address
    report = findings(announced)
    assert "the daemon of this host cannot announce itself: it refuses the announcement" in report
    assert "Let this user write infiniswap/#" in report


@pytest.mark.requires_tool("mosquitto")
async def test_a_donor_that_may_only_write_stays_announced_once(
    other_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, users = tmp_path / "acl", tmp_path / "users"
    access.write_text("topic write infiniswap/#\nuser con\ntopic read infiniswap/#\n")
    users.write_text("con:x\n")
    program = shutil.which("mosquitto_passwd", path=PATH)
    assert program is not None
    await asyncio.to_thread(run, program, "-U", users)
    broker = await asyncio.to_thread(
        other_broker, f"acl_file {access}", f"password_file {users}", "allow_anonymous true"
    )
    (tmp_path / "password").write_text("x")
    (tmp_path / "password").chmod(0o600)
    monkeypatch.setattr("infiniswap.discovery.announcer.ECHO_S_MAX", 0.5)
    keys = {"username": "con", "password_file": str(tmp_path / "password")}
    settings = {f"mqtt.{key}": value for key, value in keys.items()}
    config = load(Path("/dev/null"), {**settings, "mqtt.broker": broker.address}, {})
    other = derive(bytes(range(32)))
    known = announcement_keys([KEYS, other])
    directory = Directory("default", known, loopback_ok=True)
    accepted = [KEYS]
    one = announcer(
        broker, on_loopback(addresses=["127.0.0.1:1"]), "5", accepted=accepted, announce_s=1.0
    )
    runs = (one.run(), Listener(config.mqtt, "default", directory, Random()).run())
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        words = "this donor cannot see whether it is announced: broker "
        await eventually(lambda: any(said.startswith(words) for said in one.degraded()))
        (said,) = one.degraded()
        assert "Let this user read infiniswap/# as well" in said
        (first,) = directory.donors()
        await asyncio.sleep(2.0)  # two more announcements, in the same session
        assert [donor.session for donor in directory.donors()] == [first.session]
        # Another key makes another session, and nothing is left of the one before.
        accepted[:] = [other, KEYS]
        await eventually(lambda: first.session not in [d.session for d in directory.donors()])
        late = Directory("default", known, loopback_ok=True)
        await Listener(config.mqtt, "default", late, Random()).once()
        assert len(late.donors()) == 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.requires_tool("mosquitto")
def test_doctor_leaves_nothing_on_a_broker(announced: Cluster, broker: Broker) -> None:
    donor = announced.donor()
    until(lambda: "announced as" in donor.log, "a donor that is announced")
    for _ in range(2):
        report = findings(announced)
        assert f"ok: broker {broker.address}: 1 donor announced" in report
        assert "the daemon of this host can announce itself there" in report
        assert "keeps no retained" not in report
    assert "withdrawal" not in donor.log
    assert "does not count" not in donor.log


def announcer(
    broker: Broker,
    made: Announcement,
    protocol: str,
    keys_of: Keys | None = None,
    *,
    accepted: Sequence[Keys] | None = None,
    announce_s: float = 3600.0,
) -> Announcer:
    """One that repeats nothing by itself while a test lasts. `accepted`: keys that may change."""
    keys = {"mqtt.announce_s": announce_s, "mqtt.telemetry_s": 0.5, "mqtt.protocol": protocol}
    config = load(Path("/dev/null"), {**keys, "mqtt.broker": broker.address}, {})
    figures = MemoryTelemetry(
        cluster="default",
        donor_id=made.donor_id,
        name=made.name,
        used_share=0.5,
        total_bytes=1,
        slab_bytes=1,
        slabs_mapped=0,
        slabs_free=0,
        can_map=0,
        draining=False,
    )

    known = ([] if keys_of is None else [keys_of]) if accepted is None else accepted

    async def make(_local: str, session: str) -> Announcement:
        return replace(made, session=session)

    return Announcer(config.mqtt, lambda: announcement_keys(known), make, lambda: figures, Random())


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.requires_tool("mosquitto")
async def test_two_daemons_with_one_identity_are_told_and_leftovers_are_cleared(
    broker: Broker,
) -> None:
    """In either version of MQTT. And who is withdrawn by somebody else announces himself again."""
    first = on_loopback(addresses=["127.0.0.1:1"])
    second = replace(first, addresses=["127.0.0.1:2"])
    third = replace(first, donor_id=first.donor_id[:-1] + "4", addresses=["127.0.0.1:4"])
    # What a session has left whose will was lost with a broker.
    left = f"infiniswap/default/donors/{first.donor_id}/{'0' * 16}"
    stale = encode(replace(first, session="0" * 16), None)
    await asyncio.to_thread(broker.retain, left, stale)
    # And a host that is gone, with a will that never came.
    gone = replace(
        first, donor_id=first.donor_id[:-1] + "0", addresses=["127.0.0.1:3"], every_s=1.0
    )
    where = f"infiniswap/default/donors/{gone.donor_id}/{gone.session}"
    await asyncio.to_thread(broker.retain, where, encode(gone, None))
    directory = Directory("default", (), loopback_ok=True)
    keys = {"mqtt.broker": broker.address, "mqtt.protocol": "3.1.1"}
    config = load(Path("/dev/null"), keys, {})
    seen: list[set[str]] = []

    def changed() -> None:
        seen.append({str(address) for address in directory.addresses()})

    def comings_and_goings() -> list[bool]:
        return [is_there for is_there, _ in groupby("127.0.0.1:4" in known for known in seen)]

    listener = Listener(config.mqtt, "default", directory, Random(), changed)
    announcers = [
        announcer(broker, made, protocol)
        for made, protocol in ((first, "5"), (second, "3.1.1"), (third, "auto"))
    ]
    runs = (*(each.run() for each in announcers), listener.run())
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await eventually(lambda: comings_and_goings()[-1:] == [True])
        (live,) = [donor for donor in directory.donors() if donor.donor_id == third.donor_id]
        await asyncio.to_thread(broker.retain, topic(live), b"")
        await eventually(lambda: comings_and_goings()[-3:] == [True, False, True])
        await eventually(lambda: all(each.degraded() for each in announcers[:2]))
        await eventually(lambda: len(directory.donors()) == 3)
        assert set.union(*seen) == {f"127.0.0.1:{port}" for port in (1, 2, 3, 4)}
        spoken = re.findall(r" as isw[0-9a-f]{16} \(p(\d)", broker.log)
        assert sorted(spoken) == ["2", "2", "5", "5"]  # 2: of MQTT 3.1.1
        for each in announcers[:2]:
            (sentence,) = each.degraded()
            assert "2 daemons have one identity" in sentence
            assert "127.0.0.1:1, 127.0.0.1:2" in sentence
        assert directory.conflicts() == announcers[0].degraded()
        assert all(donor.session != "0" * 16 for donor in directory.donors())
        # Memory figures: whoever comes later gets the next ones.
        async with connected(config.mqtt, None, "telemetry", "5") as client:
            await client.subscribe(memory_topic("default", first.donor_id))
            async with asyncio.timeout(WAIT_S):
                message = await anext(client.messages)
        assert not message.retain
        assert msgspec.json.decode(message.payload, type=MemoryTelemetry).used_share == 0.5
        # One of them stops: the other one stays announced.
        tasks[0].cancel()
        await eventually(lambda: len(directory.donors()) == 2)
        assert set(map(str, directory.addresses())) == {"127.0.0.1:2", "127.0.0.1:4"}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.requires_tool("mosquitto")
async def test_who_is_withdrawn_by_a_recorded_will_comes_back_in_another_session(
    broker: Broker,
) -> None:
    directory = Directory("default", announcement_keys([KEYS]), loopback_ok=True)
    config = load(Path("/dev/null"), {"mqtt.broker": broker.address}, {})
    listener = Listener(config.mqtt, "default", directory, Random())
    one = announcer(broker, on_loopback(addresses=["127.0.0.1:1"]), "5", KEYS)
    tasks = [asyncio.create_task(run) for run in (one.run(), listener.run())]

    def sessions() -> list[str]:
        return [donor.session for donor in directory.donors()]

    try:
        await eventually(sessions)
        (first,) = directory.donors()
        will = encode(withdrawn(first), KEYS.announcement)
        await asyncio.to_thread(broker.retain, topic(first), will)
        await eventually(lambda: sessions() not in ([], [first.session]))
        (second,) = sessions()
        # What was recorded of the former session does not bring it back.
        old = encode(fresh(first), KEYS.announcement)
        await asyncio.to_thread(broker.retain, topic(first), old)
        await eventually(lambda: directory.ignored["sequence"])
        assert sessions() == [second]
        # It ends in order, and withdraws itself.
        tasks[0].cancel()
        await eventually(lambda: not sessions())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.requires_tool("mosquitto")
async def test_a_donor_whose_secret_changed_withdraws_with_the_new_one(broker: Broker) -> None:
    """Hosts that have given the former secret up do not heed a withdrawal, or a will, under it."""
    former, accepted = derive(bytes(range(32))), [derive(bytes(range(32)))]
    config = load(Path("/dev/null"), {"mqtt.broker": broker.address}, {})
    one = announcer(
        broker,
        on_loopback(addresses=["127.0.0.1:1"]),
        "5",
        accepted=accepted,
        announce_s=1.0,
    )
    directories = [
        Directory("default", announcement_keys(keys), loopback_ok=True)
        for keys in ([former, KEYS], [KEYS])
    ]
    listeners = [Listener(config.mqtt, "default", each, Random()) for each in directories]
    runs = (one.run(), *(each.run() for each in listeners))
    tasks = [asyncio.create_task(run) for run in runs]

    def sessions(number: int) -> set[str]:
        return {donor.session for donor in directories[number].donors()}

    try:
        await eventually(lambda: sessions(0))
        before = sessions(0)
        assert not sessions(1)
        accepted[:] = [KEYS, former]
        await eventually(lambda: sessions(0) - before)
        # Who already knew it has it all the time, at the same address.
        assert len(directories[0].addresses()) == 1
        await eventually(lambda: sessions(1) == sessions(0) - before)
        assert not directories[0].ignored
        tasks[0].cancel()
        await eventually(lambda: not sessions(1))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def listen_once(server: asyncio.Server, **keys: object) -> None:
    """As a device does, to the broker that a test plays."""
    port = server.sockets[0].getsockname()[1]
    keys = {f"mqtt.{key}": value for key, value in keys.items()}
    config = load(Path("/dev/null"), {**keys, "mqtt.broker": f"127.0.0.1:{port}"}, {})
    await Listener(config.mqtt, "default", Directory("default", ()), Random()).once()


async def test_an_older_broker_is_spoken_to_in_its_version_and_a_liar_is_explained() -> None:
    """MQTT 3.1.1: the first byte of CONNACK is 0x20, of SUBACK 0x90; level 5 is refused with 1."""
    tried = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.read(4096)
        if hello:  # not one that only knocks
            tried.append(hello[8])
            writer.write(b"\x20\x02\x00\x01" if hello[8] == 5 else answer)
            subscribe = await reader.read(4096)
            if subscribe and hello[8] == 4:
                writer.write(b"\x90\x03" + subscribe[2:4] + b"\x00")
                await reader.read(4096)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        answer = b"\x20\x02\x00\x00"
        await listen_once(server)
        assert tried == [5, 4]
        answer = b"\xff" * 64
        with pytest.raises(BrokerError, match=r"broker 127\.0\.0\.1:\d"):
            await listen_once(server)


async def test_a_broker_that_answers_too_late_is_left_with_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a slow one would have one more after each attempt."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(4096):  # not one that only knocks
            seen.append("opened")
            while await reader.read(4096):
                pass
            seen.append("closed")
        writer.close()

    monkeypatch.setattr(mqtt, "CONNECT_S_MAX", 0.2)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with pytest.raises(BrokerError, match=r"no answer in MQTT within 0\.2 s"):
            await listen_once(server, protocol="5", keepalive_s=3600)
        await eventually(lambda: seen == ["opened", "closed"])
