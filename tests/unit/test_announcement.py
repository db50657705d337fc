# SPDX-License-Identifier: Apache-2.0
"""What donors announce, what of it counts, and how often anything is tried or told again."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.configs import configured
from support.donors.announcements import announcement, topic, withdrawn
from support.machine.virtual_time import in_virtual_time

from infiniswap.cli.config.paths import check_discovery
from infiniswap.config import Config, MqttConfig
from infiniswap.control.key_ring import KeyRing
from infiniswap.discovery.announcement import (
    ADDRESSES_MAX,
    ANNOUNCEMENT_BYTES_MAX,
    CLOCK_S_MAX,
    LIVES,
    REASONS,
    Announcement,
    NotOursError,
    decode,
    encode,
)
from infiniswap.discovery.broker import Versions, address_of
from infiniswap.discovery.directory import Directory
from infiniswap.discovery.listener import Listener
from infiniswap.discovery.listener_process import is_own
from infiniswap.donor import rdma as donor_rdma
from infiniswap.donor.announce import addresses, make_announcer
from infiniswap.donor.rdma import DonorRdma
from infiniswap.engine import native_rdma
from infiniswap.engine.rdma import RdmaGid, RdmaPort
from infiniswap.errors import ConfigError, EngineError
from infiniswap.keys import derive
from infiniswap.policy.retry import Backoff, Complaints
from infiniswap.secret import read_password
from infiniswap.units import GIB, MIB, HostPort

SECRET = b"a secret of the test cluster"
TOPIC = topic(announcement())

names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=128)


@given(
    name=names,
    hosts=st.lists(
        st.ip_addresses().filter(lambda each: not each.is_link_local).map(str),
        min_size=1,
        max_size=ADDRESSES_MAX,
    ),
    slab_bytes=st.integers(0, (1 << 53) - 1),
    protocols=st.lists(st.integers(0, 1 << 30), max_size=16),
    every_s=st.floats(1.0, 3600.0),
    secret=st.none() | st.binary(min_size=16, max_size=64),
)
def test_an_announcement_survives_the_journey(
    name: str, hosts: list[str], secret: bytes | None, **values: Any
) -> None:
    made = announcement(name=name, addresses=[str(HostPort(h, 9400)) for h in hosts], **values)
    message = encode(made, secret)
    assert len(message) <= ANNOUNCEMENT_BYTES_MAX
    assert decode(TOPIC, message, () if secret is None else (secret,), "default") == made
    # A later release says more.
    body = {**msgspec.json.decode(msgspec.json.encode(made)), "colour": "blue"}
    message = msgspec.json.encode({**msgspec.json.decode(message), "body": body, "more": 1})
    assert decode(TOPIC, message, (), "default") == made


def test_the_longest_that_a_daemon_may_say_is_not_oversized() -> None:
    hosts = [f"{'h' * 250}{n}:65535" for n in range(ADDRESSES_MAX)]
    made = announcement(name="\U0001f40b" * 128, cluster="c" * 64, addresses=hosts)
    assert len(encode(made, SECRET)) <= ANNOUNCEMENT_BYTES_MAX


@given(st.binary(max_size=5000), st.booleans())
def test_junk_is_told_from_an_announcement(payload: bytes, authenticated: bool) -> None:
    made = announcement()
    with pytest.raises(NotOursError) as caught:
        decode(topic(made), payload, (SECRET,) if authenticated else (), "default")
    assert caught.value.reason in REASONS
    assert str(caught.value).isprintable()


@given(st.data())
def test_a_changed_byte_is_not_believed(data: st.DataObject) -> None:
    made = announcement()
    message = bytearray(encode(made, SECRET))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] = data.draw(st.integers(0, 255))
    # Outside of the body a change may say the same, as a blank does for JSON.
    with contextlib.suppress(NotOursError):
        assert decode(topic(made), bytes(message), (SECRET,), "default") == made


@pytest.mark.parametrize(
    ("reason", "where", "message", "words"),
    [
        ("oversized", TOPIC, b"x" * (ANNOUNCEMENT_BYTES_MAX + 1), "4097 bytes"),
        ("junk", "infiniswap/default/donors/x/y", b"{}", "the topic is none"),
        ("junk", TOPIC, b"{}", "no announcement"),
        ("junk", TOPIC, b'{"schema":2,"body":7}', "no announcement"),
        ("schema", TOPIC, b'{"schema":3,"body":{}}', "schema 3; this release"),
        ("cluster", TOPIC, encode(announcement(cluster="b"), None), "cluster 'b'"),
        ("junk", topic(announcement(2)), encode(announcement(), None), "another donor's"),
        ("junk", TOPIC, encode(announcement(addresses=["10.0.0.1:x"]), None), "not a port"),
        ("proof", TOPIC, encode(announcement(), None), "without a cluster secret"),
        ("proof", TOPIC, encode(announcement(), b"x" * 16), "another cluster"),
    ],
)
def test_why_a_message_does_not_count(reason: str, where: str, message: bytes, words: str) -> None:
    with pytest.raises(NotOursError, match=words) as caught:
        decode(where, message, (SECRET,) if reason == "proof" else (), "default")
    assert caught.value.reason == reason


def test_no_text_of_an_announcement_moves_the_terminal() -> None:
    for evil in (
        "10.0.0.1\x1b[2J:9400",
        "[fe80::1%\x1b]0;owned\x07]:9400",
        "\u202e::1",
        "::1%a\nb",
    ):
        made = announcement(addresses=[evil])
        with pytest.raises(NotOursError) as caught:
            decode(topic(made), encode(made, None), (), "default")
        assert caught.value.reason == "junk"
        assert str(caught.value).isprintable()
    made = announcement(name="evil\u200b\u00adname", software="\u061c1.0", transports=["\ufefftcp"])
    found = decode(topic(made), encode(made, None), (), "default")
    assert isinstance(found, Announcement)
    for text in (found.name, found.software, *found.transports):
        assert text.isprintable()


NOON_S = 1_900_000_000.0
"""By the clock of the host that listens, when its monotonic one is at 0."""
sequences = itertools.count(1)


def signed(made: Announcement, now_s: float = 0.0, **changes: Any) -> bytes:
    values = {"time_s": NOON_S + now_s, "sequence": next(sequences), **changes}
    return encode(structs.replace(made, **values), SECRET)


def take(directory: Directory, made: Announcement, now_s: float = 0.0) -> bool:
    """One that was signed just now."""
    return hear(directory, made, signed(made, now_s), now_s)


def hear(
    directory: Directory, made: Announcement, message: bytes, now_s: float = 0.0, **kept: bool
) -> bool:
    return directory.take(topic(made), message, now_s, NOON_S + now_s, **kept)


def withdrawal(made: Announcement, secret: bytes | None = SECRET) -> bytes:
    return encode(withdrawn(made), secret)


def names_in(directory: Directory) -> list[str]:
    return [donor.name for donor in directory.donors()]


def test_a_directory_follows_the_broker() -> None:
    directory = Directory("default", (SECRET,), slab_bytes=GIB)
    first, second = announcement(1), announcement(2)
    assert take(directory, first)
    assert take(directory, second)
    assert not take(directory, first, 1.0)
    assert directory.addresses() == (HostPort("10.0.0.1", 9400), HostPort("10.0.0.2", 9400))
    # What nobody has signed withdraws nobody.
    assert not hear(directory, second, b"", 1.0)
    with pytest.raises(NotOursError, match="without a cluster secret"):
        hear(directory, second, withdrawal(second, None), 1.0)
    assert names_in(directory) == ["h1", "h2"]
    assert hear(directory, second, withdrawal(second), 1.0)
    assert not hear(directory, second, withdrawal(second), 1.0)
    assert names_in(directory) == ["h1"]
    # What does not count leaves what its topic said before.
    with pytest.raises(NotOursError):
        hear(directory, first, b"junk", 2.0)
    assert names_in(directory) == ["h1"]


def test_without_a_secret_announcements_and_withdrawals_are_hints() -> None:
    directory = Directory("default", ())
    made = announcement()
    assert hear(directory, made, encode(made, None))
    assert hear(directory, made, b"")
    assert hear(directory, made, encode(made, None))
    assert hear(directory, made, withdrawal(made, None))


# ------------------------------------------------------------------------- recorded


@pytest.mark.parametrize("is_kept", [False, True], ids=["sent", "kept by the broker"])
def test_a_recorded_announcement_is_not_believed_for_ever(is_kept: bool) -> None:
    made = announcement(every_s=60.0)
    recorded = signed(made)
    oldest_s = LIVES * 60.0 + CLOCK_S_MAX
    assert hear(Directory("default", (SECRET,)), made, recorded, oldest_s, is_kept=is_kept)
    directory = Directory("default", (SECRET,))
    with pytest.raises(NotOursError, match="it was signed 481 s ago by donor h1") as caught:
        hear(directory, made, recorded, oldest_s + 1.0, is_kept=is_kept)
    assert caught.value.reason == "old"
    assert directory.ignored == {"old": 1}


def test_a_recorded_announcement_does_not_come_after_a_later_one() -> None:
    directory = Directory("default", (SECRET,))
    made = announcement(addresses=["10.0.0.1:9400"])
    recorded = signed(made)
    moved = announcement(addresses=["10.9.9.9:9400"])
    assert take(directory, moved, 1.0)
    with pytest.raises(NotOursError, match="a later one of donor h1") as caught:
        hear(directory, made, recorded, 2.0)
    assert caught.value.reason == "sequence"
    assert [str(address) for address in directory.addresses()] == ["10.9.9.9:9400"]


def test_nothing_is_heard_of_a_session_that_was_withdrawn() -> None:
    directory = Directory("default", (SECRET,))
    made = announcement()
    recorded = signed(made)
    assert hear(directory, made, recorded)
    assert hear(directory, made, withdrawal(made), 1.0)
    for message in (recorded, signed(made, 2.0)):
        with pytest.raises(NotOursError, match="was withdrawn"):
            hear(directory, made, message, 2.0)
    # The donor comes back in a session of its own. A recorded withdrawal is of the former one.
    back = announcement(session="f" * 16)
    assert take(directory, back, 3.0)
    assert not hear(directory, made, withdrawal(made), 4.0)
    assert names_in(directory) == ["h1"]
    # What an earlier session said at the same address is no news, and no complaint either.
    other = announcement(session="e" * 16)
    assert not hear(directory, other, recorded_as(other, 0.5), 5.0)
    assert directory.ignored == {"sequence": 2}


def recorded_as(made: Announcement, now_s: float) -> bytes:
    return signed(made, now_s, sequence=0)


def test_the_same_again_keeps_nobody_alive() -> None:
    """A broker gives again what it has kept; only the donor signs a later one."""
    directory = Directory("default", (SECRET,))
    made = announcement(every_s=60.0)
    message = signed(made)
    assert hear(directory, made, message)
    for now_s in range(10, 181, 10):
        assert not hear(directory, made, message, float(now_s), is_kept=True)
        assert not directory.expire(float(now_s))
    assert directory.expire(180.1)


@pytest.mark.parametrize(
    ("signed_s", "words"),
    [(0.0, ""), (-20.0, ""), (20.0, ""), (-60.0, "60 s behind"), (299.0, "299 s ahead of")],
)
def test_clocks_that_differ_are_told_and_tolerated(signed_s: float, words: str) -> None:
    directory = Directory("default", (SECRET,))
    made = announcement()
    assert hear(directory, made, signed(made, signed_s))
    assert [words in sentence for sentence in directory.clocks()] == ([True] if words else [])
    # What the broker has kept may be old.
    assert hear(directory, announcement(2), signed(announcement(2), -100.0), is_kept=True)
    assert len(directory.clocks()) == bool(words)


def test_a_clock_that_is_far_ahead_is_not_believed() -> None:
    directory = Directory("default", (SECRET,))
    made = announcement()
    with pytest.raises(NotOursError, match="301 s ahead of that of this host, and 300 s") as caught:
        hear(directory, made, signed(made, 301.0))
    assert caught.value.reason == "clock"


def test_either_of_two_secrets_is_accepted() -> None:
    other = b"another secret of that cluster"
    for accepted in ((SECRET, other), (other, SECRET)):
        directory = Directory("default", accepted)
        assert take(directory, announcement())
    with pytest.raises(NotOursError, match="another cluster secret"):
        take(Directory("default", (other,)), announcement())


def test_what_is_kept_in_mind_is_bounded() -> None:
    directory = Directory("default", (SECRET,), hosts_max=4)
    for number in range(1, 100):
        made = announcement(number)
        take(directory, made, float(number))
        hear(directory, made, withdrawal(made), float(number))
    assert len(directory._ended) == len(directory._sequences) == 4


def test_whom_nobody_hears_any_more_is_forgotten_but_not_for_a_broker_that_was_away() -> None:
    directory = Directory("default", (SECRET,))
    take(directory, announcement(every_s=10.0))
    assert not directory.expire(30.0)
    directory.connected(1000.0)
    assert not directory.expire(1030.0)
    assert directory.expire(1030.1)
    assert directory.donors() == ()


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("slab", {"slab_bytes": MIB}),
        ("protocol", {"protocols": [1, 3]}),
        ("loopback", {"addresses": ["127.0.0.1:9400"]}),
    ],
)
def test_donors_of_no_use_are_ignored_and_counted(reason: str, changes: dict[str, Any]) -> None:
    directory = Directory("default", (SECRET,), slab_bytes=GIB)
    with pytest.raises(NotOursError, match="h1") as caught:
        take(directory, announcement(**changes))
    assert caught.value.reason == reason
    assert directory.ignored == {reason: 1}
    assert directory.donors() == ()


def test_a_flood_is_bounded_and_who_is_known_stays() -> None:
    directory = Directory("default", (SECRET,), hosts_max=8)
    for number in range(1, 101):
        with contextlib.suppress(NotOursError):
            take(directory, announcement(number))
    assert [donor.name for donor in directory.donors()] == [f"h{n}" for n in range(1, 9)]
    assert directory.ignored == {"bound": 92}
    assert not take(directory, announcement(3), 1.0)


def test_two_daemons_with_one_identity_are_told_and_both_used() -> None:
    directory = Directory("default", (SECRET,))
    take(directory, announcement(1))
    take(directory, announcement(2, donor_id=announcement(1).donor_id))
    # A restarted daemon is no second one.
    take(directory, announcement(3, addresses=["10.0.0.1:9400"], donor_id=announcement(1).donor_id))
    (sentence,) = directory.conflicts()
    assert "2 daemons have one identity" in sentence
    assert "10.0.0.1:9400, 10.0.0.2:9400. " in sentence
    assert len(directory.addresses()) == 2


def test_pauses_grow_to_a_bound_and_differ_between_hosts() -> None:
    backoff = Backoff(1.0, 60.0, Random(1))
    pauses = [backoff.pause_s() for _ in range(50)]
    for number, pause_s in enumerate(pauses):
        longest_s = min(2.0**number, 60.0)
        assert longest_s / 2 <= pause_s <= longest_s
    assert pauses != [Backoff(1.0, 60.0, Random(2)).pause_s() for _ in range(50)]
    backoff.good()
    assert backoff.pause_s() <= 1.0


def test_a_complaint_is_told_at_once_and_then_counted() -> None:
    complaints = Complaints(60.0, kinds_max=2)
    assert complaints.due("junk", 0.0) == 0
    assert complaints.due("junk", 1.0) is None
    assert complaints.due("junk", 59.0) is None
    assert complaints.due("schema", 59.0) == 0
    assert complaints.due("junk", 60.0) == 2
    assert complaints.due("third", 60.0) == 0  # and the oldest is forgotten
    assert complaints.due("schema", 60.0) == 0


def test_which_version_of_mqtt_is_tried() -> None:
    either, fixed = Versions("auto"), Versions("3.1.1")
    tried = []
    for _ in range(3):
        tried.append(either.now)
        either.failed()
        fixed.failed()
    assert tried == ["5", "3.1.1", "5"]
    assert fixed.now == "3.1.1"


def load(**values: object) -> Config:
    return configured(**{"cluster__discovery": "mqtt", "mqtt__broker": "broker", **values})


def test_keys_that_need_others_are_told() -> None:
    assert address_of(load().mqtt) == HostPort("broker", 1883)
    assert address_of(load(mqtt__tls="on").mqtt) == HostPort("broker", 8883)
    assert address_of(load(mqtt__tls="on", mqtt__broker="b:1").mqtt) == HostPort("b", 1)
    for values, words in (
        ({"mqtt__broker": None}, 'cluster.discovery = "mqtt" needs `broker`'),
        ({"mqtt__password_file": "/p"}, "mqtt.password_file needs `username`"),
        ({"mqtt__cert_file": "/p"}, "mqtt.cert_file needs `key_file`"),
        ({"mqtt__key_file": "/p"}, "mqtt.key_file needs `cert_file`"),
        ({"mqtt__ca_file": "/p"}, 'mqtt.ca_file needs `tls = "on"`'),
        ({"cluster__name": "a/b"}, "cannot be part of a topic"),
        ({"mqtt__protocol": "4"}, "none of auto, 5, 3.1.1"),
    ):
        given = {"mqtt__broker": "broker", **values}
        with pytest.raises(ConfigError, match=words):
            load(**given)


def test_the_password_is_read_only_from_a_file_that_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(" pa ss \n")
    path.chmod(0o600)
    assert read_password(path) == "pa ss"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="the broker's password has mode 0640"):
        read_password(path)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"daemon__listen": "10.0.0.2:9400"}, ["10.0.0.2:7"]),
        ({"daemon__listen": "0.0.0.0:9400"}, ["10.9.9.9:7"]),
        ({"daemon__listen": "[::]:9400"}, ["10.9.9.9:7"]),
        ({"daemon__listen": "h:9400"}, ["h:7"]),
        ({"mqtt__advertise": "a,b:1"}, ["a:9400", "b:1"]),
    ],
)
def test_where_a_donor_says_it_is(values: dict[str, str], expected: list[str]) -> None:
    assert [str(found) for found in addresses(load(**values), 7, "10.9.9.9")] == expected


async def test_a_donor_announces_rdma_while_a_device_could_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gid = RdmaGid(0, "10.0.0.1", is_roce_v2=True)
    port = RdmaPort("rxe0", 1, "Ethernet", True, 4096, 1024, 1024, (gid,))
    now: list[RdmaPort] = []

    def ports() -> list[RdmaPort]:
        if not now:
            raise EngineError("no RDMA: this host has no RDMA device", code=errno.ENODEV)
        return now

    monkeypatch.setattr(native_rdma, "rdma_ports", ports)
    status = SimpleNamespace(
        control_port=7,
        donor_id=announcement().donor_id,
        donor_name="h1",
        slab_bytes=GIB,
        versions=(1,),
    )
    nothing = cast(Any, None)
    rdma = DonorRdma(nothing, nothing, nothing, Counter(), True)
    service = cast(Any, SimpleNamespace(status=lambda: status, transports=(rdma,)))
    announcer = make_announcer(load(), service, KeyRing(derive(b"x"), None, lambda: 0.0))

    async def transports() -> list[str]:
        return (await announcer._make("10.0.0.1", "0" * 16)).transports

    down, without = replace(port, is_active=False), replace(port, gids=())
    older = replace(port, gids=(replace(gid, is_roce_v2=False),))
    fabric = replace(without, link="InfiniBand")
    for found, expected in (
        ([], ["tcp"]),
        ([port], ["tcp", "rdma"]),
        ([down, without, older, replace(port, link="unknown")], ["tcp"]),
        ([down, fabric], ["tcp", "rdma"]),
        ([replace(fabric, is_active=False)], ["tcp"]),
    ):
        now[:] = found
        assert await transports() == expected, found
    now[:] = [port]
    rdma.enabled = False  # by a reload
    assert await transports() == ["tcp"]
    rdma.enabled = True
    # A driver that hangs.
    hangs, asked = threading.Event(), []

    def hang() -> list[RdmaPort]:
        asked.append(1)
        hangs.wait(30.0)
        return now

    monkeypatch.setattr(native_rdma, "rdma_ports", hang)
    monkeypatch.setattr(donor_rdma, "_VERBS_S_MAX", 0.01)
    try:
        for _ in range(3):
            assert await transports() == ["tcp"]
        assert len(asked) == 1
    finally:
        hangs.set()
    monkeypatch.setattr(donor_rdma, "_VERBS_S_MAX", 30.0)
    assert await transports() == ["tcp", "rdma"]


def test_a_hosts_own_daemon_is_no_donor_for_it() -> None:
    assert is_own(socket.gethostname())
    for other in ("127.0.0.1", "::1", "192.0.2.1", "another.example"):  # nobody's (RFC 5737)
        assert not is_own(other)


def test_config_check_looks_at_the_files_of_discovery(tmp_path: Path) -> None:
    peers, password, certificate = (tmp_path / name for name in ("peers", "password", "ca"))
    keys = {"cluster__peers_file": str(peers), "mqtt__tls": "on", "mqtt__username": "u"}
    keys |= {"mqtt__password_file": str(password), "mqtt__ca_file": str(certificate)}
    peers.write_text("no address")
    with pytest.raises(ConfigError, match="line 1 is not an address"):
        check_discovery(load(**keys))
    peers.write_text("10.0.0.1")
    with pytest.raises(ConfigError, match="cannot read the broker's password"):
        check_discovery(load(**keys))
    password.write_text("word")
    password.chmod(0o600)
    certificate.write_text("none")
    with pytest.raises(ConfigError, match=r"ca: mqtt\.ca_file: cannot be used"):
        check_discovery(load(**keys))
    check_discovery(load(**{**keys, "mqtt__ca_file": ""}))


@in_virtual_time
async def test_a_listener_that_has_heard_everybody_wakes_up_once_a_second() -> None:
    listener = Listener(MqttConfig(), "default", Directory("default", ()), Random(1))
    assert listener._pause_s() == pytest.approx(0.1)
    listener.is_settled = True
    assert listener._pause_s() == pytest.approx(1.0)
