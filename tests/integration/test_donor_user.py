# SPDX-License-Identifier: Apache-2.0
"""A daemon with a user of its own and no capability, started as its unit starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import (
    PROGRAM,
    SLAB,
    Cluster,
    Device,
    Donor,
    children,
    free_port,
    until,
    wait_ended,
)
from support.devices.copied import Copied
from support.machine.mount_space import changed_mounts

from infiniswap import errors
from infiniswap.donor import home
from infiniswap.rights import DONOR_USER
from infiniswap.system import mounts
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_tool("setpriv", "nbdcopy", "unshare", "nsenter"),
]

USER = "nobody"
UID = 65534
AS_USER = (
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
    *("--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
)
SIZE = 32 * MIB


class Own:
    """The daemon of another user on this host, and what root prepares for it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.copies = cluster.root / "private" / "copies"
        self.donors = cluster.root / "donors"
        self.port = free_port()
        cluster.root.chmod(0o1777)  # where tests of ours put the ready file
        self.state = cluster.root / "state"
        self.state.mkdir(exist_ok=True)
        os.chown(self.state, UID, UID)
        self.secret = cluster.root / "secret"
        cluster.ok("init", "--secret", str(self.secret))
        cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"] = str(self.secret)
        cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
        cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = "60"
        cluster.env["INFINISWAP_DEVICE_HEDGE_MS"] = "0"

    def prepare(self, *args: str, pool: str = "256M") -> str:
        """As ExecStartPre= does; returns what it says."""
        done = self.try_prepare("--pool", pool, "--headroom", "16M", *args)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def try_prepare(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The same, which may fail."""
        # Nobody else may make them first.
        for path in (self.donors, self.copies.parent):
            path.mkdir(exist_ok=True)
        listen = ("--listen", f"127.0.0.1:{self.port}", "--slab", str(SLAB))
        prepare = ("daemon", "--prepare", USER, "--copies", str(self.copies))
        return self.cluster.cli(*prepare, *listen, *args)

    def start(self, *args: str) -> Donor:
        """As ExecStart= does."""
        return self.cluster.donor(
            "--copies", str(self.copies), *args, port=self.port, prefix=AS_USER
        )

    def home(self) -> Path:
        """Where the slabs are."""
        (found,) = [path for path in self.donors.iterdir() if path.is_mount()]
        return found


@pytest.fixture
def own(cluster: Cluster) -> Own:
    return Own(cluster)


def capabilities(pid: int) -> set[str]:
    """Of every set."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {line.split()[1] for line in text.splitlines() if line.startswith("Cap")}


def test_it_lends_locked_memory_and_a_restart_keeps_it(own: Own, tmp_path: Path) -> None:
    own.prepare()
    donor = own.start()
    assert capabilities(donor.process.pid) == {"0" * 16}
    assert "a restart of the daemon loses what is lent" not in donor.log
    assert own.home().stat().st_uid == UID
    device = own.cluster.start(
        "--frontend", "nbd-socket", "--donors", donor.address, size=str(SIZE)
    )
    contents = Copied(device, tmp_path)
    contents.fill(SIZE)
    until(lambda: device.status["slabs"].get("mapped") == SIZE // SLAB, "mapped slabs")
    assert donor.end(signal.SIGTERM) == 0
    assert "stays in" in donor.log
    own.prepare()
    donor = own.start()
    until(lambda: device.status["slabs"].get("mapped") == SIZE // SLAB, "the same slabs")
    assert contents.read_back()["requests_failed"] == 0
    assert donor.end(signal.SIGINT) == 0
    (left,) = home.leftovers(own.donors)
    assert left.used_bytes == 0, "only root can unmount it"
    said = own.cluster.cli("doctor", "--json").stdout
    assert not [one for one in json.loads(said) if str(left.path) in one["what"]]
    own.cluster.ok("daemon", "--release")
    assert not own.donors.exists()


def test_what_a_killed_daemon_of_that_user_lent_is_given_back(own: Own, tmp_path: Path) -> None:
    own.cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "1"
    own.prepare()
    donor = own.start()
    device = own.cluster.start(
        "--frontend", "nbd-socket", "--donors", donor.address, size=str(SIZE)
    )
    Copied(device, tmp_path).fill(SIZE)
    until(lambda: device.status["slabs"].get("mapped") == SIZE // SLAB, "mapped slabs")
    (releaser,) = children(donor.process.pid)
    assert Path(f"/proc/{releaser}").stat().st_uid == UID
    donor.end(signal.SIGKILL)
    wait_ended(releaser)
    by_shell = ("sh", "-c", 'exec "$0" -c pass', sys.executable)
    if subprocess.run([*AS_USER, *by_shell], check=False).returncode == 0:
        assert not any(own.home().iterdir())
    else:  # this interpreter is in a home directory that is closed to that user
        assert any(own.home().iterdir())
    own.cluster.ok("daemon", "--release")


def test_slabs_of_a_daemon_of_root_are_handed_over(own: Own, tmp_path: Path) -> None:
    """An upgrade: the former release's daemon was root's."""
    donor = own.cluster.donor(port=own.port)
    device = own.cluster.start(
        "--frontend", "nbd-socket", "--donors", donor.address, size=str(SIZE)
    )
    contents = Copied(device, tmp_path)
    contents.fill(SIZE)
    until(lambda: device.status["slabs"].get("mapped") == SIZE // SLAB, "mapped slabs")
    assert donor.end(signal.SIGTERM) == 0
    for path in own.state.iterdir():
        os.chown(path, UID, UID)  # as systemd does, see StateDirectory=
    assert "are nobody's from now on" in own.prepare()
    owners = {path.stat().st_uid for path in own.home().rglob("*")}
    assert owners == {UID}
    own.start()
    until(lambda: device.status["slabs"].get("mapped") == SIZE // SLAB, "the same slabs")
    assert contents.read_back()["requests_failed"] == 0


def test_the_home_has_the_size_of_the_pool(own: Own) -> None:
    for pool, size in (("64M", 128 * MIB), ("32M", 96 * MIB)):
        own.prepare(pool=pool)
        room = os.statvfs(own.home())
        assert room.f_blocks * room.f_frsize == size
        (mount,) = [one for one in mounts.mounts() if one.mount_point == str(own.home())]
        assert {"nosuid", "nodev", "noexec"} <= mount.options
    own.cluster.ok("daemon", "--release")


def test_it_reads_copies_of_files_that_are_roots(own: Own, tmp_path: Path) -> None:
    token = own.cluster.root / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-sixteen-bytes")
    own.cluster.env["INFINISWAP_CLUSTER_METRICS_TOKEN_FILE"] = str(token)
    own.prepare()
    assert {path.name for path in own.copies.iterdir()} == {
        "cluster.secret_file",
        "cluster.metrics_token_file",
    }
    for path in own.copies.iterdir():
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (UID, 0o400)
    assert (own.copies.stat().st_uid, own.copies.stat().st_mode & 0o777) == (0, 0o755)
    donor = own.start()
    assert own.cluster.donor_row(donor)["state"] == "serving"
    # A new one comes with a reload; one that is no longer named goes.
    del own.cluster.env["INFINISWAP_CLUSTER_METRICS_TOKEN_FILE"]
    own.prepare()
    assert [path.name for path in own.copies.iterdir()] == ["cluster.secret_file"]


def test_a_file_that_cannot_be_used_is_named_and_the_daemon_does_not_start(own: Own) -> None:
    own.secret.chmod(0o644)
    done = own.try_prepare("--pool", "64M")
    assert done.returncode == errors.ConfigError.exit_code
    assert "has mode 0644" in done.stderr
    own.cluster.program = (*AS_USER, *own.cluster.program)
    listen = ("--listen", f"127.0.0.1:{own.port}", "--pool", "64M", "--slab", str(SLAB))
    done = own.cluster.cli("daemon", "--copies", str(own.copies), *listen)
    own.cluster.program = own.cluster.program[len(AS_USER) :]
    # systemd is told not to try again.
    assert done.returncode == errors.ConfigError.exit_code
    assert str(own.secret) in done.stderr
    assert "the log of the unit say why" in done.stderr


@pytest.fixture
def donor_user(own: Own) -> Iterator[tuple[str, ...]]:
    """A command that executes others where the service's user is there, and is our stand-in."""
    users = own.cluster.root / "passwd"
    entry = f"{DONOR_USER}:x:{UID}:{UID}::/nonexistent:/bin/false"
    users.write_text(f"{Path('/etc/passwd').read_text()}{entry}\n")
    with changed_mounts('mount --bind "$1" /etc/passwd', users) as command:
        yield command


@pytest.fixture
def beside_own(own: Own, donor_user: tuple[str, ...]) -> Iterator[Own]:
    """Commands of root beside the daemon of that user, without a cluster secret."""
    del own.cluster.env["INFINISWAP_CLUSTER_SECRET_FILE"]
    own.prepare()
    own.start()
    assert (own.state / "host-secret").stat().st_uid == UID
    refused = own.cluster.cli("donor", "drain", own.cluster.addresses)
    assert "belongs to another user" in refused.stderr
    own.cluster.program = (*donor_user, *PROGRAM)
    try:
        yield own
    finally:
        for name in own.cluster.names():
            own.cluster.cli("device", "remove", name)
        own.cluster.program = PROGRAM


def test_root_uses_the_secret_that_the_daemons_user_has_made(beside_own: Own) -> None:
    """On a host without a cluster secret. The secret of any other user is refused."""
    cluster, (donor,) = beside_own.cluster, beside_own.cluster.donors
    cluster.ok("donor", "drain", donor.address)
    cluster.ok("donor", "undrain", donor.address)
    made = beside_own.state / "host-secret"
    made.rename(beside_own.state / "moved")
    made.symlink_to(beside_own.secret)  # root's, which would be refused to the daemon's user
    refused = cluster.cli("donor", "drain", donor.address)
    assert refused.returncode == errors.ConfigError.exit_code
    assert str(made) in refused.stderr


def mapped(device: Device, slabs: int) -> None:
    """Waits until the donor has let it in and lends so many slabs."""
    until(lambda: device.status["slabs"].get("mapped") == slabs, "mapped slabs")


def rewrite(device: Device, content: bytes) -> None:
    """Through the kernel, past its cache."""
    device.path.write_bytes(content)
    with device.path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.read(len(content)) == content


@pytest.mark.requires_fuse
@pytest.mark.requires_loop
def test_a_device_of_root_borrows_by_that_secret_and_so_does_its_successor(
    beside_own: Own,
) -> None:
    cluster = beside_own.cluster
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    device = cluster.start("--frontend", "fuse", size=str(SIZE))
    rewrite(device, os.urandom(SIZE))
    mapped(device, SIZE // SLAB)
    os.kill(device.processes()["active"], signal.SIGKILL)
    device.wait_take_over(1)
    rewrite(device, os.urandom(SIZE))
    mapped(device, SIZE // SLAB)
    for action in ("reload", "restart"):
        cluster.ok("device", action, device.name)
        mapped(device, SIZE // SLAB)
    assert "reload" not in "".join(device.status["degraded"])
    rewrite(device, os.urandom(SIZE))
    device.stop()
    cluster.ok("device", "start", device.name)
    rewrite(device, os.urandom(SIZE))
    mapped(device, SIZE // SLAB)


@pytest.mark.requires_swap
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
@pytest.mark.requires_memcg
def test_a_run_of_root_borrows_by_that_secret(beside_own: Own) -> None:
    job = ("run", "--local", "32M", "--size", "128M", "--frontend", "fuse")
    donors = ("--donors", beside_own.cluster.addresses)
    beside_own.cluster.ok(*job, *donors, "--", "true")


def test_others_cannot_stand_in_for_copies_or_state(own: Own) -> None:
    own.copies.mkdir(parents=True)
    os.chown(own.copies, UID, UID)
    done = own.try_prepare("--pool", "64M")
    assert done.returncode == errors.NotPermittedError.exit_code
    assert not list(own.copies.iterdir())
    os.chown(own.copies, 0, 0)
    os.chown(own.state, 0, 0)
    done = own.try_prepare("--pool", "64M")
    assert f"chown -R {USER}: {own.state}" in done.stderr
    own.cluster.ok("daemon", "--release")


def test_root_copies_nothing_that_the_daemons_user_could_put_there(own: Own) -> None:
    """A public certificate may lie anywhere, and is no secret: what it leads to may be one."""
    hidden, link = own.cluster.root / "hidden", own.state / "ca.pem"
    hidden.touch(mode=0o600)
    link.symlink_to(hidden)
    own.cluster.env |= {"INFINISWAP_MQTT_CA_FILE": str(link), "INFINISWAP_MQTT_TLS": "on"}
    done = own.try_prepare("--pool", "64M")
    assert done.returncode == errors.ConfigError.exit_code
    assert f"{link}: the daemon's user may write to" in done.stderr
    assert not own.copies.exists()


def test_root_makes_no_run_directory_where_the_daemons_user_could_put_a_link(own: Own) -> None:
    elsewhere, run = own.cluster.root / "elsewhere", own.state / "run"
    (elsewhere / "local").mkdir(parents=True)
    run.symlink_to(elsewhere)
    own.cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(run)
    done = own.try_prepare("--pool", "64M")
    assert done.returncode == errors.ConfigError.exit_code
    assert "daemon.run_dir" in done.stderr
    assert (elsewhere / "local").stat().st_uid == 0


def test_a_second_secret_is_checked_as_the_first_is(own: Own) -> None:
    second = own.cluster.root / "second"
    own.cluster.ok("init", "--secret", str(second))
    own.cluster.env["INFINISWAP_CLUSTER_SECOND_SECRET_FILE"] = str(second)
    second.chmod(0o644)
    done = own.try_prepare("--pool", "64M")
    assert done.returncode == errors.ConfigError.exit_code
    assert "has mode 0644" in done.stderr


@pytest.mark.parametrize("name", ["root", "no-such-user"])
def test_it_needs_a_user_of_its_own(cluster: Cluster, name: str) -> None:
    done = cluster.cli("daemon", "--prepare", name)
    assert done.returncode == errors.ConfigError.exit_code
