# SPDX-License-Identifier: Apache-2.0
"""The checks of `infiniswap doctor`, one by one, on hosts made of files."""

from __future__ import annotations

import fcntl
import json
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from support.configs import configured as config
from support.devices.seal_keys import MemoryKeys
from support.donors.donor_world import KEYS, SECRET
from support.donors.hostile_donor import status
from support.machine.made_host import make_files, make_idle
from support.machine.tpms import StandIn

from infiniswap.cli.doctor import devices as device_findings
from infiniswap.cli.doctor import donors as donor_findings
from infiniswap.cli.doctor import host as host_findings
from infiniswap.cli.doctor import swap as swap_findings
from infiniswap.cli.doctor.finding import MISSING, OK, WARN, Finding, guarded
from infiniswap.config import Config
from infiniswap.control import messages as m
from infiniswap.device.cleanup import leftovers
from infiniswap.device.frontends import Places, fuse, ublk
from infiniswap.device.frontends.base import Leftover, Owner
from infiniswap.device.spec import host_key
from infiniswap.errors import BackupError, NoDonorError, SystemCallError, UnavailableError
from infiniswap.remedies import REMEDIES
from infiniswap.system import service_units
from infiniswap.system.keep_awake import CpuLatencyRequest
from infiniswap.system.swap import SwapArea
from infiniswap.system.tpm import Tpm
from infiniswap.system.userfault import Obstacle
from infiniswap.units import GIB, HostPort
from infiniswap.watch.asking import AskedDonor

SWAPS = "Filename\tType\tSize\tUsed\tPriority\n"


class Host:
    """A /proc and a /sys to write into."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc, self.sys = root / "proc", root / "sys"
        self.write("proc/swaps", SWAPS)
        self.write("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
        self.write("proc/self/mountinfo", "")
        self.write("proc/self/cgroup", "")

    def write(self, path: str, text: object) -> None:
        make_files(self.root, {path: text})

    def settings(self) -> dict[str, Finding]:
        return {f.name: f for f in swap_findings.settings(proc=self.proc, sys=self.sys)}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def one(findings: Iterable[Finding], name: str = "") -> Finding:
    """The only one (of that name); one that is not good tells how to mend it."""
    (found,) = [finding for finding in findings if not name or finding.name == name]
    assert found.mend or found.state == OK
    return found


def expect(findings: Iterable[Finding], state: str, mend: str = "", name: str = "") -> Finding:
    """That the only one (of that name) is so."""
    found = one(findings, name)
    assert found.state == state
    assert mend in found.mend
    return found


# ------------------------------------------------------------------------------ failures


def test_a_check_that_fails_is_a_finding_with_a_next_step() -> None:
    def failing(error: Exception) -> Finding:
        def check() -> NoReturn:
            raise error

        return one(guarded("x", check))

    found = failing(BackupError("no room", where="/a", mend="Buy a disk."))
    assert found == Finding("x", MISSING, "/a: no room", "Buy a disk.")
    assert failing(SystemCallError("what")).state == MISSING
    assert failing(OSError(5, "Input/output error")).state == WARN


# -------------------------------------------------------------------------------- paging


@pytest.mark.parametrize(
    ("path", "value", "name", "state", "mend"),
    [
        ("proc/sys/vm/swappiness", 60, "swappiness", OK, ""),
        ("proc/sys/vm/swappiness", 0, "swappiness", MISSING, "vm.swappiness=60"),
        ("proc/sys/vm/page-cluster", 3, "page-cluster", OK, ""),
        ("proc/sys/vm/page-cluster", 0, "page-cluster", WARN, "vm.page-cluster=3"),
        ("proc/sys/vm/page-cluster", 8, "page-cluster", WARN, "vm.page-cluster=3"),
        ("sys/module/zswap/parameters/enabled", "N", "zswap", OK, ""),
        ("sys/module/zswap/parameters/enabled", "Y", "zswap", OK, ""),
    ],
)
def test_settings_of_the_kernel(
    host: Host, path: str, value: object, name: str, state: str, mend: str
) -> None:
    host.write("proc/sys/vm/swappiness", 60)
    host.write(path, value)
    expect([host.settings()[name]], state, mend)


def test_swappiness_0_is_not_the_end_where_jobs_have_their_own(host: Host) -> None:
    host.write("proc/sys/vm/swappiness", 0)
    mount = f"30 20 0:26 / {host.root}/cg rw - cgroup cgroup rw,memory"
    host.write("proc/self/mountinfo", mount)
    host.write("proc/self/cgroup", "5:memory:/")
    (host.root / "cg").mkdir()
    assert one([host.settings()["swappiness"]]).state == WARN


def zswap_on(host: Host, version: int, held_mib: int = 0, pool_mib: int = 0) -> None:
    """Switched on, with so much in its pool; on a host with cgroups of that version."""
    kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
    host.write("proc/self/mountinfo", f"30 20 0:26 / {host.root}/cg rw - {kind}")
    host.write("proc/self/cgroup", "5:memory:/\n0::/user")
    host.write("cg/cgroup.controllers", "cpu memory")
    host.write("proc/vmstat", "zswpin 1\nzswpout 2\n")
    host.write("proc/meminfo", f"Zswap: {pool_mib << 10} kB\nZswapped: {held_mib << 10} kB\n")
    host.write("sys/module/zswap/parameters/enabled", "Y")
    host.write("sys/module/zswap/parameters/max_pool_percent", 33)


@pytest.mark.parametrize("version", [1, 2])
def test_zswap_that_holds_nothing_is_no_fault(host: Host, version: int) -> None:
    zswap_on(host, version)
    found = expect([host.settings()["zswap"]], OK)
    assert "up to 33 % of it" in found.what
    assert "docs/when-to-use.md" in found.what
    assert ("Limits of jobs do not count that memory" in found.what) == (version == 1)


@pytest.mark.parametrize(
    ("pool_mib", "state", "mend"), [(40, OK, ""), (95, WARN, "echo N > "), (2, OK, "")]
)
def test_zswap_helps_while_what_it_holds_shrinks(
    host: Host, pool_mib: int, state: str, mend: str
) -> None:
    zswap_on(host, 2, held_mib=100, pool_mib=pool_mib)
    found = expect([host.settings()["zswap"]], state, mend)
    assert f"It holds 100 MiB, shrunk to {pool_mib}%" in found.what


def test_a_pool_that_no_limit_counts_slows_nothing_down(host: Host) -> None:
    zswap_on(host, 1, held_mib=100, pool_mib=95)
    found = expect([host.settings()["zswap"]], OK)
    assert "shrunk to 95%: 95.0 MiB more as --local would help a job more" in found.what


def test_a_few_pages_in_zswap_say_nothing_about_the_rest(host: Host) -> None:
    zswap_on(host, 2, held_mib=2, pool_mib=2)
    assert "It holds" not in expect([host.settings()["zswap"]], OK).what


def test_pages_that_may_not_leave_zswap_are_a_fault_only_while_that_is_on(host: Host) -> None:
    zswap_on(host, 2)
    host.write("cg/memory.zswap.writeback", 0)
    expect([host.settings()["zswap"]], WARN, f"echo 1 > {host.root}/cg/memory.zswap.writeback")
    host.write("sys/module/zswap/parameters/enabled", "N")
    expect([host.settings()["zswap"]], OK)
    zswap_on(host, 2)
    host.write("cg/memory.zswap.writeback", 1)
    expect([host.settings()["zswap"]], OK)


def areas(host: Host, made: Config, line: str = "") -> list[Finding]:
    host.write("proc/swaps", SWAPS + line)
    return list(swap_findings.areas(made, proc=host.proc, sys=host.sys))


def test_no_swap_area_is_good(host: Host) -> None:
    assert one(areas(host, Config())).state == OK


@pytest.mark.parametrize(
    ("priority", "configured", "state", "words"),
    [
        (-2, None, OK, "with priority 100"),
        (100, None, OK, "with priority 101"),
        (32767, None, WARN, "nothing can come before it"),
        (10, 20, OK, "with priority 20"),
        (20, 20, WARN, "in turn with"),
        (30, 20, WARN, "before devices"),
    ],
)
def test_other_areas_against_the_priority_of_devices(
    host: Host, priority: int, configured: int | None, state: str, words: str
) -> None:
    made = config(device__priority=configured)
    found = one(areas(host, made, f"/dev/sda2 partition 1024 0 {priority}"))
    assert (found.state, not found.mend) == (state, state == OK)
    assert words in found.what


def device_area(host: Host, name: str) -> Config:
    """A swap area on /dev/loop7, whose file is on the mount of a device."""
    for file in ("lock", "device.json"):
        host.write(f"run/{name}/{file}", "")
    host.write("sys/block/loop7/loop/backing_file", f"{host.root}/run/{name}/mnt/disk")
    return config(device__run_dir=str(host.root / "run"))


def test_a_living_devices_area_is_no_other_swap_and_a_dead_ones_is_named_with_its_end(
    host: Host,
) -> None:
    made, line = device_area(host, "d1"), "/dev/loop7 partition 1024 512 100"
    with (host.root / "run/d1/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = areas(host, made, line)
    assert [f.state for f in found] == [OK, OK]
    assert "device d1" in found[1].what
    found = areas(host, made, line)
    assert found[1].state == MISSING
    assert "swapoff /dev/loop7 && infiniswap device remove d1" in found[1].mend


# ------------------------------------------------------------------------------ the host


def idle(host: Host, made: Config, there: bool = True) -> list[Finding]:
    host.write("cpu_dma_latency", "")
    request = CpuLatencyRequest(host.root / ("cpu_dma_latency" if there else "absent"))
    return list(host_findings.idle(made, proc=host.proc, sys=host.sys, request=request))


@pytest.mark.parametrize(
    ("driver", "flags", "keep_awake", "there", "state", "words"),
    [
        ("haltpoll", "hypervisor", "auto", True, OK, "limit sleep"),
        ("haltpoll", "hypervisor", "off", True, OK, "page-ins wait"),
        ("haltpoll", "hypervisor", "auto", False, WARN, "--device"),
        ("none", "hypervisor", "auto", True, WARN, "cpuidle_haltpoll"),
        ("none", "vmx", "auto", True, OK, ""),  # real processors without a driver
    ],
)
def test_what_wake_ups_cost(
    host: Host, driver: str, flags: str, keep_awake: str, there: bool, state: str, words: str
) -> None:
    make_idle(host.root, driver, ("POLL", 0), ("C1", 1), flags=flags)
    found = expect(idle(host, config(device__keep_awake=keep_awake), there), state)
    assert words in f"{found.what} {found.mend}"


@pytest.mark.parametrize(
    ("driver", "latency_us", "polls_ns", "state", "mend"),
    [
        ("haltpoll", 1, 0, WARN, "guest_halt_poll_ns"),
        ("haltpoll", 1, 200_000, OK, ""),
        ("intel_idle", 133, 0, WARN, 'keep_awake = "auto" under [daemon]'),
        ("intel_idle", 10, 0, OK, ""),
    ],
)
def test_a_donor_that_makes_consumers_wait(
    host: Host, driver: str, latency_us: int, polls_ns: int, state: str, mend: str
) -> None:
    make_idle(host.root, driver, ("POLL", 0), ("C1", 1), ("C6", latency_us), flags="vmx")
    host.write("sys/module/haltpoll/parameters/guest_halt_poll_ns", polls_ns)
    lends = {"daemon__listen": "10.0.0.1"}
    expect(idle(host, config(**lends)), state, mend, name="idle-donor")
    expect(idle(host, config(**lends, daemon__keep_awake="auto")), OK, name="idle-donor")


@pytest.mark.parametrize(
    ("mode", "committed_kib", "state"), [(0, 0, OK), (2, 0, OK), (2, 900_000, WARN)]
)
def test_strict_accounting_without_room(
    host: Host, mode: int, committed_kib: int, state: str
) -> None:
    host.write("proc/sys/vm/overcommit_memory", mode)
    figures = {"MemTotal": 1 << 20, "MemAvailable": 1, "CommitLimit": 1_000_000}
    figures["Committed_AS"] = committed_kib
    host.write("proc/meminfo", "\n".join(f"{name}: {kib} kB" for name, kib in figures.items()))
    assert one(host_findings.overcommit(proc=host.proc)).state == state


def places(host: Host) -> Places:
    return Places(host.proc, host.sys, host.root / "dev", host.root / "links")


def ublk_devices(host: Host, check: Callable[[], None] = lambda: None) -> Iterator[Finding]:
    for found in ublk.examine(places(host), check):
        yield host_findings.finding_of(ublk.FRONT_END, found)


def test_ublk_needs_io_uring(host: Host) -> None:
    host.write("proc/sys/kernel/io_uring_disabled", "2")
    expect(ublk_devices(host), WARN, "io_uring_disabled=0")


def test_without_ublk_there_are_other_front_ends(host: Host) -> None:
    def refused() -> None:
        raise UnavailableError("there is no /dev/ublk-control", mend="modprobe ublk_drv")

    found = expect(ublk_devices(host, refused), WARN)
    assert "nbd or fuse" in found.what
    assert "modprobe ublk_drv" in found.mend


def test_the_limit_of_ublk_devices(host: Host) -> None:
    host.write("sys/module/ublk_drv/parameters/ublks_max", "2\n")
    for number, state in ((0, OK), (1, WARN)):
        host.write(f"sys/class/ublk-char/ublkc{number}/dev", "")
        assert one(ublk_devices(host)).state == state


def test_open_files_against_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert one(host_findings.open_files(Config())).state == OK
    expect(host_findings.open_files(config(daemon__connections_max=4000)), WARN, "LimitNOFILE=6176")


def test_front_ends_that_are_missing(host: Host) -> None:
    found = {f.name: one([f]) for f in host_findings.front_ends(places(host))}
    assert found["fuse"].state == found["loop"].state == MISSING
    assert found["nbd"].state in (OK, WARN)  # this kernel's own
    host.write("dev/fuse", "")
    expect(host_findings.front_ends(places(host)), OK, name="fuse")


@pytest.mark.parametrize(("effective", "state"), [(0, WARN), (0x1FFFFFFFFFF, OK)])
def test_no_capability_is_named(host: Host, effective: int, state: str) -> None:
    host.write("proc/self/status", f"CapEff:\t{effective:016x}")
    expect(host_findings.rights(proc=host.proc), state, name="cap-sys-resource")


@pytest.mark.parametrize(
    ("written", "drop_in", "state"),
    [
        (("CAP_KILL",), "", WARN),
        (("CAP_KILL",), "CapabilityBoundingSet=CAP_SYS_ADMIN", OK),
        (("CAP_KILL", "CAP_SYS_ADMIN"), "", OK),
        (
            ("CAP_KILL", "CAP_SYS_ADMIN"),
            "CapabilityBoundingSet=\nCapabilityBoundingSet=CAP_KILL",
            WARN,
        ),
    ],
)
def test_a_unit_that_was_installed_under_another_kernel(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    written: tuple[str, ...],
    drop_in: str,
    state: str,
) -> None:
    monkeypatch.setattr(service_units, "capabilities_here", lambda: ("CAP_SYS_ADMIN",))
    assert not list(device_findings.unit(host.root))
    unit = service_units.UNIT_DIR / service_units.DEVICE_UNIT
    text = service_units.render(unit.name, ("/x",), capabilities=written)
    host.write(str(unit), text)
    host.write(f"{unit}.d/own.conf", f"[Service]\n{drop_in}\n")
    expect(device_findings.unit(host.root), state, "service install" if state == WARN else "")
    host.write(f"{unit}.d/own.conf", "[Service]\nCapabilityBoundingSet=~CAP_KILL\n")
    assert not list(device_findings.unit(host.root)), "the administrator knows better"


# --------------------------------------------------------------------------- the cluster


def test_the_secret_where_the_daemon_would_listen(tmp_path: Path) -> None:
    path = tmp_path / "secret"

    def found(**keys: object) -> Finding:
        made = config(cluster__secret_file=str(path) if path.exists() else None, **keys)
        return one(guarded("secret", lambda: donor_findings.secret(made)))

    assert found().state == OK
    assert "infiniswap init --secret" in found(daemon__listen="10.0.0.1").mend
    path.write_text(SECRET)
    path.chmod(0o644)
    assert "chmod 600" in found(daemon__listen="10.0.0.1").mend
    path.chmod(0o600)
    assert found(daemon__listen="10.0.0.1").state == OK
    path.write_text(KEYS.session_key_text())
    assert "drains no donor" in found(daemon__listen="10.0.0.1").what
    path.write_text("0123456789abcdef")
    assert "infiniswap init --secret" in found(daemon__listen="10.0.0.1").mend


ADDRESS = HostPort("10.0.0.2", 9400)


def donors(
    monkeypatch: pytest.MonkeyPatch, failure: NoDonorError | None = None, **changes: Any
) -> list[Finding]:
    """With one donor, whose status has those changes, or which fails."""
    said = msgspec.convert(status(**{"slab_bytes": GIB, **changes}), m.Status)

    async def ask(*_: object) -> list[AskedDonor]:
        return [AskedDonor(ADDRESS, None if failure else said, "", failure)]

    monkeypatch.setattr(donor_findings, "ask", ask)
    monkeypatch.setattr("infiniswap.cli.doctor.data_port.data_ports", lambda *_, **__: ())
    return list(donor_findings.donors(config(cluster__peers="10.0.0.2")))


def test_no_donor_is_configured() -> None:
    assert "--donors" in one(donor_findings.donors(Config())).mend


def test_a_donor_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = one(donors(monkeypatch, NoDonorError("no answer", mend="Start it.")))
    assert found == Finding("donors", WARN, "10.0.0.2:9400: no answer", "Start it.")
    assert "log" in one(donors(monkeypatch, NoDonorError("x"))).mend


@pytest.mark.parametrize(
    ("changes", "state", "mend"),
    [
        ({}, OK, ""),
        ({"slab_bytes": GIB // 4}, WARN, 'slab = "256M" under [device]'),
        ({"draining": True}, WARN, "another donor"),
        ({"pool__can_map": 0}, WARN, "--headroom"),
    ],
)
def test_a_donor_that_lends_less_than_it_could(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], state: str, mend: str
) -> None:
    expect(donors(monkeypatch, **changes), state, mend)


def test_slabs_that_may_be_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    good, unpinned = donors(monkeypatch, pool__slabs_unpinned=2)
    assert good.state == OK
    assert "LimitMEMLOCK" in one([unpinned]).mend


# ----------------------------------------------------------------------- devices, leftovers


def devices(monkeypatch: pytest.MonkeyPatch, **row: object) -> Finding:
    monkeypatch.setattr(device_findings, "local_devices", lambda *_: [{"name": "d1", **row}])
    return one(device_findings.devices(Config()))


@pytest.mark.parametrize(
    ("alarm", "mend"),
    [
        ("the backup /b refuses writes: No space left on device", "df -h; dmesg"),
        ("donor a was given up for 10 s: wrong bytes", "infiniswap status"),
        ("donor a gets no further slabs for 10 s: wrong bytes", "test that host's memory"),
        ("the front end has ended (code 5)", "infiniswap device restart d1"),
        ("the kernel's connections are not complete: it refuses", "dmesg | grep nbd"),
        ("3 slabs have neither a donor nor a backup: writes to them wait", "more donors"),
        ("7 pages are lost with donors that are gone, as there is no backup", "device remove d1"),
        ("1 page is lost to donor a, as there is no backup", "device remove d1"),
        ("page 3 came back from the backup with other bytes", "dmesg"),
        ("something new", "infiniswap device show d1"),
    ],
)
def test_each_alarm_has_a_next_step(monkeypatch: pytest.MonkeyPatch, alarm: str, mend: str) -> None:
    found = devices(monkeypatch, state="serving", alarms=alarm)
    assert found.state == WARN
    assert mend in found.mend


def test_the_words_of_alarms_are_those_of_the_device(project_root: Path) -> None:
    files = (project_root / "infiniswap/device").rglob("*.py")
    text = "".join(file.read_text() for file in files)
    for remedy in REMEDIES:
        assert remedy.words in text, remedy.words


def test_what_seals_pages_is_told_and_what_would_is_missed_where_it_is_wanted() -> None:
    keys = MemoryKeys()
    expect(host_findings.seal(config(), keys), OK, name="seal")
    expect(host_findings.seal(config(device__seal=False), keys), WARN, "seal = true", "seal")
    keys.has_library = False
    expect(host_findings.seal(config(), keys), MISSING, "Install one.", "seal")
    expect(host_findings.seal(config(device__seal=False), keys), WARN, "seal = true", "seal")


def test_the_place_of_the_host_key_is_told_and_a_better_one(tmp_path: Path) -> None:
    here, stand_in = config(device__backup_dir=str(tmp_path)), StandIn(tmp_path / "tpm")
    no_tpm, path = Tpm(node=tmp_path / "none"), tmp_path / "host-key"

    def found(tpm: Tpm, state: str) -> str:
        found = one(guarded("host-key", lambda: host_findings.host_key(here, tpm)))
        assert (found.name, found.state) == ("host-key", state)
        return f"{found.what} {found.mend}"

    assert "first device that needs one makes it, in" in found(no_tpm, OK)
    assert "makes it, sealed to the TPM" in found(stand_in.tpm, OK)
    assert not any(path.parent.glob("host-key*"))
    host_key.make(path, None)
    assert f"{path}: in a file, for root alone" in found(no_tpm, OK)
    assert f"{path}.tpm - | cmp - {path} && shred -u {path}" in found(stand_in.tpm, WARN)
    path.unlink()
    host_key.make(path, stand_in.tpm)
    assert f"{path}.tpm: sealed to the TPM of this host" in found(stand_in.tpm, OK)
    stand_in.is_on_machine("another")
    assert "does not open the host key" in found(stand_in.tpm, MISSING)
    path.with_name("host-key.tpm").chmod(0o666)
    assert "chmod 644" in found(stand_in.tpm, MISSING)


def test_devices_that_serve_stop_or_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(monkeypatch, state="serving", alarms="").state == OK
    assert devices(monkeypatch, state="stopped").state == OK
    assert devices(monkeypatch, state="no answer: it hangs").state == WARN


Left = Callable[[], list[Leftover]]


@pytest.fixture
def left(host: Host, monkeypatch: pytest.MonkeyPatch) -> Left:
    monkeypatch.setattr(leftovers, "abandoned_cgroups", tuple)
    (host.root / "links").mkdir(exist_ok=True)
    return lambda: list(leftovers.find(host.root / "run", places(host)))


def test_a_dead_device_is_told_once(host: Host, left: Left) -> None:
    assert left() == []
    device_area(host, "d1")
    mount = f"{host.root}/run/d1/mnt"
    host.write("proc/self/mountinfo", f"30 20 0:26 / {mount} rw - fuse.infiniswap i rw")
    (found,) = left()
    assert "infiniswap device remove d1" in found.mend


@pytest.mark.parametrize(("headroom", "state"), [(256, WARN), (257, OK)])
def test_earlyoom_must_not_act_before_the_donor_does(host: Host, headroom: int, state: str) -> None:
    """Of 1 GiB it wants a quarter; otherwise it ends the daemon, whose memory is the largest."""
    made = config(daemon__headroom=f"{headroom}M")
    assert not list(host_findings.killers(made, proc=host.proc, top=host.root))
    host.write("proc/77/comm", "earlyoom")
    (host.proc / "77/cmdline").write_bytes(b"/usr/bin/earlyoom\0-m\x0025\0")
    found = one(host_findings.killers(made, proc=host.proc, top=host.root))
    assert found.state == state
    assert "earlyoom (process 77) ends programs when less than 256 MiB" in found.what
    if state == WARN:
        assert "headroom above 256 MiB" in found.mend
        assert "options -m and -M" in found.mend


def test_far_memory_and_what_keeps_a_host_from_it() -> None:
    expect(host_findings.far(lambda: None), OK)
    found = expect(host_findings.far(lambda: Obstacle("Linux 6.1 is old", "Use 7.0.")), WARN)
    assert found.what == "jobs can use swap alone: Linux 6.1 is old"
    assert found.mend == "Use 7.0."


def test_what_has_no_record_is_taken_away_by_hand(host: Host, left: Left) -> None:
    mount = f"{host.root}/elsewhere/d1/mnt"
    host.write("proc/self/mountinfo", f"30 20 0:26 / {mount} rw - fuse.infiniswap i rw")
    host.write("elsewhere/d1/lock", "")
    host.write("sys/block/loop7/loop/backing_file", f"{mount}/disk")
    host.write("sys/block/loop8/loop/backing_file", "/home/somebody/mnt/disk")
    (host.root / "links/d9").symlink_to(host.root / "gone")
    assert [item.mend for item in left()] == [
        f"umount -l {mount}",
        "swapoff /dev/loop7; losetup -d /dev/loop7",
        f"rm {host.root}/links/d9",
    ]


def test_an_nbd_device_that_no_process_serves(host: Host, left: Left) -> None:
    for index, identifier in enumerate(("", f"infiniswap:2:{host.root}/elsewhere/d2", "other:1")):
        host.write(f"sys/block/nbd{index}/size", "2048")
        host.write(f"sys/block/nbd{index}/pid", "77")
        host.write(f"sys/block/nbd{index}/backend", identifier)
    (found,) = left()
    assert found.what == "/dev/nbd1: an nbd device of d2, which no process serves"
    assert found.mend == "nbd-client -d /dev/nbd1; swapoff /dev/nbd1"
    area = SwapArea("/dev/nbd1", "partition", 1 << 20, 0, 5)
    (owner,) = leftovers.owners_of_areas([area], host.root / "elsewhere", places(host)).values()
    assert owner == Owner("d2", False, "infiniswap device remove d2")


def test_an_unmounted_device_is_known_by_its_link(host: Host) -> None:
    links = host.root / "links"
    links.mkdir()
    (links / "d1").symlink_to("/dev/loop7")
    for number in (6, 7):
        host.write(f"sys/block/loop{number}/loop/backing_file", "/disk")
    found = list(fuse.owners(host.root / "run", places(host)))
    owner = Owner("d1", False, "infiniswap device remove d1")
    assert found == [(Path("/dev/loop7"), owner)]


def test_a_killed_demo_is_found_and_a_running_one_is_not(host: Host) -> None:
    run_dir = host.root / "demo"
    work = str(host.root / "infiniswap-demo-01234567")
    host.write("demo/record.json", json.dumps({"demo_id": "01234567", "work_dir": work}))
    with (run_dir / "lock").open("w") as lock:
        found = [f for f in device_findings._demos(run_dir) if work in f.what]
        assert one(found).mend.startswith("infiniswap demo")
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert list(device_findings._demos(run_dir)) == []
