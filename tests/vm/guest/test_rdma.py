# SPDX-License-Identifier: Apache-2.0
"""Pages by RDMA, on soft-RoCE: the C programs on real verbs, devices with two donors, and what can
happen to them meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, Donor, run, until
from support.donors.rdma_end import END
from support.jobs.fiojob import VERIFY, Fio, fio
from support.jobs.pagejob import StartJob
from support.machine.locklimit import locked_memory_limit
from support.machine.runmode import FULL
from support.machine.softroce import HOST, LINK, add, leads_here, remove
from support.machine.stopping import stopped

from infiniswap.cli.doctor.rdma import rdma as rdma_findings
from infiniswap.config import load
from infiniswap.engine.native import NativeEngine, NativeStore
from infiniswap.engine.native_rdma import NativeEngineRdma, rdma_ports
from infiniswap.engine.protocol import EngineConfig, RemoteConfig
from infiniswap.engine.store import StoreConfig
from infiniswap.errors import EngineError
from infiniswap.rdma_address import RdmaKey
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.kernels("6.12", "6.1"),
    pytest.mark.usefixtures("soft_roce"),
]


SIZE_MIB = 64 if FULL else 32
"""Of a device."""


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest) -> None:
    """Both ends, the network between them and its RDMA run on one or two slow processors."""
    if "cluster" in request.fixturenames:
        env = request.getfixturevalue("cluster").env
        env["INFINISWAP_DEVICE_CONNECT_MS"] = env["INFINISWAP_DEVICE_REQUEST_MS"] = "30000"
        env["INFINISWAP_POLICY_SUSPEND_S"] = "20"


@pytest.fixture
def donors(cluster: Cluster) -> list[Donor]:
    """Two."""
    return [cluster.donor(), cluster.donor()]


def transports(device: Device) -> dict[str, str]:
    """By the donors' addresses."""
    return {row["address"]: row["transport"] for row in device.status["donors"]}


def row_of(device: Device, donor: Donor) -> Any:
    return next(row for row in device.status["donors"] if row["address"] == donor.address)


def start_mapped(cluster: Cluster, *args: str, frontend: str = "nbd") -> Device:
    """A device all of whose slabs have a donor."""
    device = cluster.start("--frontend", frontend, *args, size=f"{SIZE_MIB}M")
    write(device, SIZE_MIB)

    def mapped() -> bool:
        slabs = device.status["slabs"]
        if slabs["mapped"] < sum(slabs.values()):
            write(device, SIZE_MIB)
            return False
        return True

    until(mapped, "every slab to have a donor")
    write(device, SIZE_MIB)
    return device


def write(device: Device, mib: int) -> None:
    fio(device.path, "--rw=write", "--bs=64k", f"--size={mib}m", "--iodepth=8")


@contextlib.contextmanager
def verifying(cluster: Cluster, device: Device) -> Iterator[Fio]:
    """fio on a device that pages by RDMA, after its first pass; in the end all is right."""
    assert set(transports(device).values()) == {"rdma"}
    target = [f"--filename={device.path}", "--ioengine=libaio", "--direct=1"]
    load = Fio(target, 24 if FULL else 8, 4, cluster.root)
    try:
        until(lambda: load.passes >= 1 or load.error, "a pass", WAIT_S * 3)
        yield load
        load.finish()
    finally:
        load.close()
    assert device.status["stats"]["crc_errors_remote"] == 0


def another_pass(load: Fio) -> None:
    passes = load.passes
    until(lambda: load.passes > passes or load.error, "another pass", WAIT_S * 3)


# ------------------------------------------------------------------- the C programs


@pytest.mark.parametrize(
    "program",
    ["queue", "store", pytest.param("engine", marks=pytest.mark.full), "choose"],
)
def test_c_programs_on_real_verbs(program: str, project_root: Path, vm_kernel: str) -> None:
    # In less time than this too little happens here for what it has to have seen.
    milliseconds = ["20000"] if program == "engine" else []
    binary = project_root / "build/c/tests" / f"test_rdma_{program}"
    done = subprocess.run(
        [binary, *milliseconds],
        env={**os.environ, "ISW_TEST_RDMA_HOST": HOST, "TMPDIR": "/var/tmp"},
        cwd="/var/tmp",
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    if program == "store":
        can = "cannot" if vm_kernel == "6.1" else "can"
        assert done.stdout == f"registrations {can} be moved\n"


# ----------------------------------------------------------------- without processes


def test_what_doctor_says() -> None:
    (port,) = rdma_ports()
    assert (port.device, port.link, port.is_active) == ("rxe0", "Ethernet", True)
    assert HOST in [gid.address for gid in port.gids if gid.is_roce_v2]
    config = load(Path("/dev/null"), {"cluster.peers": HOST}, {})
    found = {finding.name: finding for finding in rdma_findings(config)}
    assert HOST in found["rdma"].what
    assert "rxe0" in found["rdma-donor"].what
    run("ip", "link", "set", LINK, "down")
    try:
        found = {finding.name: finding for finding in rdma_findings(config)}
        assert "is down" in found["rdma"].what
        assert "ip link set" in found["rdma"].mend
        assert "down" in leads_here()
    finally:
        run("ip", "link", "set", LINK, "up")
    until(lambda: leads_here() == "", "the port to be up again")


def test_what_may_be_locked_is_lent_and_the_rest_is_said() -> None:
    """A limit that is met half-way through a pool, at the donor; and at once, at the device."""
    config = load(Path("/dev/null"), {}, {})
    engine_config = EngineConfig(size_bytes=MIB, slab_bytes=MIB, no_backup=True, staging_pages=64)
    with (
        NativeStore(StoreConfig(slab_bytes=MIB, slabs_max=4)) as store,
        NativeEngine(engine_config, None) as engine,
    ):
        for _ in range(4):
            store.preallocate()
        lease = store.lease_create(4)
        slots = [store.map(lease) for _ in range(4)]
        store.rdma_open(lease, [END])

        def key(number: int) -> RdmaKey:
            slot = slots[number]
            assert slot is not None
            return store.rdma_key(lease, slot.slot, slot.generation)

        with locked_memory_limit(2 * MIB + MIB // 2):
            keys = [key(0), key(1)]
            for number in (2, 3):
                with pytest.raises(EngineError, match="ulimit -l") as caught:
                    key(number)
                assert caught.value.code == errno.ENOMEM
            assert store.stats()["rdma_regions"] == store.stats()["rdma_failures"] == 2
            assert [key(0), key(1)] == keys
            with pytest.raises(EngineError, match="ulimit -l"):
                NativeEngineRdma(engine).offer(HOST, 1, 1)
            (finding,) = [one for one in rdma_findings(config) if one.name == "rdma-memlock"]
            assert "too little for RDMA" in finding.what
            assert "ulimit -l unlimited" in finding.mend
        assert key(2) not in keys
        NativeEngineRdma(engine).offer(HOST, 1, 1).close()
        store.rdma_close(lease)
    assert "type RC" not in run("rdma", "resource", "show", "qp")


_RESIDENT_KIB_MORE = 2048
"""What READs of one connection land in: all cycles together leave less than one of that, which is
some 10 KiB for each of 200."""


@dataclass(frozen=True)
class Held:
    """What this process has: numbers that do not depend on how memory is managed, and memory."""

    exact: dict[str, int]
    resident_kib: int


def held() -> Held:
    gc.collect()
    ours, mark = Path("/proc/self"), f" pid {os.getpid()} "
    exact = {
        kind: run("rdma", "resource", "show", kind).count(mark) for kind in ("qp", "mr", "pd", "cq")
    }
    exact |= {name: len(list((ours / name).iterdir())) for name in ("fd", "task")}
    kib = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB$", (ours / "status").read_text(), re.MULTILINE))
    exact |= {name: int(kib[name]) for name in ("VmLck", "VmPin")}
    return Held(exact, int(kib["VmRSS"]))


def test_connections_come_and_go_and_nothing_is_left(count: Callable[[int, int], int]) -> None:
    """rdma_rxe itself runs out near a thousand."""

    store_config = StoreConfig(slab_bytes=MIB, slabs_max=2)
    engine_config = EngineConfig(size_bytes=MIB, slab_bytes=MIB, no_backup=True, staging_pages=64)
    with NativeStore(store_config) as store, NativeEngine(engine_config, None) as engine:
        store.preallocate()
        port = store.listen(HOST, 0)
        lease = store.lease_create(2)
        slot = store.map(lease)
        assert slot is not None
        before = Held({}, 0)
        for number in range(count(20, 200)):
            rdma = NativeEngineRdma(engine)
            offer = rdma.offer(HOST, 2, 2)
            ends, probe = store.rdma_open(lease, offer.ends)
            config = RemoteConfig(
                host=HOST,
                port=port,
                tickets=(store.ticket(lease, 0),),
                export_bytes=2 * MIB,
                queues=2,
                connect_ms_max=60_000,
                over=offer.answered(ends, probe),
            )
            remote = engine.remote_connect(config)
            key = store.rdma_key(lease, slot.slot, slot.generation)
            rdma.slot_key(remote, slot.slot, key)
            if number == 0:
                connected = held()
                assert connected.exact["qp"] == 4  # both ends of two
                # Staging, where READs of two land, the slab, the probe's page.
                assert connected.exact["mr"] == 5
            engine.remote_shutdown(remote)
            engine.remote_destroy(remote)
            store.lease_renew(lease, 60_000)
            assert store.stats()["rdma_connections"] == 0
            if number == 1:  # what is made once and kept is there
                before = held()
        assert before.exact["qp"] == 0

        def as_before() -> bool:
            """Threads that are joined may take a moment to go."""
            now = held().exact
            return all(now[what] <= many for what, many in before.exact.items())

        until(as_before, f"no more than {before.exact}")
        more_kib = held().resident_kib - before.resident_kib
    print(f"held: {before}, resident KiB then: {more_kib} more")
    assert more_kib < _RESIDENT_KIB_MORE


# ------------------------------------------------------------------------- devices


@pytest.mark.full
def test_a_device_pages_to_two_donors(cluster: Cluster, donors: list[Donor]) -> None:
    pages_to_two_donors("nbd", cluster, donors)


@pytest.mark.full
@pytest.mark.kernels("6.12")  # 6.1 has no ublk
@pytest.mark.parametrize("frontend", ["ublk"], indirect=True)
def test_a_device_pages_to_two_donors_by_other_front_ends_too(
    frontend: str, cluster: Cluster, donors: list[Donor]
) -> None:
    pages_to_two_donors(frontend, cluster, donors)


def pages_to_two_donors(frontend: str, cluster: Cluster, donors: list[Donor]) -> None:
    """fio verifies all it writes, over RDMA."""
    device = start_mapped(cluster, "--transport", "rdma", frontend=frontend)
    assert device.status["frontend"] == frontend
    assert transports(device) == {donor.address: "rdma" for donor in donors}
    before = {row["address"]: row["read_pages"] for row in device.status["donors"]}
    sizes = ("--bssplit=4k/50:16k/30:128k/20", "--size=24m", "--iodepth=16")
    fio(device.path, "--rw=randwrite", *sizes, *VERIFY)
    for row in device.status["donors"]:
        assert row["read_pages"] > before[row["address"]]
        assert row["write_pages"] > 0
        assert row["errors"] == 0
    shown = cluster.ok("device", "show", device.name)
    assert shown.count("slabs, rdma") == 2
    # Their processes have no part in it.
    writes = sum(row["write_pages"] for row in device.status["donors"])
    with stopped(*(donor.process.pid for donor in donors)):
        fio(device.path, "--rw=randwrite", "--bs=4k", "--size=2m", *VERIFY)
        assert sum(row["write_pages"] for row in device.status["donors"]) > writes
    stats = device.status["stats"]
    assert stats["crc_errors_remote"] == stats["requests_failed"] == 0
    device.remove()


def _processor_us(donors: list[Donor]) -> dict[str, int]:
    """Processor time of the donors' threads of the C library, of all of their processes, and of
    this host's soft interrupts, where soft-RoCE works (on newer kernels partly)."""
    threads = processes = 0
    for donor in donors:
        for task in Path("/proc", str(donor.process.pid), "task").iterdir():
            if (task / "comm").read_text().startswith("isw"):
                threads += int((task / "schedstat").read_text().split()[0]) // 1000
        times = psutil.Process(donor.process.pid).cpu_times()
        processes += round((times.user + times.system) * 1e6)
    softirq = round(psutil.cpu_times().softirq * 1e6)
    return {"threads": threads, "processes": processes, "softirq": softirq}


@pytest.mark.full
def test_the_donors_process_does_nothing_for_a_page(
    cluster: Cluster, donors: list[Donor], count: Callable[[int, int], int]
) -> None:
    pages = count(1_000, 10_000)
    used: dict[str, dict[str, int]] = {}
    for transport in ("rdma", "tcp"):
        # A backup may be quicker than soft-RoCE, and would then be read instead.
        device = start_mapped(cluster, "--transport", transport, "--backup", "none")
        reads = sum(row["read_pages"] for row in device.status["donors"])
        before = _processor_us(donors)
        sizes = ("--bs=4k", f"--io_size={pages * 4}k", f"--size={SIZE_MIB}m")
        fio(device.path, "--rw=randread", *sizes)
        now = _processor_us(donors)
        used[transport] = {whose: now[whose] - before[whose] for whose in now}
        reads = sum(row["read_pages"] for row in device.status["donors"]) - reads
        print(f"{reads} pages by {transport}: processor time in us: {used[transport]}")
        assert reads >= pages * 0.9
        device.remove()
    assert used["tcp"]["threads"] > 10 * pages
    assert used["rdma"]["threads"] < used["tcp"]["threads"] / 50


@pytest.mark.full
def test_a_donor_without_rdma_beside_one_with(cluster: Cluster) -> None:
    with_rdma = cluster.donor()
    cluster.env["INFINISWAP_DAEMON_RDMA"] = "off"
    without = cluster.donor()
    del cluster.env["INFINISWAP_DAEMON_RDMA"]
    device = start_mapped(cluster)
    assert transports(device) == {with_rdma.address: "rdma", without.address: "tcp"}
    row = row_of(device, without)
    assert row["transport_reason"] == "the donor does not offer RDMA"
    assert row["rdma_fallbacks"] == 1
    assert row["transport_reason"] in device.log
    told = cluster.ok("status", "--donors", cluster.addresses)
    assert "rdma 1, tcp 1" in told
    assert f"no RDMA to {without.address}: {row['transport_reason']}" in told
    fio(device.path, "--rw=randwrite", "--bs=4k", "--size=8m", *VERIFY)
    # Who wants nothing else is told before anything is attached.
    refused = cluster.cli(
        "device", "start", cluster.name(), "--size", "64M", "--donors", without.address,
        "--transport", "rdma",
    )  # fmt: skip
    assert refused.returncode == 5
    assert "does not offer RDMA" in refused.stderr
    device.remove()


@pytest.mark.full
def test_a_killed_donor_costs_no_byte(cluster: Cluster, donors: list[Donor]) -> None:
    device = start_mapped(cluster)
    with verifying(cluster, device) as load:
        donors[0].end(signal.SIGKILL)
        until(lambda: row_of(device, donors[0])["slabs"] == 0, "its slabs to be given up")
        another_pass(load)
    assert row_of(device, donors[1])["transport"] == "rdma"
    device.remove()


@pytest.mark.full
def test_slabs_are_taken_back_under_load(cluster: Cluster, donors: list[Donor]) -> None:
    device = start_mapped(cluster)
    with verifying(cluster, device):
        cluster.ok("donor", "drain", donors[0].address)
        until(lambda: row_of(device, donors[0])["slabs"] == 0, "the donor to be empty")
        cluster.ok("donor", "undrain", donors[0].address)
    assert "Traceback" not in donors[0].log
    assert row_of(device, donors[1])["transport"] == "rdma"
    device.remove()


@pytest.mark.full
def test_a_link_that_goes_down_leaves_tcp_and_comes_back(
    cluster: Cluster, donors: list[Donor]
) -> None:
    device = start_mapped(cluster)
    with verifying(cluster, device) as load, contextlib.ExitStack() as up:
        up.callback(run, "ip", "link", "set", LINK, "up")
        run("ip", "link", "set", LINK, "down")
        until(lambda: set(transports(device).values()) == {"tcp"} or load.error, "TCP to be used")
        load.check()
        for donor in donors:
            row = row_of(device, donor)
            assert "down" in row["transport_reason"]
            assert row["rdma_fallbacks"] >= 1
        up.close()
        # Without a further loss of connections.
        until(
            lambda: set(transports(device).values()) == {"rdma"} or load.error,
            "RDMA to be used again",
            WAIT_S * 5,
        )
        another_pass(load)
    for donor in donors:
        row = row_of(device, donor)
        assert row["rdma_probes"] >= 1
        assert row["transport_reason"] == ""
    device.remove()


@pytest.mark.full
def test_a_device_that_is_removed_is_let_go_of(cluster: Cluster, donors: list[Donor]) -> None:
    """By donors that lend and a device that pages: the kernel would wait for them."""
    device = start_mapped(cluster)
    assert set(transports(device).values()) == {"rdma"}
    pages = ("--rw=write", "--bs=16k", "--size=8m", *VERIFY)
    fio(device.path, *pages, "--do_verify=0")
    remove()
    try:
        until(lambda: set(transports(device).values()) == {"tcp"}, "TCP to be used")
        fio(device.path, *pages, "--verify_only")
        assert all(row["given_up"] == 0 for row in device.status["donors"])
        for donor in donors:
            assert "is being removed" in donor.log
    finally:
        add()
    if FULL:
        until(lambda: set(transports(device).values()) == {"rdma"}, "RDMA again", WAIT_S * 5)
        fio(device.path, *pages, "--verify_only")
    assert device.status["stats"]["crc_errors_remote"] == 0
    device.remove()


@pytest.fixture
def swaps(
    cluster: Cluster, donors: list[Donor], job: StartJob, count: Callable[[int, int], int]
) -> Callable[[str], None]:
    """A job that verifies its pages, under a limit, on a device with that front end."""

    def swap(frontend: str) -> None:
        device = cluster.start("--frontend", frontend, "--transport", "rdma", "--swap")
        work = job(10_000)
        work.more_rounds(count(1, 10))
        work.finish()
        status = device.status
        assert {row["transport"] for row in status["donors"] if row["slabs"]} == {"rdma"}
        assert sum(row["slabs"] for row in status["donors"]) > 0
        assert status["stats"]["pages_in_remote"] > 0
        assert status["stats"]["requests_failed"] == status["stats"]["crc_errors_remote"] == 0
        assert all("Traceback" not in donor.log for donor in donors)
        device.stop()

    return swap


def test_a_job_swaps_over_rdma(swaps: Callable[[str], None]) -> None:
    swaps("nbd")


@pytest.mark.full
@pytest.mark.kernels("6.12")
@pytest.mark.parametrize("frontend", ["ublk"], indirect=True)
def test_a_job_swaps_over_rdma_by_other_front_ends_too(
    frontend: str, swaps: Callable[[str], None]
) -> None:
    swaps(frontend)
