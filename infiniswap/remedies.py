# SPDX-License-Identifier: Apache-2.0
"""What to do about the alarms of a device (infiniswap.device.slabs.alarms)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do about one kind of alarm.

    Attributes:
        words: of the alarm.
        for_device: about a device that is there; {name} stands for its name.
        for_next_run: about the next run, once the device has ended with its run; "" where that
            cannot have the alarm.
    """

    words: str
    for_device: str
    for_next_run: str = ""


REMEDIES: Final = (
    Remedy(
        " refuses writes: ",
        "df -h; dmesg | tail (free that disk; writes are retried)",
        "Free space on the disk of the backup (df -h, dmesg), or name another place with --backup",
    ),
    Remedy(
        "from the backup with other bytes",
        "dmesg | tail (the disk returns wrong data: replace it)",
        "The disk of the backup returns wrong data (dmesg): name another place with --backup",
    ),
    Remedy(
        "was given up",
        "infiniswap status (see that donor's log; the device tries it again on its own)",
        "See that donor's log (infiniswap status)",
    ),
    Remedy(
        "gets no further slabs",
        "infiniswap status (test that host's memory, and the network to it; use a backup)",
        "Test that host's memory, and the network to it",
    ),
    Remedy(
        "neither a donor nor a backup",
        "infiniswap status (start more donors, or raise their pool)",
        "Start more donors, or raise their pool (infiniswap status)",
    ),
    Remedy(
        ", as there is no backup",
        "end the programs that use it, then: infiniswap device remove {name}",
        "Run it again with a backup (leave out --backup none)",
    ),
    Remedy("front end has ended", "infiniswap device restart {name}"),
    Remedy("was detached by somebody else", "infiniswap device restart {name}"),
    Remedy(
        "programs wait for their far memory",
        "infiniswap device restart {name} (or end those programs; the device keeps trying)",
    ),
    Remedy(
        "swap area was taken out of use",
        "swapon --discard /dev/infiniswap/{name} (or: infiniswap device stop {name})",
    ),
    Remedy(
        "connections are not complete",
        "dmesg | grep nbd (the device connects again on its own)",
    ),
)
