# SPDX-License-Identifier: Apache-2.0
"""A donor's daemon is killed or restarted under a device that has its pages there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import SLAB, WAIT_S, Cluster, Device, Donor, until
from support.devices.copied import Copied
from support.machine.trap import Trap

from infiniswap.donor import home
from infiniswap.system import mounts
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_tool("nbdcopy"),
]

SIZE = 32 * MIB
SLABS = SIZE // SLAB
PAGES = SIZE // PAGE_BYTES
PATIENT = {
    "INFINISWAP_DEVICE_HEDGE_MS": "0",  # what is read from the backup shall mean something
    "INFINISWAP_POLICY_SUSPEND_S": "60",  # a slow machine restarts slowly
}


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def status_of(cluster: Cluster, donor: Donor) -> Any:
    """What the daemon says of itself."""
    text = cluster.ok("status", "--json", INFINISWAP_CLUSTER_PEERS=donor.address)
    return json.loads(text)["donors"][0]["status"]


class Lent:
    """A device with every page at one donor, whose port is its own."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
        self.donor, self.device = self._start()
        self._contents = Copied(self.device, directory)
        self.read_back = self._contents.read_back
        self.write()
        until(lambda: self.on_donors() == PAGES, "pages that are all there")

    def _start(self) -> tuple[Donor, Device]:
        donor = self.cluster.donor(port=free_port())
        return donor, self.cluster.start("--frontend", "nbd-socket", size=str(SIZE), **PATIENT)

    def write(self) -> None:
        """Other contents."""
        self._contents.draw(SIZE)
        self._contents.write()

    def on_donors(self) -> int:
        return int(self.device.status["pages_on_donors"])

    def slabs(self, state: str) -> int:
        return int(self.device.status["slabs"].get(state, 0))

    def donor_status(self) -> Any:
        return status_of(self.cluster, self.donor)

    def home(self) -> Path:
        """Where the donor's slabs are."""
        return next(iter((self.cluster.root / "donors").iterdir()))

    def restart(self, **changes: str) -> Donor:
        self.cluster.env.update(changes)
        self.donor = self.cluster.successor(self.donor)
        return self.donor


@pytest.fixture
def lent(cluster: Cluster, tmp_path: Path) -> Lent:
    return Lent(cluster, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_donor_serves_the_same_leases_with_their_contents(
    lent: Lent, number: signal.Signals
) -> None:
    names = sorted(path.name for path in (lent.home() / "slabs").glob("*.mapped.*"))
    assert len(names) == SLABS
    lent.donor.end(number)
    until(lambda: lent.slabs("suspended") == SLABS, "slabs that wait for their donor")
    assert lent.read_back()["pages_in_backup"] == PAGES  # meanwhile
    donor = lent.restart()
    until(lambda: lent.slabs("mapped") == SLABS, "slabs that are resumed")
    assert lent.on_donors() == PAGES
    counted = lent.read_back()
    assert (counted["pages_in_remote"], counted["pages_in_backup"]) == (PAGES, 0)
    assert counted["requests_failed"] == counted["crc_errors_remote"] == 0
    assert sorted(path.name for path in (lent.home() / "slabs").glob("*.mapped.*")) == names
    assert "lease 1 reclaimed" in donor.log
    assert "back with the same lease" in lent.device.log
    # Once more: what was taken over is kept like any other.
    donor.end(signal.SIGKILL)
    lent.restart()
    until(lambda: lent.slabs("mapped") == SLABS, "slabs that are resumed")
    assert lent.read_back()["pages_in_backup"] == 0


def with_hosts(hosts: Path) -> tuple[str, ...]:
    """A command that executes another one with that file as its /etc/hosts."""
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, str(hosts))


class Named(Lent):
    """A device that knows its donor by a name, for as long as anybody can resolve it."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._hosts = directory / "hosts"
        self._hosts.write_text("127.0.0.2 donor.test\n127.0.0.3 donor.test\n")
        super().__init__(cluster, directory)

    def daemon(self, port: int) -> Donor:
        return self.cluster.donor(host="127.0.0.2", port=port)

    def _start(self) -> tuple[Donor, Device]:
        donor, name = self.daemon(free_port()), self.cluster.name()
        command = [
            *with_hosts(self._hosts),
            sys.executable,
            "-m",
            "infiniswap",
            "device",
            "start",
            name,
        ]
        command += ["--donors", f"donor.test:{donor.control}"]
        command += ["--frontend", "nbd-socket", "--size", str(SIZE)]
        subprocess.run(command, env={**self.cluster.env, **PATIENT}, timeout=WAIT_S, check=True)
        return donor, Device(self.cluster, name)

    def forget_name(self) -> None:
        self._hosts.write_text("")


@pytest.mark.requires_tool("unshare", "mount")
def test_a_donor_is_found_again_where_nobody_can_resolve_its_name(
    cluster: Cluster, tmp_path: Path
) -> None:
    named = Named(cluster, tmp_path)
    port = named.donor.control
    named.donor.end(signal.SIGKILL)
    until(lambda: named.slabs("suspended") == SLABS, "slabs that wait for their donor")
    named.forget_name()
    named.daemon(port)
    until(lambda: named.slabs("mapped") == SLABS, "slabs that are resumed")
    assert named.read_back()["pages_in_backup"] == 0
    assert f"donor donor.test:{port}: back with the same lease" in named.device.log


@pytest.mark.requires_tool("unshare", "mount")
def test_a_donor_serves_pages_at_each_address_of_its_name(
    cluster: Cluster, tmp_path: Path, secret_file: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 donor.test\n127.0.0.3 donor.test\n127.0.0.2 donor.test\n")
    donor = cluster.donor(
        *("--secret-file", str(secret_file)),
        host="donor.test",
        port=free_port(),
        prefix=with_hosts(hosts),
    )
    for host in ("127.0.0.2", "127.0.0.3"):
        for port in (donor.control, donor.data):
            socket.create_connection((host, port), WAIT_S).close()


def test_what_is_written_while_the_donor_is_away_is_not_read_from_it(lent: Lent) -> None:
    lent.donor.end(signal.SIGKILL)
    until(lambda: lent.slabs("suspended") == SLABS, "slabs that wait for their donor")
    lent.write()
    assert lent.on_donors() == 0
    lent.restart()
    until(lambda: lent.slabs("mapped") == SLABS, "slabs that are resumed")
    assert lent.read_back()["crc_errors_remote"] == 0


def test_a_donor_that_has_lost_its_slabs_is_not_taken_for_its_former_self(lent: Lent) -> None:
    lent.donor.end(signal.SIGKILL)
    assert "given back" in lent.cluster.ok("daemon", "--release")
    assert not (lent.cluster.root / "donors").exists()
    lent.restart()
    until(
        lambda: "the daemon was restarted without this lease" in lent.device.log,
        "a lease that is given up",
    )
    assert lent.read_back()["crc_errors_remote"] == 0


def test_files_that_are_not_what_they_should_be_are_not_served(lent: Lent) -> None:
    slabs = lent.home() / "slabs"
    short, foreign = next(slabs.glob("*.mapped.*")), slabs / "core.1234"
    lent.donor.end(signal.SIGKILL)
    os.truncate(short, SLAB - PAGE_BYTES)
    foreign.write_bytes(b"somebody's")
    (lent.home() / "leases" / "7.json").write_text('{"lease": 8}')
    donor = lent.restart()
    until(lambda: lent.slabs("suspended") == 0, "slabs that are resumed, or given up")
    for what in (f"{short.name}: not of the size", "core.1234: not a name", "7.json"):
        assert what in donor.log
    assert not foreign.exists()
    counted = lent.read_back()
    assert counted["pages_in_remote"] >= (SLABS - 1) * SLAB // PAGE_BYTES
    assert counted["requests_failed"] == counted["crc_errors_remote"] == 0


@pytest.mark.parametrize("what", ["boot_id", "donor_id", "no record", "slab size"])
def test_what_another_daemon_has_left_is_not_served(lent: Lent, what: str) -> None:
    record = lent.home() / "donor.json"
    lent.donor.end(signal.SIGKILL)
    fields = json.loads(record.read_text())
    match what:
        case "boot_id":
            fields["boot_id"] = "00000000-0000-0000-0000-000000000000"
        case "donor_id":
            fields["donor_id"] = "00000000-0000-0000-0000-000000000000"
        case "slab size":
            fields["slab_bytes"] *= 2
    record.unlink()
    if what != "no record":
        record.write_text(json.dumps(fields))
    donor = lent.restart()
    assert "is not served" in donor.log
    until(
        lambda: "the daemon was restarted without this lease" in lent.device.log,
        "a lease that is given up",
    )
    assert lent.read_back()["crc_errors_remote"] == 0


def test_an_interrupted_donor_gives_everything_back(lent: Lent) -> None:
    assert lent.donor.end(signal.SIGINT) == 0
    assert not (lent.cluster.root / "donors").exists()
    until(lambda: lent.slabs("suspended") == 0, "slabs that are given up")
    assert lent.read_back()["requests_failed"] == 0


def test_memory_is_given_back_when_no_daemon_comes_for_it(lent: Lent) -> None:
    cluster = lent.cluster
    lent.donor.end(signal.SIGTERM)
    cluster.ok("daemon", "--release", "--donor", "another")
    found = home.leftovers(cluster.root / "donors")
    assert [one.used_bytes >= SIZE for one in found] == [True]
    told = json.loads(cluster.cli("doctor", "--json").stdout)
    (finding,) = [one for one in told if str(found[0].path) in one["what"]]
    assert finding["state"] == "degraded"
    assert "infiniswap daemon --release" in finding["mend"]
    # A daemon has been there since: it is not this one's to release.
    lent.restart(INFINISWAP_DAEMON_LEASE_GRACE_S="0.1")
    until(lambda: lent.slabs("mapped") == SLABS, "slabs that are resumed")
    assert not home.release(found[0])
    lent.donor.end(signal.SIGTERM)
    assert not home.release(found[0])
    until(lambda: not (cluster.root / "donors").exists(), "memory that is given back by itself")
    assert lent.read_back()["requests_failed"] == 0


class Trapped(Lent):
    """A daemon that was started in a directory which another user has prepared."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.trap = Trap(directory)
        super().__init__(cluster, directory)

    def _start(self) -> tuple[Donor, Device]:
        self.cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "1"
        donor = self.cluster.donor(port=free_port(), prefix=self.trap.prefix)
        return donor, self.cluster.start("--frontend", "nbd-socket", size=str(SIZE), **PATIENT)


def test_what_gives_the_memory_back_runs_nothing_of_the_daemons_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    lent = Trapped(cluster, tmp_path)
    homes = cluster.root / "donors"
    assert list(homes.iterdir())
    assert lent.donor.end(signal.SIGTERM) == 0
    assert "stays in" in lent.donor.log
    until(lambda: not homes.exists(), "memory that is given back")
    assert not lent.trap.ran.exists()


def test_leases_that_nobody_reclaims_are_released(lent: Lent) -> None:
    lent.donor.end(signal.SIGKILL)
    lent.device.remove()
    donor = lent.restart(INFINISWAP_DAEMON_LEASE_GRACE_S="0.1")
    until(lambda: "expired: its device did not come back" in donor.log, "a lease that expires")
    assert "[lease-expired]" in donor.log
    until(lambda: lent.donor_status()["pool"]["slabs_mapped"] == 0, "slabs that are free")
    assert donor.end(signal.SIGTERM) == 0
    assert not (lent.cluster.root / "donors").exists()


def test_a_donor_without_slabs_lent_leaves_nothing(cluster: Cluster) -> None:
    donor = cluster.donor(port=free_port())
    path = next(iter((cluster.root / "donors").iterdir()))
    mount = mounts.mount_of(path)
    assert (mount.fs_type, mount.mount_point) == ("tmpfs", str(path))
    assert {"nosuid", "nodev", "noexec"} <= mount.options
    assert donor.end(signal.SIGTERM) == 0
    assert not path.parent.exists()


def test_two_daemons_do_not_share_slabs(cluster: Cluster) -> None:
    donor = cluster.donor(port=free_port())
    with pytest.raises(AssertionError, match="in use"):
        cluster.donor(port=donor.control)
    assert donor.process.poll() is None
    assert donor.end(signal.SIGTERM) == 0


def test_a_donor_that_cannot_keep_its_slabs_says_so(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = "/proc/nothing/here"
    donor = cluster.donor(port=free_port())
    (sentence,) = status_of(cluster, donor)["degraded"]
    assert "a restart of the daemon loses what is lent" in sentence
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(cluster.root / "donors")
