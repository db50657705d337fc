# SPDX-License-Identifier: Apache-2.0
"""What a host that joins writes: everything or nothing, whatever was there and whoever stops it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from infiniswap import config as configuration
from infiniswap.control.roles import Role
from infiniswap.donor.authority import new_authority, new_request, period, sign_request
from infiniswap.errors import (
    ConfigError,
    ConflictError,
    NotPermittedError,
    ProtocolMismatchError,
    SystemCallError,
)
from infiniswap.invitation import membership
from infiniswap.invitation.membership import (
    Joining,
    apply,
    check_changeable,
    check_writable,
    memberships,
    plan,
)
from infiniswap.invitation.messages import Broker, Offer
from infiniswap.keys import derive
from infiniswap.secret import new_secret, read_secret
from infiniswap.units import GIB, MIB, HostPort

SECRET = new_secret()
OFFER = Offer("h1", "default", "secret", GIB, ["10.0.0.2:9400"], secret=SECRET)
HEAD = "# a file\n"


def planned(path: Path, offer: Offer = OFFER, listen: HostPort | None = None) -> Joining:
    return plan(path, offer, b"", listen)


def loaded(path: Path) -> configuration.Config:
    return configuration.load(path, environ={})


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_new_host_gets_secret_donors_and_slab_size(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    apply(planned(path, listen=HostPort("10.0.0.3", 9400)), lambda: HEAD)
    found = loaded(path)
    assert read_secret(tmp_path / "secret") == derive(bytes.fromhex(SECRET))
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o644
    assert found.cluster.secret_file == tmp_path / "secret"
    assert found.peers() == (HostPort("10.0.0.2", 9400),)
    assert found.daemon.listen == HostPort("10.0.0.3", 9400)
    assert found.daemon.slab_bytes == found.device.slab_bytes == GIB
    assert path.read_text().startswith(HEAD)
    assert sorted(files(tmp_path)) == ["infiniswap.toml", "secret"]


def test_a_broker_comes_with_password_and_authority(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    broker = Broker("10.0.0.9:0", "5", "user", 'pass "word\\', "on", "-----CA-----")
    offer = msgspec.structs.replace(
        OFFER, cluster="east", broker=broker, slab_bytes=64 * MIB, second_secret=new_secret()
    )
    apply(planned(path, offer), lambda: HEAD)
    found = loaded(path)
    assert (found.cluster.name, found.cluster.discovery) == ("east", "mqtt")
    assert (found.mqtt.broker, found.mqtt.protocol) == (HostPort("10.0.0.9", 0), "5")
    assert (found.mqtt.username, found.mqtt.tls) == ("user", "on")
    assert found.mqtt.password_file is not None
    assert found.mqtt.password_file.read_text() == 'pass "word\\\n'
    assert found.mqtt.password_file.stat().st_mode & 0o777 == 0o600
    assert found.mqtt.ca_file == tmp_path / "broker-ca.pem"
    assert found.second_keys() is not None
    assert found.device.slab_bytes == 64 * MIB


def test_a_certificate_is_used_with_the_key_that_stayed_here(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    authority, request = new_authority("default"), new_request()
    signed = sign_request(
        authority, "default", "h2", [Role.CONSUMER], period(1), request.certificate
    )
    offer = msgspec.structs.replace(
        OFFER,
        kind="certificate",
        secret="",
        authority=authority.certificate.decode(),
        certificate=signed.decode(),
    )
    apply(plan(path, offer, request.key, None), lambda: HEAD)
    assert sorted(files(tmp_path)) == ["ca.pem", "certificate.pem", "infiniswap.toml", "key.pem"]
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    assert loaded(path).certificates() is not None
    # A certificate for another key is of no use.
    with pytest.raises(ProtocolMismatchError, match="do not belong together"):
        plan(path, offer, new_request().key, None)


OTHER = '[daemon]\npool = "8G"  # mine\n\n[cluster]\n# Donors.\nask_s = 3.0\n'
MEMBER = (
    f'{OTHER}peers = [\n "10.9.9.9:9400",\n]\nsecret_file = "/old/secret"\ndiscovery = "mqtt"\n\n'
    '[mqtt]\nbroker = "old"\ntelemetry_s = 1.0\n'
)


def test_other_settings_comments_and_the_mode_stay(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    path.write_text(MEMBER)
    path.chmod(0o640)
    (tmp_path / "secret").write_text("the former one\n")
    assert memberships(loaded(path)) == [
        "cluster.peers",
        "cluster.discovery",
        "cluster.secret_file",
        "mqtt.broker",
    ]
    apply(planned(path), lambda: pytest.fail("there is a file"))
    found, text = loaded(path), path.read_text()
    assert 'pool = "8G"  # mine\n' in text
    assert "# Donors.\nask_s = 3.0\n" in text
    assert "telemetry_s = 1.0" in text
    assert "10.9.9.9" not in text
    assert (found.cluster.discovery, found.mqtt.broker) == ("static", None)
    assert path.stat().st_mode & 0o777 == 0o640
    # The former secret is another cluster's, and may be needed there.
    assert (tmp_path / "secret").read_text() == "the former one\n"
    assert found.cluster.secret_file == tmp_path / "secret-2"


def test_the_same_secret_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    for _ in range(2):
        apply(planned(path), lambda: HEAD)
    assert sorted(files(tmp_path)) == ["infiniswap.toml", "secret"]
    # One that others may read is not trusted with it.
    (tmp_path / "secret").chmod(0o644)
    assert planned(path).files[0].path == tmp_path / "secret-2"


def test_a_link_with_the_name_of_the_secret_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    (tmp_path / "elsewhere").write_text("x")
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    apply(planned(path), lambda: HEAD)
    assert (tmp_path / "elsewhere").read_text() == "x"
    assert loaded(path).cluster.secret_file == tmp_path / "secret-2"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secret": ""}, "not 256 random bits"),
        ({"secret": "password"}, "not 256 random bits"),
        ({"second_secret": "00" * 32}, "not random"),
        ({"peers": ["a b"]}, "not an address"),
        ({"broker": Broker("x:y", "5")}, "not a port"),
        ({"kind": "certificate"}, "no certificate"),
    ],
)
def test_an_offer_that_cannot_be_used_changes_nothing(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    offer = msgspec.structs.replace(OFFER, **changes)
    with pytest.raises(ProtocolMismatchError, match=why):
        planned(tmp_path / "infiniswap.toml", offer)


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": 'a"\n[daemon]\npool = "1G'},
        {"cluster": "a b"},
        {"slab_bytes": 4095},
        {"broker": Broker("10.0.0.9", "6")},
    ],
)
def test_values_that_the_configuration_refuses_change_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = tmp_path / "infiniswap.toml"
    path.write_text(OTHER)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="This host is unchanged"):
        apply(planned(path, msgspec.structs.replace(OFFER, **changes)), lambda: HEAD)
    assert files(tmp_path) == before


def test_a_file_that_cannot_be_changed_line_by_line_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    path.write_text("cluster = { ask_s = 3.0 }\n")
    with pytest.raises(ConfigError, match="this file cannot be changed"):
        apply(planned(path), lambda: HEAD)
    assert path.read_text() == "cluster = { ask_s = 3.0 }\n"


@pytest.mark.parametrize(
    "text",
    [
        "cluster = { ask_s = 3.0 }\n",
        '[cluster]\npeers = ["h:1"]  # mine\n',
        '[daemon]\nlisten = "127.0.0.1:9400"  # mine\n',
    ],
)
def test_such_a_file_is_found_before_the_password_is_sent(tmp_path: Path, text: str) -> None:
    path = tmp_path / "infiniswap.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be changed.*Nothing was sent"):
        check_changeable(path, ("daemon.listen",), "Nothing was sent.")
    assert path.read_text() == text


@pytest.mark.parametrize("text", [None, OTHER, MEMBER, '[daemon]\nslab = "1G"  # mine\n'])
def test_other_files_can_be_changed(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "infiniswap.toml"
    if text is not None:
        path.write_text(text)
    check_changeable(path, ("daemon.listen",))
    assert text is None or path.read_text() == text


# ------------------------------------------------------------------------ who stops it


def steps(path: Path) -> list[str]:
    found: list[str] = []
    apply(planned(path), lambda: HEAD, step=found.append)
    return found


@pytest.mark.parametrize("before", [None, OTHER, MEMBER])
@pytest.mark.parametrize("number", range(5))
def test_a_disk_that_is_full_at_any_step_changes_nothing(
    tmp_path: Path, before: str | None, number: int
) -> None:
    counted = steps(tmp_path / "count" / "infiniswap.toml") if _make(tmp_path / "count") else []
    assert len(counted) == 4
    place = tmp_path / "here"
    _make(place)
    path = place / "infiniswap.toml"
    if before is not None:
        path.write_text(before)
    as_before = files(place)
    if number == len(counted):
        apply(planned(path), lambda: HEAD)
        assert files(place) != as_before
        return
    with pytest.raises(SystemCallError, match=r"No space left.*unchanged.*Come again"):
        apply(planned(path), lambda: HEAD, "Come again.", _failing(number))
    assert files(place) == as_before


def _make(path: Path) -> bool:
    path.mkdir()
    return True


def _failing(number: int) -> Callable[[str], None]:
    left = [number]

    def step(name: str) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1

    return step


KILLED = """
import os, signal, sys
from pathlib import Path
from infiniswap.invitation.membership import apply, plan
from infiniswap.invitation.messages import Offer

left = [int(sys.argv[2])]
def step(name):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1

offer = Offer("h1", "default", "secret", 1 << 30, ["10.0.0.2:9400"], secret=sys.argv[3])
apply(plan(Path(sys.argv[1]), offer, b"", None), lambda: "# a file\\n", step=step)
"""


@pytest.mark.parametrize("before", [None, MEMBER])
def test_killed_at_any_step_the_host_is_as_it_was_and_can_join(
    tmp_path: Path, before: str | None
) -> None:
    path = tmp_path / "infiniswap.toml"
    if before is not None:
        path.write_text(before)
    for number in range(4):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(number), SECRET], check=False
        )
        assert done.returncode == -signal.SIGKILL
        # No configuration names a file of a join that did not end.
        assert (path.read_text() if path.exists() else None) == before
    apply(planned(path), lambda: HEAD)
    assert sorted(files(tmp_path)) == ["infiniswap.toml", "secret"]
    assert read_secret(tmp_path / "secret") == derive(bytes.fromhex(SECRET))


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"

    def step(name: str) -> None:
        if name == "name secret":
            (tmp_path / "secret").write_text("somebody else's")

    with pytest.raises(SystemCallError, match="File exists"):
        apply(planned(path), lambda: HEAD, step=step)
    assert files(tmp_path) == {"secret": b"somebody else's"}


def test_the_configuration_is_never_half_written(tmp_path: Path) -> None:
    """Whoever has it open reads the former one to its end."""
    path = tmp_path / "infiniswap.toml"
    path.write_text(OTHER)
    os.link(path, tmp_path / "former")
    apply(planned(path), lambda: HEAD)
    assert (tmp_path / "former").read_text() == OTHER
    assert path.read_text() != OTHER


def test_two_joins_at_a_time_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "infiniswap.toml"
    with membership._locked(tmp_path):
        with pytest.raises(ConflictError, match="another `infiniswap join` is at work"):
            check_writable(path)
        with pytest.raises(ConflictError, match="another `infiniswap join` is at work"):
            apply(planned(path), lambda: HEAD)
    assert not files(tmp_path)


def test_a_directory_that_cannot_be_written_is_told_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    check_writable(tmp_path / "new" / "infiniswap.toml")
    assert not files(tmp_path / "new")
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file" / "x.toml", Path("/proc/none/x.toml")):
        with pytest.raises((SystemCallError, NotPermittedError), match="Nothing was sent"):
            check_writable(where, "Nothing was sent.")
