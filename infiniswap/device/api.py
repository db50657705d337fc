# SPDX-License-Identifier: Apache-2.0
"""Messages between a device process and the commands, on its Unix socket (HTTP, JSON)."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

DEVICE_PATH: Final = "/v1/device"
RUNS_PATH: Final = "/v1/runs"
LEAVE_PATH: Final = "/v1/leave"
STOP_PATH: Final = "/v1/stop"
RESTART_PATH: Final = "/v1/restart"
RELOAD_PATH: Final = "/v1/reload"
ANSWER_BYTES_MAX: Final = 4 << 20
"""Of an answer: a status with as many donors as a list may name, each with the longest texts."""


class DonorRow(Struct, frozen=True, kw_only=True):
    """One donor as the device sees it.

    `transport`: "rdma" or "tcp", empty before the first connection; `transport_reason`: why not
    RDMA, where that was wanted; `rdma_fallbacks`: how often; `rdma_probes`: how often the device
    has looked for RDMA since then, while pages went over TCP.

    `state`: idle (no lease), mapped, suspended (unreachable, may come back), backing off.

    Pages are those transferred without an error since the device's process started; `rdma_*` are
    those of them that went by RDMA. `read_tail_us`: 99 of 100 recent reads took less; 0: no read
    yet. `expected_us`: how long a read of one page would take now; 0: no read yet.
    `connections_lost`, `reclaimed`, `given_up`: how often. `sessions_broken`: control sessions
    that the device ended for what the donor said, by reason ("flood", "protocol").
    """

    address: str
    name: str
    state: str
    detail: str
    slabs: int
    read_pages: int
    write_pages: int
    errors: int
    transport: str = ""
    transport_reason: str = ""
    rdma_fallbacks: int = 0
    rdma_probes: int = 0
    rdma_read_pages: int = 0
    rdma_write_pages: int = 0
    read_tail_us: float = 0.0
    expected_us: float = 0.0
    connections_lost: int = 0
    reclaimed: int = 0
    given_up: int = 0
    sessions_broken: dict[str, int] = {}

    def pages_by_transport(self) -> dict[str, tuple[int, int]]:
        """Pages read and written, by transport."""
        rdma = (self.rdma_read_pages, self.rdma_write_pages)
        return {"tcp": (self.read_pages - rdma[0], self.write_pages - rdma[1]), "rdma": rdma}


class SwapRow(Struct, frozen=True, kw_only=True):
    """The device as swap space."""

    active: bool
    priority: int | None
    used_bytes: int


class SuccessionRow(Struct, frozen=True, kw_only=True):
    """The processes that follow each other, and the one that would be next.

    Attributes:
        holder_pid: of the process that tells the standby when its turn comes; None: there is none.
        standby: "ready", "starting", or why there is none.
        take_overs: since the device was started.
        reason: why the last predecessor ended: killed, crashed, exited, restart; empty: none has.
        pause_ms: from its end until the device served again.
    """

    holder_pid: int | None
    standby: str
    take_overs: int
    reason: str
    pause_ms: float


class FarRow(Struct, frozen=True, kw_only=True):
    """Far memory of the jobs that use the device.

    Attributes:
        bytes: how much there can be.
        used_bytes: in blocks that a process has.
        away_bytes: of that, what is in no memory of the process.
        jobs: that may use it.
        processes: that have far memory, or had it when another process of the device took over.
        problem: why it is not served now; empty: it is.
        counts: what the processes say of themselves, those that have ended too (struct isw_far_told
            by name). They go on over a take-over, and are less until all have come back.
    """

    bytes: int
    used_bytes: int
    jobs: int
    processes: int
    away_bytes: int = 0
    problem: str = ""
    counts: dict[str, int] = {}


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """The state of a running device.

    Attributes:
        slabs: count by state: unmapped, mapped, suspended, draining.
        pages_on_donors: how many have a valid copy there now.
        stats: totals since the start, in pages unless the name says otherwise; those of the engine
            (struct isw_engine_stats), and `read_requests_waited_us`.
        remote_share: of the page-ins that were not zeros, how many donors served; None: no such.
        page_in_us_p50: time of page-ins that waited for a donor or the disk; also _p99.
        chosen_share: of the page-ins that a donor and the backup could serve, how many were read
            from the donor, because it was expected to answer sooner; None: no such.
        backup_expected_us: how long a read of one page from the backup would take now; 0: none yet.
        degraded: measures that this host refused, such as locked memory or processors kept awake,
            and protection that was turned off.
        alarms: what an administrator should act on now.
        runs: pids of the `run` commands that use it.
        sealed: whether pages leave its process sealed; a device of release 0.1 does not tell.
        awake: whether it keeps processors awake now; a device of release 0.1 does not tell.
        evictions: slabs that donors have taken back, since the start.
        slab_counts: what else has happened to slabs, see SlabCounts.
        succession: None for a device without a standby.
        far: None for a device without far memory.
    """

    name: str
    device_id: str
    pid: int
    uptime_s: float
    size_bytes: int
    slab_bytes: int
    frontend: str
    path: str
    backup: str | None
    swap: SwapRow
    ephemeral: bool
    state: str
    slabs: dict[str, int]
    pages_on_donors: int
    donors: list[DonorRow]
    stats: dict[str, int]
    remote_share: float | None
    page_in_us_p50: float
    page_in_us_p99: float
    degraded: list[str]
    alarms: list[str]
    runs: list[int]
    awake: bool = False
    evictions: int = 0
    slab_counts: dict[str, int] = {}
    succession: SuccessionRow | None = None
    chosen_share: float | None = None
    backup_expected_us: float = 0.0
    sealed: bool = False
    far: FarRow | None = None


class JoinRequest(Struct, frozen=True, kw_only=True):
    """A `run` that uses the device: the device watches it, and ends its job with it."""

    pid: int


class LeaveRequest(Struct, frozen=True, kw_only=True):
    """A `run` has ended in order. The answer comes at once without `wait`; otherwise after a device
    that no run uses has stopped."""

    pid: int
    wait: bool = True


class StopRequest(Struct, frozen=True, kw_only=True):
    """`remove`: contents and all."""

    remove: bool = False


class RestartRequest(Struct, frozen=True, kw_only=True):
    """Replaces the device's process; the answer comes when its successor is ready."""


class ReloadRequest(Struct, frozen=True, kw_only=True):
    """Reads the configuration again; a mistake in it is the answer's error."""


class ReloadAnswer(Struct, frozen=True, kw_only=True):
    """Keys (`section.key`) that have new values now, and keys whose new values wait for a stop and
    a start of the device. `changes`: all that has changed, in words; empty in earlier releases."""

    applied: list[str]
    waiting: list[str]
    changes: str = ""


class DeviceAnswer(Struct, frozen=True, kw_only=True):
    """`error` is empty after a success. A device that has stopped names its holder's pid: that
    process ends last."""

    error: str = ""
    exit_code: int = 0
    holder_pid: int | None = None


class Ready(Struct, frozen=True, kw_only=True):
    """First line that a device process writes to its starter: it serves, or why it does not.

    `degraded`: what DeviceStatus says of it; `warnings`: what else the starter should know.
    """

    ok: bool
    error: str = ""
    exit_code: int = 0
    path: str = ""
    frontend: str = ""
    why: str = ""
    warnings: list[str] = []
    degraded: list[str] = []
