# SPDX-License-Identifier: Apache-2.0
"""A device's process that dies again and again under a job that knows every byte of its memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from support.devices.cluster import Cluster, Device, until
from support.jobs.pagejob import Job
from support.machine.runmode import IN_GUEST

PAGES_BETWEEN = 100
"""So many pages at least come in before a kill, so that it does not hit a device at rest."""


def kill_again_and_again(
    device: Device,
    work: Job,
    kills: int,
    meanwhile: Callable[[int], None] | None = None,
    done: int = 0,
) -> list[float]:
    """After each kill the job has read everything back, and changed it; returns the pauses, ms.

    Where reading everything takes minutes it has read some of it: what is wrong stays wrong, so the
    round after the last kill finds it.

    `meanwhile` is called with the kill's number while the device's successor takes over; `done`
    is how many take-overs there were before.
    """
    pauses = []
    for kill in range(done + 1, done + kills + 1):
        processes = _processes(device, work)
        _more_pages_in(device)
        os.kill(processes["active"], signal.SIGKILL)
        if meanwhile is not None:
            meanwhile(kill)
        status = device.wait_take_over(kill)
        pauses.append(status["succession"]["pause_ms"])
        assert status["swap"]["active"]
        _processes(device, work)
        if IN_GUEST:
            _more_pages_in(device)
        else:
            work.more_rounds()
    return pauses


def restart_again_and_again(device: Device, restart: Callable[[int], None], kills: int) -> None:
    """Kills and restarts donors alone, while the job goes on."""
    for kill in range(kills):
        restart(kill)
        _more_pages_in(device)


def _more_pages_in(device: Device) -> None:
    seen = device.status["stats"]["pages_in"]
    until(lambda: device.status["stats"]["pages_in"] > seen + PAGES_BETWEEN, "page-ins")


def _processes(device: Device, work: Job) -> dict[str, int]:
    """The device's processes, once there are all of them."""
    # Where processors are slow, a standby takes a minute to start beside a job at full speed.
    with work.stopped() if IN_GUEST else contextlib.nullcontext():
        return device.processes()


def donors_too(cluster: Cluster) -> Callable[[int], None]:
    """Kills one donor after the other, each of which is restarted at once: a `meanwhile`."""
    donors = list(cluster.donors)

    def restart(kill: int) -> None:
        number = kill % len(donors)
        donors[number].end(signal.SIGKILL)
        donors[number] = cluster.successor(donors[number])

    return restart
