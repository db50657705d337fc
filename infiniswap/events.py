# SPDX-License-Identifier: Apache-2.0
"""Every event in the logs that an administrator would act on: what it means, what to do.

A log line about one of them carries its id: in the journal as INFINISWAP_EVENT, elsewhere in
brackets at its end. Ids are a promise to those who search for them. docs/logs.md shows this table.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

FIELD: Final = "isw_fields"
"""Of a log record: the journal's fields beside the message."""

_NAMESPACE: Final = uuid.UUID("6d0f5a0e-5a7b-5e0c-9a5e-6c2f0f3a7d11")


@dataclass(frozen=True, slots=True)
class Event:
    """One of them.

    Attributes:
        name: the id.
        meaning: what has happened.
        mend: what to do about it.
    """

    name: str
    meaning: str
    mend: str

    @property
    def message_id(self) -> str:
        """The journal's MESSAGE_ID."""
        return uuid.uuid5(_NAMESPACE, self.name).hex


def about(event: Event, *, donor: object = "", device: object = "") -> dict[str, dict[str, str]]:
    """`extra` of a log call.

    Args:
        event: what the line is about.
        donor: address of the donor concerned.
        device: name of the device concerned, where that is not the process's own.
    """
    fields = {"INFINISWAP_EVENT": event.name, "MESSAGE_ID": event.message_id}
    fields |= {"INFINISWAP_DONOR": str(donor)} if str(donor) else {}
    fields |= {"INFINISWAP_DEVICE": str(device)} if str(device) else {}
    return {FIELD: fields}


# ------------------------------------------------------------------------- of a device

DONOR_GIVEN_UP: Final = Event(
    "donor-given-up",
    "A donor did not come back in time, or had forgotten the device. Its slabs are read from the "
    "backup, and get other donors.",
    "Look whether its daemon runs and can be reached: `infiniswap status`. It is used again by "
    "itself.",
)
DONOR_SESSION_LOST: Final = Event(
    "donor-session-lost",
    "The control session with a donor has ended. It is tried again; pages may still flow.",
    "None, unless it comes again and again: then look at the network and the donor's log.",
)
DONOR_SUSPENDED: Final = Event(
    "donor-suspended",
    "The connections to a donor have ended. They are tried again; until then its pages come from "
    "the backup, or wait where there is none.",
    "None, unless it stays: then look at the network, and whether the donor's daemon runs.",
)
DONOR_DISTRUSTED: Final = Event(
    "donor-distrusted",
    "A donor answered with other bytes than were written, or against the protocol. It gets no "
    "slabs for a while.",
    "Test that host's memory, and look whether it runs the release that the others run.",
)
PAGES_LOST: Final = Event(
    "pages-lost",
    "Pages of a device without a backup are gone with a donor. Reading one is an error.",
    "End the programs that use the device, then `infiniswap device remove NAME`. Use a backup.",
)
NO_DONOR: Final = Event(
    "no-donor",
    "A device without a backup has slabs without a donor: writes to them wait.",
    "Start more donors, or raise their pool.",
)
RDMA_FALLBACK: Final = Event(
    "rdma-fallback",
    "Pages to a donor go over TCP although RDMA was wished for.",
    "`infiniswap doctor` says what is missing for RDMA, on either host.",
)
BACKUP_FAILING: Final = Event(
    "backup-failing",
    "The backup refuses writes. Pages stay in staging and are tried again.",
    "Free space on its disk, or look for errors of the disk with dmesg.",
)
BACKUP_RECOVERED: Final = Event(
    "backup-recovered", "The backup takes writes again.", "None: it is over."
)
BACKUP_DATA: Final = Event(
    "backup-data",
    "A page came back from the backup with other bytes than were written.",
    "The disk returns wrong data: replace it, after `infiniswap device stop NAME`.",
)
FRONTEND_DOWN: Final = Event(
    "frontend-down",
    "The front end of a device has ended by itself.",
    "None where a standby takes over (ublk). Else `infiniswap device restart NAME`.",
)
CONNECTIONS_LOST: Final = Event(
    "connections-lost",
    "A device of the front end nbd has lost connections to its own process. New ones are tried.",
    "None, unless it stays: `dmesg` says why the kernel refuses.",
)
TAKE_OVER: Final = Event(
    "take-over",
    "The process of a device has died, and its standby has taken over.",
    "None for the device. Why it died is in the lines before, or in `dmesg` (killed for memory).",
)
NO_STANDBY: Final = Event(
    "no-standby",
    "No second process stands ready: a death of the device's process would be followed by a "
    "longer pause.",
    "None if it passes: it is tried again. Else the line says why it cannot be started.",
)
HOLDER_GONE: Final = Event(
    "holder-gone",
    "The process that would start a successor has died: another death would lose the device.",
    "`infiniswap device stop NAME` and start it again when that is convenient.",
)
DEVICE_DETACHED: Final = Event(
    "device-detached",
    "Somebody else has detached the block device of a device (`losetup -d`). Its link does not "
    "lead to what others attach under that number: the device is attached again, or the link is "
    "gone.",
    "None where the line says that it is attached again. Else `infiniswap device restart NAME`.",
)
LINK_CHANGED: Final = Event(
    "link-changed",
    "Somebody else has removed or changed a device's link in /dev/infiniswap. It is put back.",
    "None, unless it comes again and again: then look who does that.",
)
SWAP_TAKEN_OFF: Final = Event(
    "swap-taken-off",
    "Somebody else has taken the swap area of a device out of use (`swapoff`).",
    "To use it again: `swapon --discard -p PRIORITY /dev/infiniswap/NAME`. Else stop the device.",
)
NOT_STOPPED: Final = Event(
    "device-not-stopped",
    "A device was asked to stop and is still in use, mostly as not everything that is swapped out "
    "fits into memory. It goes on serving.",
    "End programs that use it, and stop it again.",
)
CONTENTS_NOT_KEPT: Final = Event(
    "contents-not-kept",
    "A device has stopped, and what it held could not be kept.",
    "Look at the disk of its backup. The next start begins with zeros or is refused, and says so.",
)

# ------------------------------------------------------------------------- of a daemon

MEMORY_SHORT: Final = Event(
    "memory-short",
    "The donor's host needs memory: lent slabs are taken back.",
    "None. If it goes on for long, lend less there: raise `daemon.headroom` or lower "
    "`daemon.pool`.",
)
MEMORY_BACK: Final = Event(
    "memory-back", "The donor's host has its headroom again.", "None: it is over."
)
MEMORY_UNREADABLE: Final = Event(
    "memory-unreadable",
    "The figures of the host's memory cannot be read or cannot be true: the pool keeps its size.",
    "The line says which file. In a container, look at what is mounted at /proc and /sys.",
)
SLABS_REFUSED: Final = Event(
    "slabs-refused",
    "The host gives no memory for another slab although there should be some.",
    "Look at limits of the daemon's cgroup, and at its locked-memory limit.",
)
SLABS_UNPINNED: Final = Event(
    "slabs-unpinned",
    "Lent memory is not locked: the host may swap it out, and its consumers wait for that.",
    "LimitMEMLOCK=infinity in the daemon's unit (ulimit -l unlimited), then restart it.",
)
SLAB_KEPT: Final = Event(
    "slab-kept",
    "A slab could not be taken back from its consumer, although the donor's host needs memory.",
    "The line says why. It is tried again; `infiniswap status` shows whose slabs are lent.",
)
SLAB_FORCED: Final = Event(
    "slab-forced",
    "A consumer did not give a slab up in time. It was taken from it all the same: those pages "
    "come from the consumer's backup.",
    "None, unless one consumer does so again and again: then look whether that host is stuck.",
)
CONSUMER_LOST: Final = Event(
    "consumer-lost",
    "A device has gone without a word. Its slabs are kept for it for a while.",
    "None for the donor. On the device's host: look whether it runs.",
)
LEASE_EXPIRED: Final = Event(
    "lease-expired",
    "A device did not come back in time: its slabs are free again, and what they held is gone.",
    "None for the donor. The device goes on with its backup if it is still there.",
)
DRAINING: Final = Event(
    "draining",
    "A donor gives every slab back and lends none, or has ended doing so.",
    "Only what was meant by it: `infiniswap donor undrain HOST` ends it.",
)
RESTART_LOSES: Final = Event(
    "restart-loses-slabs",
    "A restart of this daemon would lose what is lent.",
    "The line says why: mostly a `daemon.run_dir` in which nothing can be mounted.",
)
LEASE_NOT_KEPT: Final = Event(
    "lease-not-kept",
    "A lease could not be written down, or not be taken over: its device loses it with a restart.",
    "Free space in `daemon.run_dir`, which lies in memory.",
)
DESCRIPTORS_SHORT: Final = Event(
    "descriptors-short",
    "The daemon may open too few files for the connections that it may have.",
    "LimitNOFILE= in its unit, or fewer `daemon.connections_max`.",
)
PLAIN_TCP: Final = Event(
    "plain-tcp",
    "Pages and tokens can be read by whoever sees the packets between the hosts.",
    "Let donors listen on a network that you trust.",
)

# ---------------------------------------------------------------------------- of both

RELOADED: Final = Event(
    "config-reloaded", "The configuration was read again and is in force.", "None."
)
RESTART_NEEDED: Final = Event(
    "config-waits",
    "Keys of the configuration have changed that a running process cannot take over.",
    "Restart the daemon, or stop and start the device, when that is convenient.",
)
CONFIG_BROKEN: Final = Event(
    "config-broken",
    "The configuration was not read again, as there is a mistake in it. Nothing has changed.",
    "Correct the line that is named (`infiniswap config check`), then reload again.",
)
RDMA_REMOVED: Final = Event(
    "rdma-device-removed",
    "The host is removing an RDMA device that was in use. Pages go on over TCP.",
    "None: RDMA is used again when the device is back.",
)
BROKER_LOST: Final = Event(
    "broker-lost",
    "The MQTT broker cannot be reached or refuses. Nothing changes for mapped slabs; donors that "
    "come are not found meanwhile.",
    "The line says why: the broker's host, its port, TLS or the credentials in `[mqtt]`.",
)
IDENTITY_TWICE: Final = Event(
    "identity-twice",
    "Two daemons announce themselves under one identity, so devices find only one of them.",
    "A copied machine: remove the identity that the line names on one of them and restart it.",
)
PEERS_FILE: Final = Event(
    "peers-file-broken",
    "The file with the list of donors cannot be read. The list of before counts.",
    "Correct what the line names. The file is read again when it changes.",
)
CLOCK_STEPPED: Final = Event(
    "clock-stepped",
    "The clock of the process has jumped: the host slept, or its time was set.",
    "None, unless it comes often: look at the host's time service, or at a virtual machine that "
    "is paused.",
)
LINES_LOST: Final = Event(
    "log-lines-lost",
    "The journal, or the file or pipe of the log, did not take lines in time. They are gone; "
    "nothing waited for them.",
    "Look whether journald runs and is not short of disk: `systemctl status systemd-journald`.",
)

ALL: Final = tuple(value for value in list(globals().values()) if isinstance(value, Event))
"""In the order of the table."""
