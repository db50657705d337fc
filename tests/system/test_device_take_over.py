# SPDX-License-Identifier: Apache-2.0
"""Devices that outlive their process: kill -9 and restarts under load, and what is left when all
of them die. The plain machine's front ends, fuse and nbd-socket."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices import nbd_bytes
from support.devices.cluster import (
    NEEDS_SWAP,
    WAIT_S,
    Cluster,
    Device,
    children,
    process_state,
    run,
    until,
    wait_ended,
)
from support.devices.nbd_client import ask, connected
from support.devices.takeovers import donors_too, kill_again_and_again, restart_again_and_again
from support.jobs.pagejob import NEEDS, Job
from support.jobs.runs import Runner, ready, touch
from support.machine.runmode import FULL
from support.machine.stopping import stopped
from support.machine.swapout import swap_out_file

from infiniswap.system.process import swap_safety_report
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_native, pytest.mark.timeout(1500)]

KILLS = 20 if FULL else 2
STAGING = 8 * MIB


@pytest.fixture
def standing(cluster: Cluster) -> Cluster:
    """Two donors; devices have a standby."""
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.donor()
    cluster.donor()
    return cluster


def swapping(cluster: Cluster) -> Device:
    return cluster.start("--frontend", "fuse", "--swap")


def sockets(pid: int) -> int:
    found = 0
    for path in Path("/proc", str(pid), "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            found += str(path.readlink()).startswith("socket:")
    return found


def is_signalled(pid: int) -> bool:
    """Whether a signal waits for it to look."""
    lines = Path("/proc", str(pid), "status").read_text().splitlines()
    (pending,) = (line.split()[1] for line in lines if line.startswith("ShdPnd:"))
    return int(pending, 16) != 0


def hands_over() -> bool:
    """Whether this kernel and libfuse can hand a FUSE connection on: Linux 6.9."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (6, 9)


needs_resend = pytest.mark.skipif(not hands_over(), reason="needs FUSE_NOTIFY_RESEND (Linux 6.9)")


# ------------------------------------------------------------------------- nbd-socket


def test_what_was_written_is_there_after_each_kill(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    path = device.run / "nbd.sock"
    for kill in range(1, KILLS + 1):
        processes = device.processes()
        client = connected(path)
        for page in range(64):
            ask(client, nbd_bytes.WRITE, page * 1_048_576, bytes([kill, page]) * 2048)
        os.kill(processes["active"], signal.SIGKILL)  # most of it is staged, and nowhere else
        client.close()
        device.wait_take_over(kill)
        client = connected(path)
        for page in range(64):
            found = ask(client, nbd_bytes.READ, page * 1_048_576, 4096)
            assert found == bytes([kill, page]) * 2048
        client.close()
    status = device.wait_standby()
    assert status["pid"] != processes["active"]
    assert status["succession"]["reason"] == "killed"
    assert "loaded after the take-over" not in device.log
    device.stop()
    assert standing.processes() == {}
    # An orderly stop of a device that was taken over keeps its contents.
    again = standing.start("--frontend", "nbd-socket", name=device.name, size="")
    client = connected(path)
    assert ask(client, nbd_bytes.READ, 0, 4096) == bytes([KILLS, 0]) * 2048
    client.close()
    again.remove()


def test_a_restart_keeps_what_was_written(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    client = connected(device.run / "nbd.sock")
    ask(client, nbd_bytes.WRITE, 0, b"before" * 2048)
    before = device.processes()
    said = standing.ok("device", "restart", device.name)
    client.close()
    after = device.processes()
    assert f"process {before['active']} → {after['active']}" in said
    assert " ms" in said
    assert after["holder"] == before["holder"]
    assert not {after["active"], after["standby"]} & {before["active"], before["standby"]}
    client = connected(device.run / "nbd.sock")
    assert ask(client, nbd_bytes.READ, 0, 12_288) == b"before" * 2048
    client.close()
    assert device.status["succession"]["reason"] == "restart"


def test_a_standby_that_dies_is_replaced(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    before = device.processes()
    os.kill(before["standby"], signal.SIGKILL)
    wait_ended(before["standby"])

    def replaced() -> bool:
        return device.processes()["standby"] != before["standby"]

    until(replaced, "another standby")
    assert device.pid == before["active"]
    assert device.status["succession"]["take_overs"] == 0


def test_without_its_holder_a_device_goes_on_and_says_so(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    processes = device.processes()
    os.kill(processes["holder"], signal.SIGKILL)
    wait_ended(processes["holder"])
    wait_ended(processes["standby"])  # nobody could tell it that its turn has come

    def told() -> bool:
        return any(item.startswith("holder: ") for item in device.status["degraded"])

    until(told, "the status to tell it")
    assert device.status["succession"]["holder_pid"] is None
    refused = device.command("restart")
    assert refused.returncode != 0
    assert "Stop the device and start it again" in refused.stderr
    assert device.pid == processes["active"]
    device.stop()
    assert standing.processes() == {}


def test_with_all_of_them_dead_the_device_has_died(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    processes = device.processes()
    for name in ("holder", "standby", "active"):
        os.kill(processes[name], signal.SIGKILL)
    for pid in processes.values():
        wait_ended(pid)
    shown = device.command("show")
    assert shown.returncode != 0
    assert "has died" in shown.stderr
    device.remove()


def test_sigterm_to_the_holder_stops_the_device(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    processes = device.processes()
    os.kill(processes["holder"], signal.SIGTERM)
    for pid in processes.values():
        wait_ended(pid)
    assert standing.names() == []


def test_a_signal_to_who_takes_over_stops_the_device_afterwards(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    donor = cluster.donor()
    # Without a backup the successor waits for the donor, which is the moment that is wanted.
    device = cluster.start("--frontend", "nbd-socket", "--backup", "none", size="8M")
    processes = device.processes()
    with (device.run / "log").open() as log:
        donor.send(signal.SIGSTOP)
        before = sockets(processes["standby"])
        try:
            os.kill(processes["active"], signal.SIGKILL)
            until(lambda: sockets(processes["standby"]) > before, "a connection to the donor")
            os.kill(processes["standby"], signal.SIGTERM)
            until(lambda: not is_signalled(processes["standby"]), "the signal to arrive")
        finally:
            donor.send(signal.SIGCONT)
        for pid in processes.values():
            wait_ended(pid)
        said = log.read()
    assert said.index("SIGTERM: stopping") < said.index("take-over 1: done")
    assert cluster.names() == []


def test_a_successor_serves_without_its_sockets(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    processes = device.processes()
    socket, members = device.run / "control.sock", device.run / "members.sock"
    for path in (socket, members):
        path.unlink(missing_ok=True)
        path.mkdir()
    try:
        os.kill(processes["active"], signal.SIGKILL)
        wait_ended(processes["active"])
        client = connected(device.run / "nbd.sock")
        assert ask(client, nbd_bytes.READ, 0, 4096) == bytes(4096)
        client.close()
        until(lambda: "no control socket, tried again" in device.log, "it to say so")
        # The holder knows that it serves: there is another standby.
        until(lambda: len(children(processes["holder"])) == 2, "a standby")
    finally:
        for path in (socket, members):
            path.rmdir()
    assert device.wait_take_over(1)["pid"] == processes["standby"]
    device.stop()
    assert standing.processes() == {}


def test_what_waits_and_what_holds_is_locked(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    processes = device.processes()
    active = {item.name for item in swap_safety_report(processes["active"]).degraded}
    for name in ("holder", "standby"):
        report = swap_safety_report(processes[name])
        # What this host refuses to one of them it refuses to all.
        assert {item.name for item in report.degraded} <= active, name
        if "memory-lock" not in active:
            assert report.locked_bytes >= 0.9 * report.resident_bytes, name
            assert report.locked_bytes >= STAGING, name  # the state is among it
        stat = Path(f"/proc/{processes[name]}/stat").read_text()
        flusher = bool(int(stat.rpartition(")")[2].split()[6]) & 0x0008_0000)
        assert flusher or "io-flusher" in active, name
    for pid in processes.values():
        # A process is dead when its core has been dumped, and 0 is no limit for a dump to a pipe.
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (core,) = (line.split() for line in limits if line.startswith("Max core file size"))
        assert core[4:6] == ["1", "1"]


def test_a_state_of_another_version_refuses_the_restart(standing: Cluster) -> None:
    device = standing.start("--frontend", "nbd-socket")
    before = device.processes()
    _damage_state(before["holder"])
    refused = device.command("restart")
    assert refused.returncode != 0
    assert "cannot be restarted" in refused.stderr
    after = device.status
    assert (after["pid"], after["state"]) == (before["active"], "serving")
    assert after["succession"]["take_overs"] == 0
    assert before["standby"] in standing.processes()


def _damage_state(holder: int) -> None:
    """Flips bits in the header of the state file that the holder keeps."""
    for entry in Path(f"/proc/{holder}/fd").iterdir():
        if "infiniswap-state" in os.readlink(entry) or os.readlink(entry).endswith("/state"):
            with entry.open("r+b", buffering=0) as file:
                head = file.read(16)
                file.seek(8)
                file.write(bytes(byte ^ 0xFF for byte in head[8:16]))
            return
    raise AssertionError("the holder has no state file")


# ------------------------------------------------------------------ fuse, loop and swap


@pytest.fixture
def busy(standing: Cluster, job: Callable[[int], Job]) -> Iterator[tuple[Device, Job]]:
    """A device that a job swaps on."""
    device = swapping(standing)
    work = job(10_000)
    work.more_rounds()
    yield device, work
    work.finish()


def _mark(*marks: Any) -> Callable[[Any], Any]:
    def apply(function: Any) -> Any:
        for mark in marks:
            function = mark(function)
        return function

    return apply


@_mark(needs_resend, *NEEDS)
def test_no_page_is_wrong_after_each_kill(busy: tuple[Device, Job]) -> None:
    device, work = busy
    loops = {entry.path for entry in device.cluster.loops()}
    assert len(loops) == 1
    print("pauses in ms:", *kill_again_and_again(device, work, KILLS))
    assert {entry.path for entry in device.cluster.loops()} == loops
    until(lambda: device.status["slabs"]["mapped"] > 0, "slabs on donors")


@_mark(needs_resend, *NEEDS)
def test_no_page_is_wrong_when_a_donor_dies_with_the_device(
    busy: tuple[Device, Job], standing: Cluster
) -> None:
    device, work = busy
    restart = donors_too(standing)
    restart_again_and_again(device, restart, 20 if FULL else 1)
    kills = 20 if FULL else 1
    print("pauses in ms:", *kill_again_and_again(device, work, kills, restart))
    until(lambda: device.status["slabs"]["mapped"] > 0, "slabs on donors")
    assert device.status["stats"]["requests_failed"] == 0


@_mark(needs_resend, *NEEDS)
def test_a_restart_under_load_is_only_a_pause(busy: tuple[Device, Job]) -> None:
    device, work = busy
    device.wait_standby()
    said = device.cluster.ok("device", "restart", device.name)
    print(said)
    work.more_rounds()
    assert device.status["succession"]["reason"] == "restart"


@_mark(needs_resend, *NEEDS_SWAP)
def test_a_successor_reads_nothing_that_lies_on_its_device(standing: Cluster) -> None:
    """A run directory is memory in /run, which can be swapped out, and to the device itself."""
    standing.run_dir.mkdir()
    run("mount", "-t", "tmpfs", "-o", "mode=755", "none", standing.run_dir)
    try:
        device = swapping(standing)
        processes = device.processes()
        held = Path("/proc", str(processes["holder"]), "fd")
        memory = [
            path
            for path in held.iterdir()
            if "memfd:" in str(path.readlink()) and path.stat().st_size
        ]
        assert any("infiniswap-spec" in str(path.readlink()) for path in memory)
        for path in [*memory, device.run / "state"]:
            assert swap_out_file(path) == 0, f"{path.resolve()} is not locked"
        assert swap_out_file(device.run / "log") == 0, "its last page is not locked"
        # Once its process has gone; another process says whether the device may be taken over.
        (device.run / "runs").mkdir(exist_ok=True)
        (device.run / "runs" / "no run of ours").touch()
        with stopped(processes["holder"]):
            os.kill(processes["active"], signal.SIGKILL)
            until(lambda: process_state(processes["active"]) == "Z", "its death")
            until(lambda: swap_out_file(device.run / "log") > 0, "a log that is swapped out")
        device.wait_take_over(1)
        assert "take-over 1: the predecessor has ended" in device.log
        assert swap_out_file(device.run / "log") == 0
        device.remove()
    finally:
        run("umount", "--lazy", standing.run_dir)


@_mark(needs_resend, *NEEDS)
def test_with_both_killed_at_once_the_next_standby_takes_over(busy: tuple[Device, Job]) -> None:
    device, work = busy
    processes = device.processes()
    with stopped(processes["holder"]):  # it shall find both dead
        os.kill(processes["standby"], signal.SIGKILL)
        os.kill(processes["active"], signal.SIGKILL)
    device.wait_take_over(1)
    work.more_rounds()


@_mark(needs_resend, *NEEDS_SWAP)
def test_a_run_outlives_the_process_of_its_device(standing: Cluster) -> None:
    runner = Runner(standing)
    process = runner.popen(*touch(48, 1 << 30), options=("--size", "128M"), local="24M")
    try:
        ready(process, b"round 0\n")
        device = Device(standing, "run")
        device.wait_standby()
        os.kill(device.pid, signal.SIGKILL)
        status = device.wait_take_over(1)
        assert status["runs"] == [process.pid]  # the successor knows who uses the device
        ready(process, b"round 2\n")
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=2 * WAIT_S)
    assert b"has died" not in stderr
    assert b"1 take-over by another process of the device" in stderr
    until(lambda: standing.names() == [], "the device to go with its last run")
