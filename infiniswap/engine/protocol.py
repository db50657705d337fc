# SPDX-License-Identifier: Apache-2.0
"""The device's engine as the rest of the package knows it: typed protocols and plain records.

`infiniswap.engine.native` implements them on the C extension. The donor's store is in
`infiniswap.engine.store`, RDMA in `infiniswap.engine.rdma`. Methods marked *blocking* are called
through an OffLoop; the others never wait. All raise `infiniswap.errors.EngineError` (or a subclass)
with the C library's own sentence.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

ResultT = TypeVar("ResultT")


class OffLoop(Protocol):
    """Runs a *blocking* call on another thread, to its end."""

    def __call__(self, call: Callable[[], ResultT]) -> Awaitable[ResultT]: ...


class EventKind(enum.IntEnum):
    """Kinds of `EngineEvent`; the numbers are those of csrc/include/isw.h."""

    OVERFLOW = 1
    REMOTE_DOWN = 2
    SLAB_DRAINED = 3
    SLAB_ERROR = 4
    BACKUP_FAILING = 5
    BACKUP_RECOVERED = 6
    BAD_PAGE = 7
    FRONTEND_DOWN = 8
    CONNECTION_LOST = 9
    USED = 10


class SlabState(enum.IntEnum):
    """State of one slab of a device, as the engine sees it."""

    UNMAPPED = 0
    MAPPED = 1
    SUSPENDED = 2
    DRAINING = 3


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One thing the C threads report. Unused fields are 0."""

    kind: EventKind
    code: int
    remote: int
    slab: int
    generation: int
    value: int


@dataclass(frozen=True, slots=True)
class SlabInfo:
    """One slab of a device; counters are totals since the start, in pages.

    `source_*`: while it migrates, where it comes from; else unmapped.
    """

    state: SlabState
    remote: int | None
    slot: int
    in_flight: int
    generation: int
    source_state: SlabState
    source_remote: int | None
    source_slot: int
    source_in_flight: int
    source_generation: int
    page_ins: int
    page_outs: int
    remote_valid_pages: int

    @property
    def is_migrating(self) -> bool:
        """Whether it has a source."""
        return self.source_state is not SlabState.UNMAPPED

    def is_at(self, remote: int, generation: int) -> bool:
        """Whether it is there, comes from there, or is being taken off there."""
        return (self.remote, self.generation) == (remote, generation) or (
            self.source_remote,
            self.source_generation,
        ) == (remote, generation)


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    """One donor's connections.

    Attributes:
        remote: its number in the engine.
        state: "up" or "down".
        queues: connections.
        totals: since it has this number: "read_pages" and "write_pages" that it answered well, the
            same after the name of a transport other than TCP, and "errors".
        in_flight: transfers under way.
        read_tail_ns: 99 of 100 reads of late took less; 0: none yet.
        by_rdma: whether pages go by RDMA.
        expected_ns: what a read of one page would take now; 0: no read yet.
    """

    remote: int
    state: str
    queues: int
    totals: Mapping[str, int]
    in_flight: int
    read_tail_ns: int = 0
    by_rdma: bool = False
    expected_ns: int = 0


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """struct isw_engine_stats, of one moment.

    Attributes:
        counts: its scalar fields by name.
        latency: its histograms by name: how many took at most what `latency_bounds_ns` says, and
            longer than the bound before.
        latency_bounds_ns: of the buckets, rising.
    """

    counts: dict[str, int]
    latency: dict[str, Sequence[int]]
    latency_bounds_ns: Sequence[int]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Shape of a device's engine (struct isw_engine_config).

    `state_fd`: open state file, which outlives the process; -1: anonymous memory, which does not.
    `standby`: made without a backup, for `take_over`.
    `read_ahead`: reads from donors what will be asked for next, where the reads have a trend.
    `quicker`: reads from the backup what it is expected to have sooner than a donor.
    `seal_key_fd`: the device's key (`infiniswap.engine.seal`), borrowed: pages leave the process
    sealed. -1: they leave it as they are.
    """

    size_bytes: int
    slab_bytes: int
    staging_pages: int = 16_384
    request_bytes_max: int = 1 << 20
    requests_max: int = 128
    remotes_max: int = 64
    backup_write_bytes_max: int = 1 << 20
    backup_writers: int = 2
    backup_readers: int = 4
    hedge_us_min: int = 10_000
    far_bytes: int = 0
    no_backup: bool = False
    standby: bool = False
    read_ahead: bool = True
    quicker: bool = True
    state_fd: int = -1
    seal_key_fd: int = -1


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a state file belongs to (struct isw_state_info)."""

    size_bytes: int
    slab_bytes: int
    file_bytes: int
    staging_pages: int
    remotes_max: int
    no_backup: bool
    version: int
    ready: bool


class Connector(Protocol):
    """What a connect needs besides host and port, for a transport other than TCP."""

    def fields(self) -> Mapping[str, Any]:
        """Further fields of struct isw_remote_config, whose memory the result keeps. For one
        connect only: it takes what they lead to, also when it fails."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """How to reach one lease on one donor (struct isw_remote_config); `over` is None for TCP.

    `tickets`: one for each TCP connection, which are `queues`, or one beside RDMA.
    """

    host: str
    port: int
    tickets: tuple[str, ...] = field(repr=False)
    export_bytes: int
    queues: int = 2
    connect_ms_max: int = 3_000
    request_ms_max: int = 2_000
    over: Connector | None = None


def histogram_quantiles(
    buckets: Sequence[int], bounds: Sequence[float], quantiles: Sequence[float]
) -> list[float]:
    """Upper bound of the bucket that holds each quantile; 0.0 when all buckets are empty.

    Raises:
        ValueError: a quantile is outside 0..1.
    """
    total = sum(buckets)
    values: list[float] = []
    for quantile in quantiles:
        if not 0 <= quantile <= 1:
            raise ValueError(f"quantile {quantile} is outside 0..1")
        rank = max(1.0, quantile * total)
        seen = 0
        value = 0.0
        for count, bound in zip(buckets, bounds, strict=True):
            seen += count
            if count and seen >= rank:
                value = bound
                break
        values.append(value)
    return values


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """What a front end is made with (struct isw_frontend_config). Each kind reads what it needs.

    Attributes:
        path: fuse: the mount point; nbd-socket: of the socket.
        identity: ublk: 64 bits that the kernel keeps with the device: its numbers are used again.
        queues: ublk: 0: as many as suit the host.
        request_bytes_max: nbd: larger requests are refused.
        table_fd: far: who has which block; -1: none.
        device_id: ublk, to prepare: of the predecessor's device.
        note: fuse, to prepare: from the predecessor's `handover`.
    """

    path: str = ""
    identity: int = 0
    queues: int = 0
    request_bytes_max: int = 0
    table_fd: int = -1
    device_id: int = 0
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class FarTold:
    """Counts that the processes of far memory's jobs keep of themselves (struct isw_far_told).

    They are summed over the processes that live and those that have ended.

    Attributes:
        small_fetches: Fetches of a part of a block; `fetches` counts fetches of whole blocks.
        fetch_wait_ns: Time that threads waited for pages.
        room_waits: How often a thread waited until other pages had left.
        pages_lost: Pages whose bytes are gone for good (SIGBUS).
        pauses: How often far memory stopped evicting so that the kernel swapped (csrc/far/pause.c).
        back_fork: Pages handed back to the kernel because the process forked. The other `back_`
            fields are the other reasons: enum iswf_why in csrc/far/ring.h describes each.
        off_kernel: Processes whose memory is never far because the kernel cannot move pages. The
            other `off_` fields are the other reasons: enum iswf_off describes each.
    """

    pages_out: int = 0
    pages_in: int = 0
    small_fetches: int = 0
    fetches: int = 0
    fetch_wait_ns: int = 0
    room_waits: int = 0
    room_wait_ns: int = 0
    pages_lost: int = 0
    pauses: int = 0
    pause_ns: int = 0
    back_fork: int = 0
    back_locked: int = 0
    back_protected: int = 0
    back_policy: int = 0
    back_fixed: int = 0
    back_moved: int = 0
    back_advice: int = 0
    back_ended: int = 0
    back_pinned: int = 0
    back_stack: int = 0
    off_kernel: int = 0
    off_permission: int = 0
    off_cgroup: int = 0
    off_addresses: int = 0
    off_locked: int = 0
    off_threads: int = 0
    off_resources: int = 0
    off_device: int = 0
    off_sandbox: int = 0
    off_version: int = 0


@dataclass(frozen=True, slots=True)
class FrontendInfo:
    """What is known of a front end (struct isw_frontend_info).

    Attributes:
        size_bytes: of the device.
        requests_max: how many can be in flight at once.
        device_id: ublk: N of /dev/ublkbN.
        connections: nbd: of those served, how many have not ended; CONNECTION_LOST is reported
            when one does. far: processes with far memory; closing the front end takes that memory
            from them unless a successor serves the job's socket.
        used_bytes: far: in blocks that somebody has.
        away_bytes: far: of that, what is nowhere else.
        far: Counts of far memory's processes.
    """

    size_bytes: int
    requests_max: int
    device_id: int = 0
    connections: int = 0
    used_bytes: int = 0
    away_bytes: int = 0
    far: FarTold = FarTold()


class Frontend(Protocol):
    """A front end that serves, or is prepared to succeed another; close() ends it. EngineError
    EINVAL where its kind lacks what is asked for."""

    def info(self) -> FrontendInfo:
        """Never waits."""

    def handover(self) -> tuple[int, bytes]:
        """Kind fuse: its connection's descriptor, which stays its own, and a note for a successor.
        EngineError with the reason when nobody could take it over."""

    def serve(self, descriptor: int) -> None:
        """Serves one more connection, of which it makes a copy: kind nbd a socket in transmission,
        kind far a job's socket, before the job starts or after the predecessor's death, kind fuse
        (*blocking*, once prepared) the connection of a dead predecessor."""

    def take_over(self, wait_ms_max: int) -> None:
        """Blocking. Kind ublk, once prepared: serves the device of a predecessor that is dead.

        Raises:
            ConflictError: it is not dead yet; to be called again.
            NotFoundError: the device is gone, or somebody has stopped it: nobody will serve it.
            EngineError: anything else: only close() is left, which leaves the device alone.
        """

    def rings(self) -> tuple[int, ...]:
        """Descriptors that somebody who outlives this process should have copies of until it is
        dead (isw_frontend_rings). They stay this front end's."""

    def close(self) -> None:
        """Blocking, idempotent."""


@dataclass(frozen=True, slots=True)
class UblkShape:
    """What the kernel knows of a ublk device (struct isw_ublk_info).

    Attributes:
        live: a process serves it; else nobody does, and what is asked of it waits.
        ended: it was stopped, or never started: nobody can take it over.
        server_pid: the last process that served it, -1: none.
        identity: what it was made with.
    """

    live: bool
    ended: bool
    queues: int
    queue_depth: int
    request_bytes_max: int
    server_pid: int
    size_bytes: int
    identity: int


class Engine(Protocol):
    """One device's page path (isw_engine)."""

    @property
    def eventfd(self) -> int: ...
    def use(self) -> AbstractContextManager[Any]:
        """The C object, for a transport's own functions. EngineError once the engine is closed."""

    def events(self) -> Sequence[EngineEvent]:
        """Takes the events that have been reported."""

    def take_over(self, backup_path: str | None) -> None:
        """Blocking. A standby goes on where the process that had the state file was killed.

        Afterwards remotes are down, mapped slabs are SUSPENDED, and drains that were under way are
        reported. If it fails the engine stays a standby.
        """

    def remote_connect(self, config: RemoteConfig) -> int:
        """Blocking. Returns the remote's number."""

    def remote_record_set(self, remote: int, record: bytes) -> None:
        """Sets what a successor must know of a remote, at most 512 bytes. A successor finds this
        record or the one before. It has to be set before a slab is mapped there.
        """

    def remote_record(self, remote: int) -> bytes:
        """The remote's record; empty when there is none."""

    def remote_reconnect(self, remote: int, config: RemoteConfig) -> None:
        """Blocking. After REMOTE_DOWN and a renewed lease."""

    def remote_shutdown(self, remote: int) -> None: ...
    def remote_destroy(self, remote: int) -> None:
        """Blocking. Only when no slab is mapped there."""

    def slab_map(self, slab: int, remote: int, slot: int, generation: int) -> None: ...
    def slab_unmap(self, slab: int, remote: int, generation: int) -> None:
        """Ends with SLAB_DRAINED."""

    def slab_resume(self, slab: int, remote: int, generation: int) -> None: ...
    def slab_migrate(self, slab: int, remote: int, slot: int, generation: int) -> None:
        """Maps a mapped slab to one more donor, its destination.

        The first donor is its source: pages are read there until they are written or pulled.
        EBUSY: the slab has a source already. EINVAL: it is not mapped.
        """

    def slab_pull(self, slab: int, generation: int, again: bool) -> bool:
        """Copies pages from a slab's source in the background, one slab at a time.

        It has to be called again and again; with `again` it begins with the first page. Returns
        False at the last page. ESTALE: the slab is not mapped at both ends.
        """

    def slab_pages_at(self, slab: int, remote: int, generation: int) -> tuple[int, bool]:
        """How many pages are valid at a donor, and whether the number may still rise."""

    def slab_fill(self, slab: int, generation: int, first: int, pages_max: int) -> tuple[int, int]:
        """Begins to copy pages that the donor lacks from the backup to the donor.

        At most `pages_max` pages from page `first` on; fewer when copies have used up their share
        of the staging buffers. Pages that are being written are skipped. Returns how many copies
        were begun, and the page to go on with: the slab's number of pages when it is finished.
        ESTALE: the slab is not mapped, or has another generation.
        """

    def slab(self, slab: int) -> SlabInfo: ...
    def slabs(self) -> Sequence[SlabInfo]: ...
    def remotes(self) -> Sequence[RemoteInfo]: ...
    def report_use(self) -> None:
        """USED is reported once, with the next page that is read or written. A request that is
        under way at this moment may not count."""

    def pages_moved(self) -> tuple[int, int]:
        """Page-ins and page-outs since the start. Cheap."""

    def stats(self) -> dict[str, int]:
        """Every scalar field of struct isw_engine_stats by name."""

    def figures(self) -> EngineFigures:
        """All of struct isw_engine_stats."""

    def settle(self, wait_ms_max: int) -> None:
        """Blocking. Waits until the backup holds every page."""

    def save_tables(self, path: str) -> None: ...
    def load_tables(self, path: str) -> None: ...
    def seal_anew(self) -> int:
        """Blocking. After load_tables, before any front end: seals pages of earlier starts again
        where that is needed to make room for the key of this one. Returns how many of these pages
        do not open: reading them is an error until they are written."""

    def seal_tend(self) -> bool:
        """To be called now and then: goes on with a fresh key when the present one has sealed
        2^32 pages, and returns whether it did. EngineError ENOSPC: pages of all former keys are
        still in use; the present one goes on."""

    def frontend(self, kind: str, config: FrontendConfig) -> Frontend:
        """Blocking. Starts a front end of that kind (isw_frontend_start)."""

    def frontend_prepare(self, kind: str, config: FrontendConfig) -> Frontend:
        """Blocking. For a successor, while the predecessor serves: makes all that needs memory."""

    def close(self) -> None:
        """Blocking, idempotent. Front ends first."""
