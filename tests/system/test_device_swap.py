# SPDX-License-Identifier: Apache-2.0
"""A job that knows every byte of its memory, swapping to a device while donors and processes die.

The job (pagecheck.c) lives in a memory cgroup a third of its size; only it is under pressure.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, run, until, wait_ended
from support.devices.copied import for_want_of_donors
from support.jobs.pagejob import JOB_MIB, LIMIT_MIB, NEEDS, Job, StartJob

from infiniswap.system import swap
from infiniswap.units import MIB

pytestmark = NEEDS


@pytest.fixture
def patience() -> tuple[str, str]:
    """How long a donor may take to answer, in ms, and be away, in seconds."""
    return "1000", "2"


@pytest.fixture
def swapping(cluster: Cluster, patience: tuple[str, str]) -> Device:
    """A swap device with two donors that answers losses quickly."""
    cluster.env["INFINISWAP_CLUSTER_HEARTBEAT_S"] = "0.4"
    cluster.donor()
    cluster.donor()
    cluster.env["INFINISWAP_DEVICE_REQUEST_MS"] = patience[0]
    cluster.env["INFINISWAP_DEVICE_CONNECT_MS"] = "1000"
    cluster.env["INFINISWAP_POLICY_SUSPEND_S"] = patience[1]
    return cluster.start("--swap", size="192M")


def slabs_at(device: Device, number: int) -> int:
    address = device.cluster.donors[number].address
    (row,) = [row for row in device.status["donors"] if row["address"] == address]
    return int(row["slabs"])


@pytest.fixture
def work(swapping: Device, job: StartJob) -> Job:
    """A job that has filled its memory, part of which is on both donors."""
    work = job(0)
    work.reach("filled")
    until(lambda: slabs_at(swapping, 0) and slabs_at(swapping, 1), "slabs on both donors")
    return work


def finish(work: Job, device: Device) -> None:
    """The job has found every byte right, and the device no error."""
    work.finish()
    stats = device.status["stats"]
    for counter in ("requests_failed", "crc_errors_remote", "crc_errors_backup", "backup_errors"):
        assert stats[counter] == 0, (counter, stats[counter])


def test_every_page_comes_back(swapping: Device, work: Job) -> None:
    until(lambda: swapping.status["swap"]["used_bytes"] >= (JOB_MIB - LIMIT_MIB) * MIB, "swapping")
    # What went out before its slab had a donor lies in the backup alone, until it is written anew.
    until(lambda: share_of_a_round(swapping, work) > 0.9, "pages from donors", 2 * WAIT_S)
    finish(work, swapping)
    status = swapping.status
    stats = status["stats"]
    assert stats["pages_in_remote"] + stats["fallback_quicker"] > 1000
    served = stats["pages_in"] - stats["pages_in_zero"]
    assert status["remote_share"] == pytest.approx(stats["pages_in_remote"] / served)
    assert status["page_in_us_p99"] > 0
    # What the job no longer has, the donors do not keep: discard is on.
    until(lambda: swapping.status["stats"]["trim_requests"], "discards")
    swapping.stop()


def share_of_a_round(device: Device, work: Job) -> float:
    """Of what the job pages in while it verifies everything once, what the donors could serve."""
    before = device.status["stats"]
    work.more_rounds()
    after = device.status["stats"]
    counted = {key: after[key] - before[key] for key in after}
    missing, remote = for_want_of_donors(counted), counted["pages_in_remote"]
    could = remote + counted["pages_in_backup"] - missing
    return float(could / max(1, could + missing))


def busier_donor(device: Device, work: Job) -> int:
    """Its number. Only a donor that is asked for something can be missed, and what the job pages in
    may all have come to lie in slabs of the other one."""

    def read_pages() -> list[int]:
        rows = {row["address"]: row["read_pages"] for row in device.status["donors"]}
        return [int(rows[donor.address]) for donor in device.cluster.donors]

    def reads_of_a_round() -> list[int]:
        before = read_pages()
        work.more_rounds()
        return [after - then for after, then in zip(read_pages(), before, strict=True)]

    reads = until(
        lambda: max(reads := reads_of_a_round()) > 100 and reads, "a donor that is read from"
    )
    return int(reads.index(max(reads)))


def test_two_killed_donors_cost_no_page_and_new_ones_are_used(swapping: Device, work: Job) -> None:
    cluster = swapping.cluster
    dead = list(cluster.donors)
    for donor in dead:
        donor.send(signal.SIGKILL)
    for donor in dead:
        donor.end(signal.SIGKILL)
    work.more_rounds()
    until(lambda: swapping.status["slabs"]["mapped"] == 0, "no slab mapped")
    # Never silent: counted, and said.
    assert swapping.status["stats"]["pages_in_backup"] > 0
    until(lambda: "given up" in swapping.log, "a line that says so")
    # Restarted daemons are other donors at known addresses; nothing of the old ones is trusted.
    for donor in dead:
        cluster.successor(donor)
    until(lambda: swapping.status["slabs"]["mapped"], "slabs on restarted donors")
    before = swapping.status["stats"]["pages_in_remote"]
    work.more_rounds()
    until(lambda: swapping.status["stats"]["pages_in_remote"] > before, "pages from donors")
    finish(work, swapping)


# However long a look at the status takes, and so that a busy machine alone makes nobody suspect.
@pytest.mark.parametrize("patience", [("5000", "60")], ids=["patient"])
def test_a_donor_that_pauses_is_suspended_and_comes_back(
    swapping: Device, work: Job, patience: tuple[str, str]
) -> None:
    until(lambda: share_of_a_round(swapping, work) > 0.9, "pages from donors", 2 * WAIT_S)
    number = busier_donor(swapping, work)
    donor = swapping.cluster.donors[number]

    seen: list[Any] = []

    def just_its_slabs_are() -> bool:
        assert work.process.poll() is None, work.log
        assert "given up" not in swapping.log, swapping.log
        seen[:] = [status := swapping.status]
        (row,) = [row for row in status["donors"] if row["address"] == donor.address]
        return bool(0 < row["slabs"] == status["slabs"]["suspended"])

    donor.send(signal.SIGSTOP)
    try:
        until(just_its_slabs_are, "its slabs to be suspended, and no others")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{seen}\n{swapping.log}") from None
    finally:
        donor.send(signal.SIGCONT)
    until(lambda: "back with the same lease" in swapping.log, "the same lease again")
    until(lambda: not swapping.status["slabs"]["suspended"], "nothing suspended")
    assert "given up" not in swapping.log, swapping.log
    work.more_rounds()
    finish(work, swapping)
    assert slabs_at(swapping, number) >= 1


def test_a_donor_that_stays_away_is_replaced_and_may_return(swapping: Device, work: Job) -> None:
    number = busier_donor(swapping, work)
    donor = swapping.cluster.donors[number]
    donor.send(signal.SIGSTOP)
    try:
        until(lambda: "given up" in swapping.log, "the donor to be given up")
        until(lambda: slabs_at(swapping, number) == 0, "no slab there")
        work.more_rounds()
    finally:
        donor.send(signal.SIGCONT)
    # Whatever it still had in its socket buffers from before must harm nobody now.
    until(lambda: slabs_at(swapping, number) or "mapped to donor" in swapping.log, "a second life")
    work.more_rounds()
    finish(work, swapping)


def test_a_device_process_that_pauses_loses_nothing(
    cluster: Cluster, swapping: Device, work: Job
) -> None:
    pid = swapping.send(signal.SIGSTOP)
    try:
        # The donors hear nothing for longer than they bear; only their sessions may end of it,
        # as the connections for pages stand.
        until(
            lambda: all("[consumer-lost]" in donor.log for donor in cluster.donors),
            "the end of both sessions",
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    work.more_rounds()
    until(lambda: swapping.status["slabs"]["mapped"], "mapped slabs")
    until(lambda: not swapping.status["slabs"]["suspended"], "nothing suspended")
    finish(work, swapping)


def test_a_device_in_use_refuses_to_stop_until_there_is_room(swapping: Device, work: Job) -> None:
    if len(swap.active_areas()) > 1:
        pytest.skip("needs a host without swap of its own, which would take the pages over")
    until(lambda: swapping.status["swap"]["used_bytes"] >= (JOB_MIB - LIMIT_MIB) * MIB, "swapping")
    for action in ("stop", "remove"):
        done = swapping.command(action)
        assert done.returncode == 13, done.stderr
        assert work.cgroup.name in done.stderr
        assert "does not fit" in done.stderr
    pid = swapping.send(signal.SIGTERM)
    until(lambda: "not stopped" in swapping.log, "the refusal in the log")
    status = swapping.status
    assert (status["pid"], status["state"], status["swap"]["active"]) == (pid, "serving", True)
    work.more_rounds()
    # Now there is room; the job goes on meanwhile and loses nothing.
    work.cgroup.set_limit(4 * JOB_MIB * MIB)
    path = status["path"]
    swapping.send(signal.SIGTERM)
    wait_ended(pid)
    assert swap.find_area(Path(path)) is None
    assert swapping.cluster.leftovers() == []
    work.finish()


def test_stop_brings_back_what_a_resting_job_has_swapped_out(swapping: Device, work: Job) -> None:
    work.rest()
    # The donor dies first, so that swapoff itself meets its loss.
    swapping.cluster.donors[1].end(signal.SIGKILL)
    work.cgroup.set_limit(4 * JOB_MIB * MIB)
    swapping.stop()
    assert swapping.cluster.leftovers() == []
    work.finish()


def test_after_the_death_of_its_process_a_swap_device_can_be_started_again(
    swapping: Device, job: StartJob, work: Job
) -> None:
    cluster, name = swapping.cluster, swapping.name
    path = Path(swapping.status["path"])
    swapping.kill()
    # Its memory is gone, so the job cannot go on; but nothing may hang.
    work.process.wait(WAIT_S)
    assert work.process.returncode != 0
    assert "wrong" not in work.log
    assert name in cluster.ok("device", "list")
    done = cluster.cli("device", "show", name)
    assert done.returncode == 11
    assert "died" in done.stderr
    done = cluster.cli("device", "start", name)
    if swap.find_area(path) is not None:
        assert done.returncode == 9, done.stderr
        assert "swapoff" in done.stderr
        run("swapoff", path)
        done = cluster.cli("device", "start", name)
    assert done.returncode == 0, done.stderr
    assert swapping.status["swap"]["active"]
    second = job(1)
    second.reach("filled")
    second.finish()
    assert os.path.realpath(swapping.path) == swapping.status["path"]
