# SPDX-License-Identifier: Apache-2.0
"""A device's process that dies again and again under a job that knows every byte of its memory."""

from __future__ import annotations

import os
import signal

from cluster import Device
from pagejob import Job


def kill_again_and_again(device: Device, work: Job, kills: int) -> list[float]:
    """After each kill the job has read everything back, and changed it; returns the pauses, ms."""
    pauses = []
    for kill in range(1, kills + 1):
        processes = device.processes()
        os.kill(processes["active"], signal.SIGKILL)
        status = device.wait_take_over(kill)
        pauses.append(status["succession"]["pause_ms"])
        assert status["swap"]["active"]
        work.more_rounds()
    return pauses
