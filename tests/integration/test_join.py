# SPDX-License-Identifier: Apache-2.0
"""`infiniswap invite` and `infiniswap join` on loopback, with the mistakes that people make."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.devices.cluster import PROGRAM, SLAB, WAIT_S, Cluster, environment, until

from infiniswap import config as configuration
from infiniswap.cli import join
from infiniswap.cli.main import main
from infiniswap.control import pki
from infiniswap.control.roles import Role
from infiniswap.invitation import membership
from infiniswap.invitation.messages import Offer
from infiniswap.invitation.take_up import take_up
from infiniswap.keys import derive
from infiniswap.secret import new_secret, read_secret
from infiniswap.units import HostPort

SECRET = new_secret()


@dataclass
class Inviter:
    """A running `infiniswap invite`.

    Attributes:
        token: that it has printed.
    """

    process: subprocess.Popen[str]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def token(self) -> str:
        found = re.search(r"infiniswap join (\S+)\n", self.said)
        assert found, self.said
        return found[1]

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_S)


@pytest.fixture
def inviting(tmp_path: Path) -> Iterator[Callable[..., Inviter]]:
    """Starts `infiniswap invite` with more arguments."""
    started: list[Inviter] = []

    def start(*arguments: str, text: str = "", listen: str = "127.0.0.1:0") -> Inviter:
        place = tmp_path / "a"
        config = place / "infiniswap.toml"
        if not place.exists():
            place.mkdir()
            (place / "secret").write_text(f"{SECRET}\n")
            (place / "secret").chmod(0o600)
            secret = f'[cluster]\nsecret_file = "{place}/secret"\n'
            config.write_text(text or f"{secret}ask_s = 0.1\n")
        output = tmp_path / f"invite-{len(started)}"
        with output.open("w") as file:
            command = [*PROGRAM, "invite", "--config", str(config), "--listen", listen, *arguments]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(),
            )
        found = Inviter(process, output)
        started.append(found)
        until(lambda: process.poll() is not None or "Waiting;" in found.said, "an invitation")
        return found

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        assert "Traceback" not in each.said, each.said
        assert SECRET not in each.said


@dataclass(frozen=True, slots=True)
class Done:
    """What a command has said, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs a command of this process."""
    for name in os.environ:
        if name.startswith("INFINISWAP_CL"):
            monkeypatch.delenv(name)

    def command(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert SECRET not in said.out + said.err
        return Done(code, said.out, said.err)

    return command


def loaded(path: Path) -> configuration.Config:
    return configuration.load(path, environ={})


def test_two_hosts_know_each_other_after_two_commands(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    host, path = inviting(), tmp_path / "b" / "infiniswap.toml"
    dry = run("join", host.token, "--config", path, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert f"would write: {path.parent}/secret (mode 0600)\n" in dry.out
    assert f'cluster.secret_file = "{path.parent}/secret"\n' in dry.out
    assert "the token is still good" in dry.out
    assert not path.parent.exists()

    arguments = ("--config", path, "--lend", "--listen", "10.0.0.3")
    done = run("join", host.token, *arguments)
    assert (done.code, done.err) == (0, ""), done
    assert host.end() == 0
    assert read_secret(path.parent / "secret") == derive(bytes.fromhex(SECRET))
    found = loaded(path)
    assert found.daemon.listen == HostPort("10.0.0.3", 9400)
    assert "joined: " in host.said
    # Each end says what the inviting host did about the new donor.
    for said in (host.said, done.out):
        assert "has added 10.0.0.3:9400 to cluster.peers" in said
    assert loaded(tmp_path / "a" / "infiniswap.toml").peers() == (HostPort("10.0.0.3", 9400),)
    # What comes next needs root, as `join` does.
    for action in ("status", "run --local 4G", "daemon"):
        assert f" sudo infiniswap {action} " in done.out.replace("\n", " ")
    # A whole, commented file, as `infiniswap init` writes it.
    assert "written by `infiniswap join`" in path.read_text()
    assert run("config", "check", path).code in (0, 3)
    assert not list(path.parent.glob(".*"))

    again = run("join", host.token, "--config", tmp_path / "c" / "infiniswap.toml")
    assert again.code == 6
    assert "good once and for ten minutes" in again.err


def test_the_donors_of_the_inviting_host_come_along(
    tmp_path: Path,
    inviting: Callable[..., Inviter],
    run: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "a"
    (tmp_path / "peers").write_text("10.0.0.8\n127.0.0.1:9400\n")
    text = (
        f'[cluster]\nsecret_file = "{place}/secret"\npeers = ["10.0.0.7"]\nname = "east"\n'
        f'peers_file = "{tmp_path}/peers"\nask_s = 0.1\n'
        '[daemon]\nlisten = "10.255.255.2:9400"\nslab = "64M"\n'
    )
    host, path = inviting(text=text), tmp_path / "b.toml"
    assert "the daemon of this host does not answer at 10.255.255.2:9400" in host.said
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\n{host.token}\n"))
    assert run("join", "-", "--config", path).code == 2  # an empty line
    assert run("join", "-", "--config", path).code == 0
    found = loaded(path)
    assert [str(peer) for peer in found.peers()] == [
        "10.255.255.2:9400",
        "10.0.0.7:9400",
        "10.0.0.8:9400",
    ]
    assert (found.cluster.name, found.device.slab_bytes) == ("east", 64 << 20)
    assert host.end() == 0


@pytest.mark.requires_native
@pytest.mark.requires_root
def test_a_daemon_that_flags_have_started_is_found(
    tmp_path: Path,
    inviting: Callable[..., Inviter],
    run: Callable[..., Done],
    cluster: Cluster,
) -> None:
    secret, path = tmp_path / "a" / "secret", tmp_path / "b.toml"
    # Made by the fixture with the first invitation.
    first = inviting(text=f'[cluster]\nsecret_file = "{secret}"\nask_s = 30.0\n')
    assert first.end(signal.SIGINT) == 130
    donor = cluster.donor("--secret-file", str(secret))
    config = tmp_path / "a" / "infiniswap.toml"
    config.write_text(f'{config.read_text()}[daemon]\nlisten = "{donor.address}"\n')
    host = inviting()
    assert "does not answer" not in host.said
    assert run("join", host.token, "--config", path).code == 0
    found = loaded(path)
    assert [str(peer) for peer in found.peers()] == [donor.address]
    assert found.device.slab_bytes == SLAB  # the daemon's, not the configuration's


def test_a_session_key_in_place_of_the_secret(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    host, path = inviting("--session-key"), tmp_path / "b.toml"
    assert run("join", host.token, "--config", path).code == 0
    keys = read_secret(tmp_path / "secret")
    assert keys.session == derive(bytes.fromhex(SECRET)).session
    assert keys.operator is None
    assert host.end() == 0


def test_a_certificate_for_a_key_that_stays_on_its_host(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    ca, place = tmp_path / "ca", tmp_path / "own"
    assert run("init", "--authority", ca).code == 0
    made = ("--certificate", place, "--host", "h1", "--role", "consumer", "--role", "donor")
    assert run("init", "--authority", ca, *made).code == 0
    text = (
        f'[cluster]\nca_file = "{place}/ca.pem"\ncertificate_file = "{place}/certificate.pem"\n'
        f'key_file = "{place}/key.pem"\nask_s = 0.1\n'
    )
    refused = inviting(text=text)
    assert refused.end() == 2
    assert "give --authority DIR, --host NAME and --role" in refused.said
    host = inviting("--authority", str(ca), "--host", "h2", "--role", "consumer")
    assert "a certificate as h2 (consumer)" in host.said
    path = tmp_path / "b" / "infiniswap.toml"
    assert run("join", host.token, "--config", path).code == 0
    assert host.end() == 0
    files = loaded(path).certificates()
    assert files is not None
    assert pki.load(files, "default", Role.CONSUMER).shown.endswith("h2")
    assert files.key.stat().st_mode & 0o777 == 0o600

    other = run("init", "--authority", tmp_path / "other")
    assert other.code == 0
    stranger = inviting("--authority", str(tmp_path / "other"), "--host", "h", "--role", "donor")
    assert stranger.end() == 2
    assert "do not trust this authority" in stranger.said


# -------------------------------------------------------------------------------- mistakes


def test_a_host_in_a_cluster_needs_replace(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    host, path = inviting(), tmp_path / "b" / "infiniswap.toml"
    path.parent.mkdir()
    former = path.parent / "secret"
    former.write_text(f"{new_secret()}\n")
    former.chmod(0o600)
    text = f'[daemon]\npool = "8G" # mine\n[cluster]\nsecret_file = "{former}"\n'
    path.write_text(text)
    refused = run("join", host.token, "--config", path)
    assert refused.code == 9
    assert "belongs to a cluster already: cluster.secret_file. --replace puts" in refused.err
    dry = run("join", host.token, "--config", path, "--dry-run")
    assert (dry.code, path.read_text()) == (0, text)
    assert "joining needs --replace" in dry.out
    done = run("join", host.token, "--config", path, "--replace")
    assert done.code == 0
    assert f"left in place, and no longer used: {former}" in done.out
    assert loaded(path).cluster.secret_file == path.parent / "secret-2"
    assert 'pool = "8G" # mine' in path.read_text()


def test_a_host_without_a_cluster_cannot_invite(inviting: Callable[..., Inviter]) -> None:
    host = inviting(text="[cluster]\n")
    assert host.end() == 3
    assert "this host is in no cluster yet" in host.said
    assert "`infiniswap invite --new` makes one" in host.said


def test_a_new_cluster_of_two(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    text = "[device]\nqueues = 4 # mine\n"
    host, path = inviting("--new", text=text), tmp_path / "b" / "infiniswap.toml"
    own = tmp_path / "a" / "infiniswap.toml"
    # The secret that `infiniswap init --secret` had made.
    assert read_secret(own.parent / "secret") == derive(bytes.fromhex(SECRET))
    assert "queues = 4 # mine" in own.read_text()
    assert loaded(own).daemon.listen == HostPort("127.0.0.1", 9400)
    assert run("join", host.token, "--config", path).code == 0
    assert host.end() == 0
    again = inviting("--new")
    assert again.end() == 9
    assert "Leave --new out" in again.said


def test_a_new_cluster_where_nothing_was(tmp_path: Path, run: Callable[..., Done]) -> None:
    path = tmp_path / "new" / "infiniswap.toml"
    process = subprocess.Popen(
        [*PROGRAM, "invite", "--new", "--config", str(path), "--listen", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"wrote: {path.parent}/secret\n"
        assert process.stdout.readline() == f"wrote: {path}\n"
        while not (found := re.search(r"infiniswap join (\S+)", process.stdout.readline())):
            assert process.poll() is None
        assert run("join", found[1], "--config", tmp_path / "b.toml").code == 0
    finally:
        process.kill()
        process.stdout.read()
        process.stdout.close()
        process.wait()
    assert (tmp_path / "secret").read_bytes() == (path.parent / "secret").read_bytes()
    assert "written by `infiniswap invite`" in path.read_text()
    assert (path.parent / "secret").stat().st_mode & 0o777 == 0o600


def test_a_token_with_a_slip_is_told_apart_from_one_that_is_refused(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    host, path = inviting(), tmp_path / "b.toml"
    slip = host.token[:-1] + ("a" if host.token[-1] != "a" else "b")
    for wrong in (slip, host.token[:40], "", SECRET, "--", "10.0.0.2"):
        done = run("join", "--config", path, "--", wrong)
        assert done.code == 2, wrong
        assert re.search("token|TOKEN", done.err), wrong
        assert not path.exists()
    assert run("join", host.token.upper(), "--config", path).code == 0


def test_ctrl_c_withdraws_the_invitation(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    host = inviting()
    assert host.end(signal.SIGINT) == 130
    assert "the invitation is withdrawn" in host.said
    done = run("join", host.token, "--config", tmp_path / "b" / "infiniswap.toml")
    assert (done.code, "while `infiniswap invite` runs" in done.err) == (6, True)
    assert not (tmp_path / "b").exists()


def test_two_invitations_at_one_port(inviting: Callable[..., Inviter]) -> None:
    first = inviting()
    port = re.search(r"127.0.0.1:(\d+) by TCP", first.said)
    assert port
    second = inviting(listen=f"127.0.0.1:{port[1]}")
    assert second.end() == 9
    assert "perhaps another invitation is open" in second.said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("invite", "--role", "donor"), "need --authority DIR"),
        (("invite", "--authority", "x"), "--authority needs --host NAME"),
        (("invite", "--authority", "x", "--host", "h", "--role", "donor"), "holds no authority"),
        (("invite", "--listen", "a b"), "not an address"),
        (
            ("invite", "--listen", "a..b", "--secret-file", "S"),
            "cannot be resolved",
        ),
        (("join", "x", "--listen", "10.0.0.1"), "this is no token"),
        (("join",), "TOKEN is missing"),
    ],
)
def test_arguments_that_make_no_sense(
    tmp_path: Path, run: Callable[..., Done], arguments: tuple[str, ...], said: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    secret.chmod(0o600)
    given = [str(secret) if each == "S" else each for each in arguments]
    done = run(*given)
    assert done.code == 2, done
    assert said in done.err


@pytest.mark.requires_root
@pytest.mark.requires_tool("unshare", "mount")
@pytest.mark.parametrize(
    ("options", "said"),
    [("ro", "Read-only file system"), ("size=16k", "No space left on device")],
)
def test_a_place_that_cannot_be_written_does_not_use_the_token_up(
    tmp_path: Path,
    inviting: Callable[..., Inviter],
    run: Callable[..., Done],
    options: str,
    said: str,
) -> None:
    host, place = inviting(), tmp_path / "b"
    place.mkdir()
    join = [*PROGRAM, "join", host.token, "--config", f"{place}/infiniswap.toml"]
    script = f'mount -t tmpfs -o {options} none "$1" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(place), *join],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 10, done
    assert said in done.stderr
    assert "this did not use the token up" in done.stderr
    assert run("join", host.token, "--config", place / "infiniswap.toml").code == 0


def test_a_configuration_that_cannot_be_changed_does_not_use_the_token_up(
    tmp_path: Path, inviting: Callable[..., Inviter], run: Callable[..., Done]
) -> None:
    host, path = inviting(), tmp_path / "infiniswap.toml"
    path.write_text("cluster = { ask_s = 1.0 }\n")
    for more in ([], ["--dry-run"]):
        done = run("join", host.token, "--config", path, *more)
        assert done.code == 3
        assert "this file cannot be changed" in done.err
        assert "this did not use the token up" in done.err
    path.write_text('[device]\nslab = "1G"  # mine\n')
    assert run("join", host.token, "--config", path).code == 0
    assert 'slab = "1G"  # mine' in path.read_text()


def test_a_dry_run_shows_no_control_character_of_the_inviting_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "infiniswap.toml"
    offer = Offer("h1", "\x1b[31mred\x9b0m", "secret", 1 << 30, [])
    wanted = membership.plan(path, offer, b"", None, preview=True)
    join._show(wanted, join._Host(path, configuration.Config(), []))
    said = capsys.readouterr().out
    assert 'cluster.name = "?[31mred?0m"' in said
    assert all(line.isprintable() for line in said.splitlines())


# ----------------------------------------------------------------------- the inviting host's list


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[cluster]\npeers = ["10.0.0.3"]\n', "among its donors already"),
        ('[cluster]\ndiscovery = "mqtt"\n[mqtt]\nbroker = "b"\n', "on the broker"),
        ("cluster = { ask_s = 1.0 }\n", 'on h1, add "10.0.0.3:9400" to peers'),
        ("nonsense\n", 'on h1, add "10.0.0.3:9400" to peers'),
        (None, 'on h1, add "10.0.0.3:9400" to peers'),
    ],
)
def test_a_list_that_needs_no_change_or_allows_none(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "infiniswap.toml"
    if text is not None:
        path.write_text(text)
    assert said in take_up(path, "h1", "10.0.0.3:9400")
    assert (path.read_text() if path.exists() else None) == text


def test_a_configuration_behind_a_link_stays_there(tmp_path: Path) -> None:
    kept = tmp_path / "kept.toml"
    kept.write_text("[cluster]\n")
    path = tmp_path / "infiniswap.toml"
    path.symlink_to(kept)
    assert "h1 has added" in take_up(path, "h1", "10.0.0.3:9400")
    assert path.is_symlink()
    assert kept.read_text() == '[cluster]\npeers = ["10.0.0.3:9400"]\n'


def test_a_file_of_peers_gets_a_line_and_keeps_its_owner_and_mode(tmp_path: Path) -> None:
    peers, path = tmp_path / "peers", tmp_path / "infiniswap.toml"
    peers.write_text("# ours\n10.0.0.7")
    peers.chmod(0o664)
    path.write_text(f'[cluster]\npeers_file = "{peers}"\n')
    assert "read that within seconds" in take_up(path, "h1", "10.0.0.3")
    assert peers.read_text() == "# ours\n10.0.0.7\n10.0.0.3:9400\n"
    assert peers.stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("lends", ["127.0.0.1:9400", "0.0.0.0", "a b", ""])
def test_an_address_that_leads_nowhere_is_not_taken_up(tmp_path: Path, lends: str) -> None:
    path = tmp_path / "infiniswap.toml"
    path.write_text("[cluster]\n")
    assert "address" in take_up(path, "h1", lends)
    assert path.read_text() == "[cluster]\n"


# ----------------------------------------------------------------------------- who has no donor


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.requires_memcg
def test_run_without_configuration_says_in_two_lines_how_to_get_a_donor(tmp_path: Path) -> None:
    directories = {
        "INFINISWAP_DEVICE_RUN_DIR": f"{tmp_path}/run",
        "INFINISWAP_DEVICE_BACKUP_DIR": f"{tmp_path}/backup",
    }
    done = subprocess.run(
        [*PROGRAM, "run", "--local", "32M", "--", "true"],
        capture_output=True,
        text=True,
        env=environment({"INFINISWAP_CONFIG": "/dev/null", **directories}),
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 6
    (said,) = done.stderr.splitlines()
    assert len(textwrap.wrap(said, 100, break_long_words=False, break_on_hyphens=False)) == 2
    assert "sudo infiniswap invite" in said
    assert "join" in said
