# SPDX-License-Identifier: Apache-2.0
"""Every event in the logs that an administrator may act on: its meaning and its remedy.

The log line of an event carries its id: in the journal as INFINISWAP_EVENT, elsewhere in
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
    """An event that log lines refer to.

    Attributes:
        name: the id, stable across releases.
        meaning: what has happened.
        mend: what the administrator should do.
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
    "A donor did not come back in time or has forgotten the device. The device reads its slabs "
    "from the backup and maps them to other donors.",
    "Check that its daemon runs and is reachable: `infiniswap status`. The device uses it again "
    "when it answers.",
)
DONOR_SESSION_LOST: Final = Event(
    "donor-session-lost",
    "The control session with a donor has ended. The device reconnects; pages may still flow.",
    "None, unless it happens repeatedly: then check the network and the donor's log.",
)
DONOR_SUSPENDED: Final = Event(
    "donor-suspended",
    "The data connections to a donor have ended. The device reconnects; until then pages come "
    "from the backup, or wait if there is none.",
    "None, unless it lasts: then check the network and the donor's daemon.",
)
DONOR_DISTRUSTED: Final = Event(
    "donor-distrusted",
    "A donor returned other bytes than were written, or violated the protocol. It gets no slabs "
    "for a while.",
    "Test that host's memory, and check that it runs the same release as the others.",
)
PAGES_LOST: Final = Event(
    "pages-lost",
    "A device without a backup has lost pages with a donor. Reading one of them is an error.",
    "End the programs that use the device, then `infiniswap device remove NAME`. Use a backup.",
)
NO_DONOR: Final = Event(
    "no-donor",
    "A device without a backup has slabs without a donor; writes to them wait.",
    "Start more donors, or raise their pool.",
)
RDMA_FALLBACK: Final = Event(
    "rdma-fallback",
    "Pages to a donor travel by TCP although the device prefers RDMA.",
    "`infiniswap doctor` on either host says what RDMA lacks.",
)
BACKUP_FAILING: Final = Event(
    "backup-failing",
    "The backup refuses writes. Pages stay in staging and the device retries.",
    "Free space on its disk, or look for disk errors with dmesg.",
)
BACKUP_RECOVERED: Final = Event(
    "backup-recovered",
    "The backup accepts writes again.",
    "None: the problem is over.",
)
BACKUP_DATA: Final = Event(
    "backup-data",
    "The backup returned other bytes for a page than were written.",
    "The disk returns wrong data: replace it, after `infiniswap device stop NAME`.",
)
FRONTEND_DOWN: Final = Event(
    "frontend-down",
    "The front end of a device has ended unexpectedly.",
    "None if a standby takes over (ublk). Otherwise `infiniswap device restart NAME`.",
)
CONNECTIONS_LOST: Final = Event(
    "connections-lost",
    "A device of the front end nbd has lost connections to its own process and opens new ones.",
    "None, unless it lasts: `dmesg` says why the kernel refuses.",
)
TAKE_OVER: Final = Event(
    "take-over",
    "The process of a device has died, and its standby has taken over.",
    "None for the device. The preceding lines or `dmesg` (killed for memory) say why it died.",
)
NO_STANDBY: Final = Event(
    "no-standby",
    "No standby is ready: if the device's process died now, the pause would be longer.",
    "None if it passes: the holder retries. Otherwise the line says why no standby starts.",
)
HOLDER_GONE: Final = Event(
    "holder-gone",
    "The process that would start a successor has died: another death would lose the device.",
    "`infiniswap device stop NAME` and start it again when convenient.",
)
FAR_NOT_SERVED: Final = Event(
    "far-not-served",
    "A device's process has taken over and cannot serve far memory. Programs that have some wait.",
    "None if it passes: the process keeps trying. Otherwise the line says why; end those programs.",
)
DEVICE_DETACHED: Final = Event(
    "device-detached",
    "Somebody else has detached the block device of a device (`losetup -d`). The device is "
    "attached again; if that fails, its link is removed, so that it never leads to somebody "
    "else's device.",
    "None if the line says that it is attached again. Otherwise `infiniswap device restart NAME`.",
)
LINK_CHANGED: Final = Event(
    "link-changed",
    "Somebody else has removed or changed a device's link in /dev/infiniswap. The device has "
    "restored it.",
    "None, unless it happens repeatedly: then find out who does it.",
)
SWAP_TAKEN_OFF: Final = Event(
    "swap-taken-off",
    "Somebody else has taken the swap area of a device out of use (`swapoff`).",
    "To use it again: `swapon --discard -p PRIORITY /dev/infiniswap/NAME`. Otherwise stop the "
    "device.",
)
NOT_SEALED: Final = Event(
    "not-sealed",
    "A device does not seal its pages: donors, the network and the backup have them in plain text.",
    "Write `seal = true` under `[device]`, then stop the device and start it again. A device whose "
    "contents were begun without seals has to be removed first.",
)
KEYS_USED_UP: Final = Event(
    "seal-keys-used-up",
    "A device has sealed 2^32 pages with one key and has no room for another one. It goes on with "
    "that key.",
    "`infiniswap device stop NAME` and start it again when convenient: a start makes room.",
)
NOT_STOPPED: Final = Event(
    "device-not-stopped",
    "A device was asked to stop and is still in use, usually because its pages do not fit into "
    "memory. It goes on serving.",
    "End programs that use it, and stop it again.",
)
CONTENTS_NOT_KEPT: Final = Event(
    "contents-not-kept",
    "A device has stopped, and its contents could not be kept.",
    "Check the disk of its backup. The next start begins with zeros or is refused, and says so.",
)

# ------------------------------------------------------------------------- of a daemon

MEMORY_SHORT: Final = Event(
    "memory-short",
    "The donor's host needs memory: the donor takes lent slabs back.",
    "None. If it lasts, lend less there: raise `daemon.headroom` or lower `daemon.pool`.",
)
MEMORY_BACK: Final = Event(
    "memory-back",
    "The donor's host has its headroom again.",
    "None: the shortage is over.",
)
MEMORY_UNREADABLE: Final = Event(
    "memory-unreadable",
    "The figures of the host's memory cannot be read or cannot be true; the pool keeps its size.",
    "The line names the file. In a container, check what is mounted at /proc and /sys.",
)
SERVICE_IN_DANGER: Final = Event(
    "service-in-danger",
    "The latency of the service that a donor protects is close to its bound or above it. The donor "
    "lends nothing more, and takes slabs back if that lasts.",
    "None. If it happens without any slab lent, raise `daemon.slo.bound` or look at the service.",
)
SERVICE_WELL: Final = Event(
    "service-well",
    "The service that a donor protects has kept its bound for a while; the donor lends again.",
    "None: the danger is over.",
)
SERVICE_UNMEASURED: Final = Event(
    "service-unmeasured",
    "A donor cannot measure the latency of the service that it protects. It lends nothing more.",
    "The line says why: correct `[daemon.slo]`, or mend the command or the Prometheus server.",
)
SLABS_REFUSED: Final = Event(
    "slabs-refused",
    "The host refuses memory for another slab although its figures show enough.",
    "Check the limits of the daemon's cgroup, and its locked-memory limit.",
)
SLABS_UNPINNED: Final = Event(
    "slabs-unpinned",
    "Lent memory is not locked: the host may swap it out, which delays consumers.",
    "LimitMEMLOCK=infinity in the daemon's unit (ulimit -l unlimited), then restart it.",
)
SLAB_KEPT: Final = Event(
    "slab-kept",
    "A donor could not take a slab back from its consumer although its host needs memory.",
    "The line says why. The donor retries; `infiniswap status` shows who has the slabs.",
)
LAST_COPY_TAKEN: Final = Event(
    "last-copy-taken",
    "A donor took a slab back although its device had said that it holds the only copy: by "
    "`infiniswap donor drain --force`, or because its host stayed short of memory and nothing "
    "else was lent. The device raises an alarm, and reading these pages is an error.",
    "Give devices a backup. If it happens without a drain, lend less there: raise "
    "`daemon.headroom` or lower `daemon.pool`.",
)
SLAB_FORCED: Final = Event(
    "slab-forced",
    "A consumer did not give a slab up in time, and the donor took it by force. The consumer "
    "reads those pages from its backup.",
    "None, unless one consumer does so repeatedly: then check whether that host is stuck.",
)
CONSUMER_LOST: Final = Event(
    "consumer-lost",
    "A device has gone without saying goodbye. The donor keeps its slabs for a while.",
    "None for the donor. On the device's host: check whether the device runs.",
)
LEASE_EXPIRED: Final = Event(
    "lease-expired",
    "A device did not come back in time: its slabs are free again, and their contents are gone.",
    "None for the donor. If the device still exists, it goes on with its backup.",
)
DRAINING: Final = Event(
    "draining",
    "A donor has begun to give every slab back and to lend none, or has stopped doing so.",
    "None: somebody asked for it. `infiniswap donor undrain DONOR` ends it.",
)
RESTART_LOSES: Final = Event(
    "restart-loses-slabs",
    "A restart of this daemon would lose the slabs that it lends.",
    "The line says why: usually nothing can be mounted in `daemon.run_dir`.",
)
LEASE_NOT_KEPT: Final = Event(
    "lease-not-kept",
    "A lease could not be recorded or taken over: its device loses it at a restart.",
    "Free space in `daemon.run_dir`, which lies in memory.",
)
DESCRIPTORS_SHORT: Final = Event(
    "descriptors-short",
    "The limit on open files is too low for the connections that the daemon may have.",
    "Raise LimitNOFILE= in its unit, or lower `daemon.connections_max`.",
)
PLAIN_TCP: Final = Event(
    "plain-tcp",
    "Whoever sees the packets between the hosts can read the pages of devices that do not seal.",
    "Leave `device.seal` on, or let donors listen on a network that you trust.",
)

# ---------------------------------------------------------------------------- of both

RELOADED: Final = Event(
    "config-reloaded",
    "The configuration was read again and is in force.",
    "None.",
)
RESTART_NEEDED: Final = Event(
    "config-waits",
    "Keys of the configuration have changed that a running process cannot apply.",
    "Restart the daemon, or stop and start the device, when convenient.",
)
CONFIG_BROKEN: Final = Event(
    "config-broken",
    "The configuration was not reloaded because it has a mistake. Nothing has changed.",
    "Correct the line that is named (`infiniswap config check`), then reload again.",
)
RDMA_REMOVED: Final = Event(
    "rdma-device-removed",
    "The host is removing an RDMA device that was in use. Pages travel by TCP.",
    "None: the device uses RDMA again when the RDMA device is back.",
)
BROKER_LOST: Final = Event(
    "broker-lost",
    "The MQTT broker is unreachable or refuses. Mapped slabs are not affected; new donors are not"
    " found meanwhile.",
    "The line says why: the broker's host, its port, TLS or the credentials in `[mqtt]`.",
)
IDENTITY_TWICE: Final = Event(
    "identity-twice",
    "Two daemons announce themselves with one identity, so devices find only one of them.",
    "A copied machine: remove the identity that the line names on one of them and restart it.",
)
CERTIFICATE: Final = Event(
    "certificate",
    "The certificate of this host or of an authority expires soon or has expired, or the files "
    "have changed and cannot be used. With an expired certificate no session is opened; open ones "
    "go on for an hour.",
    "Renew it at the authority, then reload the daemon and the devices.",
)
PEERS_FILE: Final = Event(
    "peers-file-broken",
    "The file with the list of donors cannot be read. The last good list stays in force.",
    "Correct the mistake that the line names. Devices read the file again when it changes.",
)
CLOCK_STEPPED: Final = Event(
    "clock-stepped",
    "The clock of the process has jumped: the host slept, or its time was set.",
    "None, unless it happens often: check the host's time service, or whether its virtual machine"
    " is paused.",
)
LINES_LOST: Final = Event(
    "log-lines-lost",
    "The journal, file or pipe of the log did not accept lines in time. They are lost; no process"
    " waited.",
    "Check that journald runs and has disk space: `systemctl status systemd-journald`.",
)

ALL: Final = tuple(value for value in list(globals().values()) if isinstance(value, Event))
"""In the order of the table."""
