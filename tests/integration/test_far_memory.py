# SPDX-License-Identifier: Apache-2.0
"""Far memory in a device's process, with processes that have some and a donor on loopback."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest
from support.devices.cluster import SLAB, Cluster, until
from support.devices.far_memory import (
    BLOCK,
    AgentProcess,
    FarProcess,
    connect_job,
    leave,
    paths_of,
    start_far_device,
    wait_far,
)

from infiniswap.device.control import far_client
from infiniswap.errors import InfiniswapError
from infiniswap.units import MIB

pytestmark = [pytest.mark.requires_native, pytest.mark.requires_root]

SIZE = 3 * SLAB - MIB  # the far range begins at the next slab all the same
FAR = 3 * SLAB


def test_far_memory_lies_beside_the_block_device(cluster: Cluster) -> None:
    cluster.donor()
    device = start_far_device(cluster, size_bytes=SIZE, far_bytes=FAR)
    status = device.status
    assert status["size_bytes"] == SIZE
    assert sum(status["slabs"].values()) == 6
    assert device.backup.stat().st_size == 3 * SLAB + FAR
    assert status["far"]["bytes"] == FAR
    assert status["far"]["processes"] == status["far"]["jobs"] == 0
    path = paths_of(cluster, device.name).far_socket
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    job = connect_job(device)
    with FarProcess(job) as process:
        job.close()  # as a run does: the job has it
        process.hello()
        for block in range(FAR // BLOCK):
            process.write(block, block + 1)
        far = device.status["far"]
        assert (far["jobs"], far["processes"], far["used_bytes"]) == (1, 1, FAR)
        until(lambda: device.status["slabs"]["mapped"] >= 3, "slabs of far memory with a donor")
        for block in range(FAR // BLOCK):
            process.read(block, block + 1)
        assert device.status["swap"]["used_bytes"] == 0
    wait_far(device, lambda far: far["used_bytes"] == 0, "the blocks of a dead process to be free")
    wait_far(device, lambda far: far["jobs"] == 0, "a job to be forgotten")
    leave(device)
    assert not path.exists()
    assert cluster.names() == []


def test_a_successor_serves_far_memory_again(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
    cluster.donor()
    device = start_far_device(cluster, size_bytes=SIZE, far_bytes=FAR)
    job = connect_job(device)
    with FarProcess(job) as process, FarProcess(job) as other:
        job.close()
        process.hello()
        other.hello()
        other.write(0, 200)
        for kill in range(1, 3):
            for block in range(FAR // BLOCK - 1):
                process.write(block, 10 * kill + block)
            device.wait_standby()
            device.send(signal.SIGKILL)
            process.wait_gone()
            process.hello()  # waits in the socket that the holder keeps
            assert device.wait_take_over(kill)["far"]["problem"] == ""
            for block in range(FAR // BLOCK - 1):
                process.read(block, 10 * kill + block)
            # One has come back; the other's memory is as far, so it counts against a stop.
            assert device.status["far"]["processes"] == 2
            other.wait_gone()
            other.hello()
            other.read(0, 200)
            with connect_job(device):  # another job, by the same socket
                wait_far(device, lambda far: far["jobs"] == 2, "a second job")
            wait_far(device, lambda far: far["jobs"] == 1, "the end of the second job")
        assert device.status["far"]["processes"] == 2
    wait_far(device, lambda far: far["used_bytes"] == far["jobs"] == 0, "the end of the job")
    leave(device)


def test_a_program_goes_on_while_processes_of_its_device_die(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
    cluster.donor()
    device = start_far_device(cluster, size_bytes=SIZE, far_bytes=12 * SLAB)
    with connect_job(device) as job:
        program = AgentProcess(job, tmp_path, parts=8)
    try:
        program.round()
        wait_far(device, lambda far: far["used_bytes"] >= 4 * SLAB, "most of it to be far")
        for kill in range(1, 4):
            device.wait_standby()
            program.begin_round()
            device.send(signal.SIGKILL)
            program.end_round()
            device.wait_take_over(kill)
            program.round()
        status = device.status
        assert status["far"]["processes"] == 1
        assert status["stats"]["crc_errors_remote"] == status["stats"]["requests_failed"] == 0
        program.close()
    finally:
        program.process.kill()
    wait_far(device, lambda far: far["used_bytes"] == far["jobs"] == 0, "the end of the job")
    leave(device)


def test_a_restart_and_a_drained_donor_leave_far_memory_whole(cluster: Cluster) -> None:
    cluster.env["INFINISWAP_DEVICE_STANDBY"] = "on"
    cluster.env["INFINISWAP_DAEMON_LEASE_GRACE_S"] = "120"
    first, _ = cluster.donor(), cluster.donor()
    device = start_far_device(cluster, size_bytes=SIZE, far_bytes=FAR)
    job = connect_job(device)
    with FarProcess(job) as process:
        job.close()
        process.hello()
        for block in range(FAR // BLOCK):
            process.write(block, block + 1)
        until(lambda: device.status["slabs"]["mapped"] >= 3, "slabs of far memory with a donor")
        device.wait_standby()
        done = device.command("restart")
        assert done.returncode == 0, done.stderr
        process.wait_gone()
        process.hello()
        for block in range(FAR // BLOCK):
            process.read(block, block + 1)
        cluster.ok("donor", "drain", first.address)
        for block in range(FAR // BLOCK):
            process.read(block, block + 1)
        status = device.status
        assert all(row["slabs"] == 0 for row in status["donors"] if row["address"] == first.address)
        assert status["stats"]["requests_failed"] == 0
    wait_far(device, lambda far: far["used_bytes"] == far["jobs"] == 0, "the end of the job")
    leave(device)


def test_a_device_is_not_stopped_under_far_memory(cluster: Cluster) -> None:
    cluster.donor()
    device = start_far_device(cluster, size_bytes=SIZE, far_bytes=FAR)
    paths = paths_of(cluster, device.name)
    job = connect_job(device)
    with FarProcess(job) as process:
        job.close()
        process.hello()
        process.write(0, 7)
        # What a service manager, or somebody, sends to the process itself.
        device.send(signal.SIGTERM)
        until(lambda: "has far memory on it" in device.log, "a refusal")
        assert device.status["state"] == "serving"
        process.read(0, 7)
        with connect_job(device):
            pass  # it takes jobs again
        assert "`infiniswap run` uses it" in device.command("stop").stderr
    # Its own run's end waits until what was killed has ended, and then takes all of it away.
    leave(device)
    assert cluster.names() == []
    with pytest.raises(InfiniswapError, match="no far memory"):
        far_client.connect(paths)


def test_seventeenth_job_is_refused(cluster: Cluster) -> None:
    cluster.donor()
    device = start_far_device(cluster, size_bytes=SIZE, far_bytes=FAR)
    paths = paths_of(cluster, device.name)
    jobs: list[socket.socket] = [connect_job(device) for _ in range(16)]
    with pytest.raises(InfiniswapError, match="16 jobs have far memory"):
        far_client.connect(paths)
    jobs.pop().close()
    jobs.append(connect_job(device))
    for job in jobs:
        os.close(job.detach())
    leave(device)
