# SPDX-License-Identifier: Apache-2.0
"""A donor's daemon is killed or restarted under a device that has its pages there."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.devices.cluster import (
    PROGRAM,
    SLAB,
    WAIT_S,
    Cluster,
    Donor,
    free_port,
    until,
)
from support.devices.copied import Copied, for_want_of_donors
from support.machine.trap import Trap

from infiniswap import rights
from infiniswap.donor import home
from infiniswap.system import mounts
from infiniswap.system.memory import host_memory
from infiniswap.units import MIB, PAGE_BYTES

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_tool("nbdcopy"),
]

SIZE = 32 * MIB
SLABS = SIZE // SLAB
PAGES = SIZE // PAGE_BYTES
NOBODY = "00000000-0000-0000-0000-000000000000"
PATIENT = {
    "INFINISWAP_DEVICE_HEDGE_MS": "0",  # what is read from the backup shall mean something
    "INFINISWAP_POLICY_SUSPEND_S": "60",  # a slow machine restarts slowly
}


def home_in(cluster: Cluster) -> Path:
    """Where the slabs of its one donor are."""
    (found,) = [
        path for path in (cluster.root / "donors").iterdir() if path.is_dir() and path.is_mount()
    ]
    return found


def release_commands(donor_id: str) -> list[int]:
    """Processes that give a donor's memory back, or wait for the time to do so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().split(b"\0")
            # A shell with this in its arguments waits for the end of a daemon of root.
            if {b"--release", donor_id.encode()} <= {*command} and not command[0].endswith(b"sh"):
                found.append(int(path.parent.name))
    return found


class Lent:
    """A device with every page at one donor, whose port is its own.

    Args:
        host: where the donor listens.
        called: the donor's host as the device knows it.
        donor_by: a command that executes the daemon.
        device_by: one that executes the device's start.
    """

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        called: str = "",
        donor_by: tuple[str, ...] = (),
        device_by: tuple[str, ...] = (),
    ) -> None:
        self.cluster = cluster
        cluster.env.setdefault("INFINISWAP_DAEMON_LEASE_GRACE_S", "120")
        self.donor = cluster.donor(host=host, port=free_port(), prefix=donor_by)
        options = ("--frontend", "nbd-socket", "--donors", f"{called or host}:{self.donor.control}")
        cluster.program = (*device_by, *PROGRAM)
        self.device = cluster.start(*options, size=str(SIZE), **PATIENT)
        cluster.program = PROGRAM
        contents = Copied(self.device, directory)
        contents.fill(SIZE)
        self.read_back = contents.read_back

    def until_slabs(self, state: str, count: int = SLABS) -> None:
        """Until so many are in that state."""
        until(lambda: self.device.status["slabs"].get(state, 0) == count, f"{count} slabs {state}")

    def until_logged(self, words: str) -> None:
        """Until the device says so."""
        until(lambda: words in self.device.log, words)

    def home(self) -> Path:
        """Where the donor's slabs are."""
        return home_in(self.cluster)

    def mapped(self) -> list[str]:
        """Names of the files of slabs that a device has; free ones come and go."""
        names = sorted(path.name for path in (self.home() / "slabs").glob("slab.*.mapped.*"))
        assert names
        return names

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
    lent.until_slabs("suspended")
    assert lent.read_back()["pages_in_backup"] == PAGES  # meanwhile
    donor = lent.restart()
    lent.until_slabs("mapped")
    assert lent.device.status["pages_on_donors"] == PAGES
    counted = lent.read_back()
    assert (counted["pages_in"], for_want_of_donors(counted)) == (PAGES, 0)
    assert counted["pages_in_remote"] > 0
    assert counted["requests_failed"] == counted["crc_errors_remote"] == 0
    assert sorted(path.name for path in (lent.home() / "slabs").glob("*.mapped.*")) == names
    assert "lease 1 reclaimed" in donor.log
    assert "back with the same lease" in lent.device.log
    # Once more: what was taken over is kept like any other.
    donor.end(signal.SIGKILL)
    lent.restart()
    lent.until_slabs("mapped")
    assert for_want_of_donors(lent.read_back()) == 0


def with_hosts(hosts: Path) -> tuple[str, ...]:
    """A command that executes another one with that file as its /etc/hosts."""
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, str(hosts))


@pytest.mark.requires_tool("unshare", "mount")
def test_a_donor_is_found_again_where_nobody_can_resolve_its_name(
    cluster: Cluster, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 donor.test\n127.0.0.3 donor.test\n")
    named = Lent(
        cluster, tmp_path, host="127.0.0.2", called="donor.test", device_by=with_hosts(hosts)
    )
    port = named.donor.control
    named.donor.end(signal.SIGKILL)
    named.until_slabs("suspended")
    hosts.write_text("")
    cluster.donor(host="127.0.0.2", port=port)
    named.until_slabs("mapped")
    assert for_want_of_donors(named.read_back()) == 0
    assert f"donor donor.test:{port}: back with the same lease" in named.device.log


@pytest.mark.requires_tool("unshare", "mount")
def test_a_donor_serves_pages_at_each_address_of_its_name(
    cluster: Cluster, tmp_path: Path, secret_file: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.2 localhost\n127.0.0.3 localhost\n127.0.0.2 localhost\n")
    donor = cluster.donor(
        *("--secret-file", str(secret_file)),
        host="localhost",
        port=free_port(),
        prefix=with_hosts(hosts),
    )
    for host in ("127.0.0.2", "127.0.0.3"):
        for port in (donor.control, donor.data):
            socket.create_connection((host, port), WAIT_S).close()


def test_a_donor_that_has_lost_its_slabs_is_not_taken_for_its_former_self(lent: Lent) -> None:
    lent.donor.end(signal.SIGKILL)
    assert "given back" in lent.cluster.ok("daemon", "--release")
    assert not (lent.cluster.root / "donors").exists()
    lent.restart()
    lent.until_logged("the daemon was restarted without this lease")
    assert lent.read_back()["crc_errors_remote"] == 0


@pytest.mark.parametrize(
    "changes",
    [{"boot_id": NOBODY}, {"donor_id": NOBODY}, {"slab_bytes": 2 * SLAB}, None],
    ids=["boot_id", "donor_id", "slab size", "no record"],
)
def test_what_another_daemon_has_left_is_not_served(
    lent: Lent, changes: dict[str, object] | None
) -> None:
    record = lent.home() / "donor.json"
    lent.donor.end(signal.SIGKILL)
    fields = json.loads(record.read_text())
    record.unlink()
    if changes is not None:
        record.write_text(json.dumps({**fields, **changes}))
    donor = lent.restart()
    assert "is not served" in donor.log
    lent.until_logged("the daemon was restarted without this lease")
    assert lent.read_back()["crc_errors_remote"] == 0


def test_a_daemon_refuses_to_take_the_slabs_of_devices_of_protocol_1(lent: Lent) -> None:
    record = lent.home() / "donor.json"
    lent.donor.end(signal.SIGKILL)
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 1}))
    names = lent.mapped()
    with pytest.raises(AssertionError, match="devices of protocol version 1 have slabs here"):
        lent.cluster.donor(port=lent.donor.control)
    assert lent.mapped() == names
    assert "given back" in lent.cluster.ok("daemon", "--release")
    lent.restart()
    assert lent.read_back()["crc_errors_remote"] == 0


def test_the_slabs_of_devices_of_protocol_1_are_given_back_only_when_somebody_asks(
    lent: Lent,
) -> None:
    """The former release's daemon is stopped, and what it leaves behind is of this release. A
    device without a backup would lose its pages."""
    donors = lent.cluster.root / "donors"
    record = lent.home() / "donor.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 1}))
    names = lent.mapped()
    assert lent.donor.end(signal.SIGTERM) == 0
    done = lent.cluster.cli("daemon", "--release", "--after", "0.1")
    assert (done.returncode, "are kept for them" in done.stderr) == (9, True), done.stderr
    assert lent.mapped() == names
    assert "given back" in lent.cluster.ok("daemon", "--release")
    assert not donors.exists()
    assert lent.read_back()["requests_failed"] == 0


def test_an_interrupted_donor_gives_everything_back(lent: Lent) -> None:
    assert lent.donor.end(signal.SIGINT) == 0
    assert not (lent.cluster.root / "donors").exists()
    lent.until_slabs("suspended", 0)
    assert lent.read_back()["requests_failed"] == 0


@pytest.mark.parametrize("name", ["earlyoom", "sh"])
def test_a_daemon_that_earlyoom_ends_gives_everything_back(
    lent: Lent, tmp_path: Path, name: str
) -> None:
    """At once, and not after a grace period in which another program would be ended."""
    sender = tmp_path / name
    shutil.copy("/bin/sh", sender)
    donors, donor = lent.cluster.root / "donors", lent.donor
    with subprocess.Popen([sender, "-c", f"kill -TERM {donor.process.pid}; read line"]) as sending:
        assert donor.process.wait(WAIT_S) == 0
        sending.kill()
    assert donors.exists() == (name == "sh")
    assert ("ended for want of memory by process" in donor.log) == (name == "earlyoom")
    assert ("waits for it" in donor.log) == (name == "sh")
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
    lent.until_slabs("mapped")
    assert not home.release(found[0])
    lent.donor.end(signal.SIGTERM)
    assert not home.release(found[0])
    until(lambda: not (cluster.root / "donors").exists(), "memory that is given back")
    assert lent.read_back()["requests_failed"] == 0


def test_what_gives_the_memory_back_runs_nothing_of_the_daemons_directory(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "1"
    trap = Trap(tmp_path)
    lent = Lent(cluster, tmp_path, donor_by=trap.prefix)
    homes = cluster.root / "donors"
    assert list(homes.iterdir())
    assert lent.donor.end(signal.SIGTERM) == 0
    assert "stays in" in lent.donor.log
    until(lambda: not homes.exists(), "memory that is given back")
    assert not trap.ran.exists()


def test_what_a_daemon_leaves_behind_spares_devices_of_protocol_1(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "0.5"
    lent = Lent(cluster, tmp_path)
    record = lent.home() / "donor.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 1}))
    assert lent.donor.end(signal.SIGTERM) == 0
    until(lambda: not release_commands(record.parent.name), "the end of what was left behind")
    assert list((lent.home() / "slabs").glob("*.mapped.*"))
    assert "given back" in cluster.ok("daemon", "--release")


def test_leases_that_nobody_reclaims_are_released(lent: Lent) -> None:
    lent.donor.end(signal.SIGKILL)
    lent.device.remove()
    donor = lent.restart(INFINISWAP_DAEMON_LEASE_GRACE_S="0.1")
    until(lambda: "expired: its device did not come back" in donor.log, "a lease that expires")
    assert "[lease-expired]" in donor.log
    until(
        lambda: lent.cluster.donor_row(donor)["status"]["pool"]["slabs_mapped"] == 0,
        "slabs that are free",
    )
    assert donor.end(signal.SIGTERM) == 0
    assert not (lent.cluster.root / "donors").exists()


def test_a_donor_without_slabs_lent_leaves_nothing(cluster: Cluster) -> None:
    donor = cluster.donor(port=free_port())
    path = home_in(cluster)
    mount = mounts.mount_of(path)
    assert (mount.fs_type, mount.mount_point) == ("tmpfs", str(path))
    assert {"nosuid", "nodev", "noexec"} <= mount.options
    assert donor.end(signal.SIGTERM) == 0
    assert not path.parent.exists()


def test_a_donor_with_an_automatic_headroom_leaves_nothing(cluster: Cluster) -> None:
    """The headroom is a fraction of all memory then, of a size that no setting may have."""
    cluster.env["INFINISWAP_POLICY_HEADROOM_FRACTION"] = "0.012345"
    donor = cluster.donor("--headroom", "auto", port=free_port())
    path = home_in(cluster)
    assert donor.end(signal.SIGTERM) == 0
    assert not path.parent.exists()


def test_doctor_tells_of_an_empty_home_that_is_mounted(cluster: Cluster) -> None:
    path = cluster.root / "donors" / NOBODY
    home.mount(path, SIZE)
    told = json.loads(cluster.cli("doctor", "--json").stdout)
    (finding,) = [one for one in told if str(path) in one["what"]]
    assert finding["state"] == "degraded"
    assert "infiniswap daemon --release" in finding["mend"]
    cluster.ok("daemon", "--release")
    assert not path.exists()


def test_a_daemon_of_root_has_given_its_rights_up(lent: Lent) -> None:
    """All but those to read where settings and program may lie, and in some containers to lock."""
    names = {"CAP_DAC_READ_SEARCH"}
    if not rights.has("CAP_SYS_RESOURCE"):
        names.add("CAP_IPC_LOCK")
    most = sum(1 << rights.CAPABILITIES[name] for name in names)
    tasks = list(Path(f"/proc/{lent.donor.process.pid}/task").iterdir())
    assert len(tasks) > 1
    for task in tasks:
        lines = (task / "status").read_text().splitlines()
        seen = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert not int(seen[name], 16) & ~most, (task.name, name)
        assert seen["NoNewPrivs"] == "1"
    assert "cannot lock" not in lent.donor.log
    assert lent.donor.end(signal.SIGKILL) != 0
    assert lent.home().is_mount(), "a successor may come"
    lent.restart()
    lent.until_slabs("mapped")


def test_the_memory_of_a_killed_daemon_is_given_back(cluster: Cluster, tmp_path: Path) -> None:
    """As after SIGTERM, once a successor has had its time; nobody has to ask for it."""
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "10"
    lent = Lent(cluster, tmp_path)
    home = lent.home()
    assert lent.donor.end(signal.SIGKILL) != 0
    assert home.is_mount()
    until(lambda: release_commands(home.name), "what waits for a successor")
    # In time, on a busy machine as well: what waits takes nothing away.
    lent.restart(INFINISWAP_DAEMON_LEASE_GRACE_S="1")
    lent.until_slabs("mapped")
    until(lambda: not release_commands(home.name), "the end of what waited")
    assert len(list((home / "slabs").glob("*.mapped.*"))) == SLABS
    assert lent.donor.end(signal.SIGKILL) != 0
    until(lambda: not home.parent.exists(), "memory that is given back")
    assert lent.read_back()["requests_failed"] == 0


def test_a_killed_daemons_memory_is_given_back_when_it_is_short(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Not only after the grace period, 120 s here: the host's programs would be killed next."""
    lent = Lent(cluster, tmp_path)
    lent.donor.end(signal.SIGKILL)
    more = str(2 * host_memory().total_bytes)  # half of it is never free
    said = cluster.ok("daemon", "--release", "--after", "86400", "--headroom", more)
    assert "given back" in said
    assert not (cluster.root / "donors").exists()
    assert lent.read_back()["requests_failed"] == 0


def test_a_port_below_1024_stays_roots_to_use(cluster: Cluster) -> None:
    """The start binds it after the rights are gone."""
    for port in range(1023, 1000, -1):
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            break
    assert cluster.donor(port=port).end(signal.SIGTERM) == 0


def test_a_start_that_fails_leaves_nothing_mounted(cluster: Cluster) -> None:
    busy = socket.create_server(("127.0.0.1", 0))
    with busy, pytest.raises(AssertionError, match="in use"):
        cluster.donor(port=busy.getsockname()[1])
    (cluster.root / "state").mkdir(exist_ok=True)
    (cluster.root / "state" / "host-secret").write_text("short")
    with pytest.raises(AssertionError, match="host-secret"):
        cluster.donor(port=free_port())
    assert not (cluster.root / "donors").exists()


def test_two_daemons_do_not_share_slabs(cluster: Cluster) -> None:
    donor = cluster.donor(port=free_port())
    with pytest.raises(AssertionError, match="in use"):
        cluster.donor(port=donor.control)
    assert donor.process.poll() is None
    assert donor.end(signal.SIGTERM) == 0


def test_a_donor_that_cannot_keep_its_slabs_says_so(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = "/proc/nothing/here"
    donor = cluster.donor(port=free_port())
    (sentence,) = cluster.donor_row(donor)["status"]["degraded"]
    assert "a restart of the daemon loses what is lent" in sentence
    cluster.env["INFINISWAP_DAEMON_RUN_DIR"] = str(cluster.root / "donors")
