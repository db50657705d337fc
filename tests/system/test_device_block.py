# SPDX-License-Identifier: Apache-2.0
"""A device as the kernel's block device: file systems, discards, and its life over stops."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, run, until, wait_ended

from infiniswap.system import loop, swap
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
]


@pytest.fixture
def device(shared_cluster: Cluster) -> Iterator[Device]:
    device = shared_cluster.start()
    yield device
    assert "Traceback" not in device.log


@contextlib.contextmanager
def mounted(device: Device, *options: str) -> Iterator[Path]:
    point = device.cluster.root / "fs"
    point.mkdir(exist_ok=True)
    run("mount", *options, device.path, point)
    try:
        yield point
    finally:
        run("umount", point)


def write_files(directory: Path, name: str, sizes: range) -> dict[str, str]:
    """Files of these sizes; their digests by name."""
    digests = {}
    for size in sizes:
        data = os.urandom(size)
        (directory / f"{name}{size}").write_bytes(data)
        digests[f"{name}{size}"] = hashlib.sha256(data).hexdigest()
    return digests


def digests_of(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.is_file()
    }


def write_pattern(device: Device, seed: int, offset: int, length: int = MIB) -> None:
    pattern = bytes((seed + i) % 251 for i in range(4096)) * (length // 4096)
    with device.path.open("r+b", buffering=0) as file:
        file.seek(offset)
        assert file.write(pattern) == length
        os.fsync(file.fileno())


def check_pattern(device: Device, seed: int, offset: int, length: int = MIB) -> None:
    pattern = bytes((seed + i) % 251 for i in range(4096)) * (length // 4096)
    run("blockdev", "--flushbufs", device.path)
    with device.path.open("rb") as file:
        file.seek(offset)
        assert file.read(length) == pattern


@pytest.mark.requires_tool("mkfs.ext4", "e2fsck")
def test_a_file_system_keeps_its_files(device: Device) -> None:
    run("mkfs.ext4", "-q", "-F", device.path)
    with mounted(device) as point:
        digests = write_files(point, "file", range(1, 24 * 37_001, 37_001))
        run("sync", "-f", point)
        until(lambda: device.status["slabs"]["mapped"], "a mapped slab")

        def on_donors() -> bool:
            # Into the same files: into the slabs that were busy already.
            digests.update(write_files(point, "again", range(MIB, MIB + 8)))
            run("sync", "-f", point)
            return any(row["write_pages"] for row in device.status["donors"])

        until(on_donors, "pages written to donors")
    run("e2fsck", "-f", "-n", device.path)
    run("blockdev", "--flushbufs", device.path)
    with mounted(device, "-o", "ro") as point:
        assert digests_of(point) == digests
    status = device.status
    assert status["stats"]["requests_failed"] == 0
    assert status["stats"]["pages_out"] > 0


@pytest.mark.requires_tool("mkfs.ext4", "fstrim")
def test_discarded_pages_leave_the_donors(device: Device) -> None:
    run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", device.path)
    with mounted(device) as point:
        before = 0

        def much_on_donors() -> bool:
            # Slabs are mapped once they are hot; what is written after that is on donors, too.
            nonlocal before
            (point / "big").write_bytes(os.urandom(48 * MIB))
            run("sync", "-f", point)
            before = device.status["pages_on_donors"]
            return bool(before > 10 * 1024)  # of the 12 * 1024 of the file

        until(much_on_donors, "pages on donors")
        (point / "big").unlink()
        run("sync", "-f", point)
        run("fstrim", point)
        after = device.status["pages_on_donors"]
    assert after < before - 4096, (before, after)
    assert device.status["stats"]["trim_requests"] > 0


@pytest.mark.requires_tool("fio")
def test_fio_verifies_mixed_block_sizes(device: Device, tmp_path: Path) -> None:
    run(
        "fio",
        "--name=verify",
        f"--filename={device.path}",
        "--ioengine=libaio",
        "--direct=1",
        "--rw=randwrite",
        "--bssplit=4k/50:12k/20:64k/20:512k/10",
        "--blockalign=4k",
        "--iodepth=16",
        "--size=64m",
        "--io_size=128m",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--randrepeat=0",
        f"--aux-path={tmp_path}",
        "--verify_state_save=0",
    )
    stats = device.status["stats"]
    assert stats["requests_failed"] == stats["crc_errors_remote"] == 0
    assert stats["crc_errors_backup"] == 0


def test_stop_keeps_the_contents_and_remove_deletes_them(device: Device) -> None:
    cluster = device.cluster
    write_pattern(device, 1, 0)
    write_pattern(device, 2, 100 * MIB)
    device.stop()
    assert not device.path.is_symlink()
    listed = json.loads(cluster.ok("device", "list", "--json"))
    assert device.name in listed["stopped"]
    assert device.name not in listed["lost"]
    # The backup alone brings them back, other donors or not.
    cluster.ok("device", "start", device.name)
    check_pattern(device, 1, 0)
    check_pattern(device, 2, 100 * MIB)
    with device.path.open("rb") as file:
        file.seek(50 * MIB)
        assert not any(file.read(MIB))
    cluster.ok("device", "restart", device.name)
    check_pattern(device, 1, 0)
    device.remove()
    assert not list(cluster.backup_dir.glob(f"{device.name}*"))
    done = cluster.cli("device", "start", device.name)
    assert done.returncode == 2
    assert "--size" in done.stderr


def test_a_stopped_device_cannot_become_another_by_accident(device: Device) -> None:
    cluster, name = device.cluster, device.name
    write_pattern(device, 3, 0)
    device.stop()
    for flags, text in (
        (["--size", "64M"], "128M"),
        (["--swap"], "overwrite"),
        (["--backup", "none"], "backup"),
    ):
        done = cluster.cli("device", "start", name, *flags)
        assert done.returncode == 9, done.stderr
        assert text in done.stderr
        assert "remove" in done.stderr
    # The same size is the same device.
    cluster.ok("device", "start", name, "--size", "128M")
    check_pattern(device, 3, 0)
    device.stop()
    cluster.ok("device", "start", name, "--discard-contents")
    with device.path.open("rb") as file:
        assert not any(file.read(4 * MIB))


def test_sigterm_stops_it_and_keeps_the_contents(device: Device) -> None:
    write_pattern(device, 4, 8 * MIB)
    wait_ended(device.send(signal.SIGTERM))
    assert not device.run.exists()
    device.cluster.ok("device", "start", device.name)
    check_pattern(device, 4, 8 * MIB)


def test_a_mounted_or_open_device_is_not_stopped(device: Device) -> None:
    run("mkfs.ext4", "-q", "-F", device.path)
    with mounted(device) as point:
        for action in ("stop", "remove"):
            done = device.command(action)
            assert done.returncode == 9
            assert str(point) in done.stderr
            assert "umount" in done.stderr
        pid = device.send(signal.SIGTERM)
        until(lambda: "not stopped" in device.log, "the refusal in the log")
        assert device.pid == pid
        digests = write_files(point, "file", range(1, 4 * 37_001, 37_001))
        run("sync", "-f", point)
        assert digests_of(point) == digests


def test_a_device_that_somebody_has_open_is_not_stopped(device: Device) -> None:
    with device.path.open("rb", buffering=0) as file:
        done = device.command("stop")
        assert done.returncode == 9
        assert str(os.getpid()) in done.stderr
        # Nothing half done: it is still there afterwards, link and all.
        assert len(file.read(4096)) == 4096
        assert device.path.is_symlink()
    write_pattern(device, 5, 0)
    check_pattern(device, 5, 0)


def test_the_name_of_a_running_device_is_taken(device: Device) -> None:
    cluster = device.cluster
    done = cluster.cli("device", "start", device.name, "--size", "8M", "--donors", "127.0.0.1")
    assert done.returncode == 9
    assert device.name in done.stderr
    assert "device stop" in done.stderr
    assert device.status["state"] == "serving"


def test_any_shell_sees_it(device: Device) -> None:
    cluster = device.cluster
    listed = json.loads(cluster.ok("device", "list", "--json"))
    assert [row["name"] for row in listed["running"]] == [device.name]
    assert device.name in cluster.ok("device", "list")
    shown = cluster.ok("device", "show", device.name)
    for word in (device.name, "serving", str(device.backup), *cluster.addresses.split(",")):
        assert word in shown, word
    status = device.shown
    assert status.keys() == device.status.keys()
    assert status["size_bytes"] == 128 * MIB
    assert os.path.realpath(device.path) == status["path"]
    (attached,) = [entry for entry in loop.attached() if str(entry.path) == status["path"]]
    assert attached.direct_io
    # The socket is the owner's alone.
    assert (device.run / "control.sock").stat().st_mode & 0o777 == 0o600


def test_it_can_be_started_a_hundred_pages_long(shared_cluster: Cluster) -> None:
    # The last slab is cut short, and the device ends in the middle of a group of pages.
    device = shared_cluster.start(size=str(8 * MIB + 100 * 4096))
    assert int(run("blockdev", "--getsize64", device.path)) == 8 * MIB + 100 * 4096
    write_pattern(device, 6, 8 * MIB, 100 * 4096)
    check_pattern(device, 6, 8 * MIB, 100 * 4096)


@pytest.mark.requires_swap
def test_a_second_swapon_is_refused(shared_cluster: Cluster) -> None:
    device = shared_cluster.start("--swap", "--priority", "7")
    status = device.status
    # How much it holds is not asked: a host may page cold memory out by itself (DAMON_RECLAIM).
    assert status["swap"]["active"]
    assert status["swap"]["priority"] == 7
    area = swap.find_area(device.path)
    assert area is not None
    assert area.priority == 7
    done = subprocess.run(["swapon", device.path], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    done = shared_cluster.cli("device", "start", device.name, "--swap")
    assert done.returncode == 9
    device.stop()
    assert swap.find_area(Path(status["path"])) is None
    # Started again it swaps again, without being told.
    shared_cluster.ok("device", "start", device.name)
    assert device.status["swap"]["active"]


@pytest.mark.requires_swap
def test_two_swap_devices_and_the_priorities_above_others(shared_cluster: Cluster) -> None:
    first = shared_cluster.start("--swap", size="32M")
    second = shared_cluster.start("--swap", size="32M")
    priorities = [device.status["swap"]["priority"] for device in (first, second)]
    assert priorities[1] > priorities[0]
    # Taken out of use by hand, it is still stopped in order.
    run("swapoff", first.path)
    first.stop()
    second.stop()


def started(cluster: Cluster, name: str, *args: str) -> subprocess.Popen[str]:
    """A `device start` under way, with all that it says as its standard output."""
    # Not isolated as `cluster.program` is, which would ignore PYTHONUNBUFFERED.
    command = [sys.executable, "-m", "infiniswap", "device", "start", name, "--size", "16M", *args]
    return subprocess.Popen(
        [*command, "--donors", cluster.addresses],
        env={**cluster.env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_foreground_stops_with_ctrl_c(shared_cluster: Cluster) -> None:
    name = shared_cluster.name()
    process = started(shared_cluster, name, "--foreground")
    assert process.stdout is not None
    line = process.stdout.readline()
    while f"device {name}: 16M at" not in line:
        assert line
        line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert not (shared_cluster.run_dir / name).exists()
    listed = json.loads(shared_cluster.ok("device", "list", "--json"))
    assert name in listed["stopped"]
    shared_cluster.ok("device", "remove", name)


def test_without_a_backup_a_lost_page_is_an_error_never_zeros(cluster: Cluster) -> None:
    cluster.donor()
    cluster.donor()
    # Only the dead one may be given up: the others are waited for.
    cluster.env["INFINISWAP_DEVICE_REQUEST_MS"] = "60000"
    device = cluster.start("--backup", "none", size="64M")
    assert device.status["slabs"]["mapped"] == 8
    write_pattern(device, 7, 0, 64 * MIB)
    done = device.command("stop")
    assert done.returncode == 9
    assert "device remove" in done.stderr
    on_donors = {row["address"]: row["slabs"] for row in device.status["donors"]}
    dead = cluster.donors[0]
    dead.end(signal.SIGKILL)
    lost_pages = f"{on_donors[dead.address] * 2048} pages are lost"
    until(lambda: lost_pages in " ".join(device.status["alarms"]), lost_pages)
    # Every slab has a donor again, also those that nobody uses now.
    until(lambda: device.status["slabs"]["mapped"] == 8, "all slabs on the other donor")
    run("blockdev", "--flushbufs", device.path)
    lost = 0
    for offset in range(0, 64 * MIB, 8 * MIB):
        try:
            check_pattern(device, 7, offset, 4096)
        except OSError:
            lost += 1
    assert lost == on_donors[dead.address]
    # What is written anew is right again.
    write_pattern(device, 8, 0, 64 * MIB)
    check_pattern(device, 8, 0, 64 * MIB)
    device.remove()


def test_donors_without_room_leave_pages_on_the_backup(cluster: Cluster) -> None:
    cluster.donor(pool="16M")
    device = cluster.start(size="64M")

    def full() -> bool:
        write_pattern(device, 9, 0, 64 * MIB)
        status = device.status
        assert status["slabs"]["mapped"] <= 2
        return status["slabs"]["mapped"] == 2 and "no room" in status["donors"][0]["detail"]

    until(full, "a full donor")
    write_pattern(device, 10, 0, 64 * MIB)
    check_pattern(device, 10, 0, 64 * MIB)
    # Room that comes later is used: the pool of the same donor, started anew.
    assert cluster.donors[0].end() == 0
    until(lambda: device.status["slabs"]["mapped"] == 0, "the old slabs to be given up")
    cluster.successor(cluster.donors[0])

    def mapped_while_busy() -> bool:
        write_pattern(device, 11, 0, 64 * MIB)
        return bool(device.status["slabs"]["mapped"] > 2)

    until(mapped_while_busy, "more slabs than before")
    check_pattern(device, 11, 0, 64 * MIB)


def test_a_front_end_that_somebody_has_unmounted(shared_cluster: Cluster) -> None:
    device = shared_cluster.start(size="16M")
    write_pattern(device, 12, 0)
    run("umount", "--lazy", device.run / "mnt")
    check_pattern(device, 12, 0)
    device.stop()
    assert shared_cluster.leftovers() == []
    shared_cluster.ok("device", "start", device.name)
    check_pattern(device, 12, 0)
    run("umount", "--lazy", device.run / "mnt")
    device.kill()
    device.remove()
    assert shared_cluster.leftovers() == []


def test_only_one_of_many_starts_wins(shared_cluster: Cluster) -> None:
    name = shared_cluster.name()
    processes = [started(shared_cluster, name) for _ in range(3)]
    outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes == [0, 9, 9], outputs
    device = Device(shared_cluster, name)
    assert device.status["state"] == "serving"
    write_pattern(device, 13, 0)
    check_pattern(device, 13, 0)
