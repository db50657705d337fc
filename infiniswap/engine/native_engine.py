# SPDX-License-Identifier: Apache-2.0
"""isw_engine as `infiniswap.engine.protocol.Engine`; threads: see `infiniswap.engine.native`."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from infiniswap.engine.binding import (
    Handle,
    HandleOwner,
    check,
    ffi,
    lib,
    struct_arrays,
    struct_ints,
    text_of,
)
from infiniswap.engine.native_frontend import NativeFrontend, frontend_config, frontend_error
from infiniswap.engine.protocol import (
    EngineConfig,
    EngineEvent,
    EngineFigures,
    EventKind,
    FrontendConfig,
    RemoteConfig,
    RemoteInfo,
    SlabInfo,
    SlabState,
    StateInfo,
)
from infiniswap.errors import (
    BackupError,
    ConflictError,
    EngineError,
    InfiniswapError,
    MemoryLimitError,
)

_EVENTS_MAX = 256
_SLABS_PER_CALL = 4096
_REMOTE_STATES = {1: "up", 2: "down"}


class NativeEngine(HandleOwner):
    """isw_engine: one device's page path.

    Args:
        config: its shape. Defaults are in EngineConfig.
        backup_path: regular file or block device; None only with `config.no_backup`.

    Raises:
        BackupError: the backup cannot be used.
        ConflictError: another process has the backup.
        MemoryLimitError: staging and tables do not fit into memory.
        EngineError: the configuration makes no sense.
    """

    def __init__(self, config: EngineConfig, backup_path: str | None) -> None:
        self.config = config
        self._slab_count = -(-config.size_bytes // config.slab_bytes) if config.slab_bytes else 0
        self._frontends: list[NativeFrontend] = []
        self._lock = threading.Lock()  # guards _frontends; no C call is made under it
        self._event_lock = threading.Lock()  # guards the scratch array
        self._event_scratch = ffi.new("struct isw_event[]", _EVENTS_MAX)
        self._latency_bounds_ns = [
            lib.isw_latency_bucket_ns(bucket) for bucket in range(lib.ISW_LATENCY_BUCKETS)
        ]
        pointer = self._create(config, backup_path)
        self._handle = Handle("device's engine", pointer, lib.isw_engine_destroy)

    def _create(self, config: EngineConfig, backup_path: str | None) -> Any:
        error = ffi.new("struct isw_error *")
        out = ffi.new("isw_engine **")
        path = ffi.NULL if backup_path is None else os.fsencode(backup_path)
        result = lib.isw_engine_create(engine_config(config), path, out, error)
        if result < 0:
            raise _create_error(-result, text_of(error, -result), backup_path)
        return out[0]

    def take_over(self, backup_path: str | None) -> None:
        """Blocking, worker thread: at most ten seconds for each of two locks.

        Raises:
            ConflictError: the process that has the state file or the backup is alive.
            EngineError: the state file is damaged or of another device, boot or version.
            BackupError: the backup cannot be used.
        """
        error = ffi.new("struct isw_error *")
        path = ffi.NULL if backup_path is None else os.fsencode(backup_path)
        with self._use() as engine:
            result = lib.isw_engine_take_over(engine, path, error)
        if result < 0:
            raise _create_error(-result, text_of(error, -result), backup_path)

    def use(self) -> AbstractContextManager[Any]:
        """Any thread. EngineError EBADF once the engine is closed."""
        return self._use()  # type: ignore[no-any-return]

    @property
    def eventfd(self) -> int:
        """Readable when events wait. Any thread; lives as long as the engine."""
        with self._use() as engine:
            return int(lib.isw_engine_eventfd(engine))

    def events(self) -> Sequence[EngineEvent]:
        """Any thread, never waits. At most 256 at once: call again until it is empty."""
        with self._use() as engine, self._event_lock:
            scratch = self._event_scratch
            count = check(lib.isw_engine_events(engine, scratch, _EVENTS_MAX), "cannot read events")
            return [
                EngineEvent(EventKind(kind), *rest)
                for kind, *rest in (struct_ints(item).values() for item in scratch[0:count])
            ]

    def remote_connect(self, config: RemoteConfig) -> int:
        """Blocking, worker thread; at most `config.connect_ms_max`."""
        remote = ffi.new("uint32_t *")
        c_config, _keep = _remote_config(config)
        what = f"cannot connect to donor {config.host} port {config.port}"
        self._explained(what, lib.isw_remote_connect, c_config, remote)
        return int(remote[0])

    def remote_reconnect(self, remote: int, config: RemoteConfig) -> None:
        """Blocking, worker thread; at most `config.connect_ms_max`."""
        c_config, _keep = _remote_config(config)
        what = f"cannot reconnect to donor {config.host} port {config.port}"
        self._explained(what, lib.isw_remote_reconnect, remote, c_config)

    def remote_record_set(self, remote: int, record: bytes) -> None:
        """Any thread, never waits for long."""
        what = f"cannot set the record of remote {remote}"
        self._call(what, lib.isw_remote_record_set, remote, record, len(record))

    def remote_record(self, remote: int) -> bytes:
        """Any thread, never waits for long."""
        out = ffi.new("unsigned char[]", lib.ISW_RECORD_BYTES_MAX)
        length = self._call(f"no remote {remote}", lib.isw_remote_record, remote, out)
        return bytes(ffi.buffer(out, length))

    def remote_shutdown(self, remote: int) -> None:
        """Any thread, never waits; REMOTE_DOWN follows."""
        self._call(f"cannot shut remote {remote} down", lib.isw_remote_shutdown, remote)

    def remote_destroy(self, remote: int) -> None:
        """Blocking, worker thread. EngineError EBUSY while a slab is mapped there."""
        self._call(f"cannot remove remote {remote}", lib.isw_remote_destroy, remote)

    def slab_map(self, slab: int, remote: int, slot: int, generation: int) -> None:
        """Any thread, never waits. EngineError EBUSY unless the slab is unmapped."""
        what = f"cannot map slab {slab} to remote {remote}"
        self._call(what, lib.isw_slab_map, slab, remote, slot, generation)

    def slab_unmap(self, slab: int, remote: int, generation: int) -> None:
        """Any thread, never waits; SLAB_DRAINED follows. EngineError ESTALE."""
        self._call(f"cannot unmap slab {slab}", lib.isw_slab_unmap, slab, remote, generation)

    def slab_resume(self, slab: int, remote: int, generation: int) -> None:
        """Any thread, never waits. From SUSPENDED, after remote_reconnect."""
        self._call(f"cannot resume slab {slab}", lib.isw_slab_resume, slab, remote, generation)

    def slab_migrate(self, slab: int, remote: int, slot: int, generation: int) -> None:
        """Any thread, never waits. EngineError EBUSY, EINVAL, ENOTCONN."""
        what = f"cannot migrate slab {slab} to remote {remote}"
        self._call(what, lib.isw_slab_migrate, slab, remote, slot, generation)

    def slab_pull(self, slab: int, generation: int, again: bool) -> bool:
        """Any thread, never waits. EngineError ESTALE."""
        return bool(
            self._call(f"cannot pull slab {slab}", lib.isw_slab_pull, slab, generation, again)
        )

    def slab_pages_at(self, slab: int, remote: int, generation: int) -> tuple[int, bool]:
        """Any thread; looks at every page of the slab. EngineError ESTALE."""
        pages = ffi.new("uint32_t *")
        what = f"cannot count the pages of slab {slab}"
        more = self._call(what, lib.isw_slab_pages_at, slab, remote, generation, pages)
        return int(pages[0]), bool(more)

    def slab_fill(self, slab: int, generation: int, first: int, pages_max: int) -> tuple[int, int]:
        """Any thread, never waits. Pages begun, and where to go on. EngineError ESTALE."""
        following = ffi.new("uint32_t *")
        what, fill = f"cannot fill slab {slab}", lib.isw_slab_fill
        begun = self._call(what, fill, slab, generation, first, pages_max, following)
        return begun, int(following[0])

    def slab(self, slab: int) -> SlabInfo:
        """Any thread, never waits. One slab."""
        info = ffi.new("struct isw_slab_info *")
        if not self._call(f"cannot see slab {slab}", lib.isw_engine_slabs, slab, 1, info):
            raise EngineError(f"there is no slab {slab}", code=errno.EINVAL)
        return _slab_info(info)

    def slabs(self) -> Sequence[SlabInfo]:
        """Any thread, never waits. All slabs, by number."""
        infos: list[SlabInfo] = []
        batch = min(_SLABS_PER_CALL, max(1, self._slab_count))
        scratch = ffi.new("struct isw_slab_info[]", batch)
        what, listed = "cannot list slabs", lib.isw_engine_slabs
        while len(infos) < self._slab_count:
            if not (count := self._call(what, listed, len(infos), batch, scratch)):
                break
            infos.extend(_slab_info(item) for item in scratch[0:count])
        return infos

    def remotes(self) -> Sequence[RemoteInfo]:
        """Any thread, never waits. Those in use, by number."""
        remotes_max = self.config.remotes_max
        scratch = ffi.new("struct isw_remote_info[]", remotes_max)
        count = self._call("cannot list remotes", lib.isw_engine_remotes, remotes_max, scratch)
        return [
            _remote_info(number, item)
            for number, item in enumerate(scratch[0:count])
            if item.state in _REMOTE_STATES
        ]

    def _stats(self) -> Any:
        stats = ffi.new("struct isw_engine_stats *")
        with self._use() as engine:
            lib.isw_engine_stats(engine, stats)
        return stats

    def report_use(self) -> None:
        """Any thread, never waits."""
        with self._use() as engine:
            lib.isw_engine_report_use(engine)

    def pages_moved(self) -> tuple[int, int]:
        """Any thread, never waits. Page-ins and page-outs since the start."""
        stats = self._stats()
        return stats.pages_in, stats.pages_out

    def stats(self) -> dict[str, int]:
        """Any thread, never waits."""
        return struct_ints(self._stats()[0])

    def figures(self) -> EngineFigures:
        """Any thread, never waits."""
        stats = self._stats()
        counts, latency = struct_ints(stats[0]), struct_arrays(stats[0])
        return EngineFigures(counts, latency, self._latency_bounds_ns)

    def settle(self, wait_ms_max: int) -> None:
        """Blocking, worker thread. EngineError ETIMEDOUT."""
        self._call("the backup did not take all pages", lib.isw_engine_settle, wait_ms_max)

    def save_tables(self, path: str) -> None:
        """Blocking (writes a file), worker thread. After settle()."""
        what = f"cannot save the page tables to {path}"
        self._explained(what, lib.isw_engine_save_tables, os.fsencode(path))

    def load_tables(self, path: str) -> None:
        """Blocking (reads a file), worker thread. Before any front end."""
        what = f"cannot load the page tables from {path}"
        self._explained(what, lib.isw_engine_load_tables, os.fsencode(path))

    def seal_anew(self) -> int:
        """Blocking (reads and writes pages), worker thread. After load_tables()."""
        return self._explained("cannot seal kept pages anew", lib.isw_engine_seal_anew)

    def seal_tend(self) -> bool:
        """Any thread, never waits. EngineError ENOSPC."""
        return bool(self._call("no other key for further pages", lib.isw_engine_seal_tend))

    def frontend(self, kind: str, config: FrontendConfig) -> NativeFrontend:
        """Blocking, worker thread.

        Raises:
            UnavailableError: this build has no such front end.
            NotPermittedError: it needs root.
            EngineError: anything else, such as a limit of the kernel's.
        """
        return self._frontend(lib.isw_frontend_start, kind, config, "started")

    def frontend_prepare(self, kind: str, config: FrontendConfig) -> NativeFrontend:
        """Blocking, worker thread.

        Raises:
            UnavailableError, NotPermittedError: as for `frontend`.
            EngineError: nobody can take it over (EOPNOTSUPP); ublk: there is no such device
                (ENODEV), it is not one for this engine (EINVAL), or somebody else's (ESTALE).
        """
        return self._frontend(lib.isw_frontend_prepare, kind, config, "prepared")

    def _frontend(self, make: Any, kind: str, config: FrontendConfig, what: str) -> NativeFrontend:
        error = ffi.new("struct isw_error *")
        out = ffi.new("isw_frontend **")
        alive, shape = frontend_config(config)
        with self._use() as engine:
            result = make(engine, kind.encode(), shape, out, error)
            if result >= 0:
                frontend = NativeFrontend(self, kind, out[0])
                with self._lock:
                    self._frontends.append(frontend)
                return frontend
        del alive
        text = f"the front end {kind} cannot be {what}: {text_of(error, -result)}"
        raise frontend_error(-result, text, config.path)

    def _forget(self, frontend: NativeFrontend) -> None:
        with self._lock:
            if frontend in self._frontends:
                self._frontends.remove(frontend)

    def close(self) -> None:
        """Blocking, worker thread, idempotent. Front ends first."""
        if self._handle is None:
            return
        # A front end that starts meanwhile is listed within a call, which the handle counts.
        while True:
            with self._lock:
                frontends = list(self._frontends)
            if not frontends:
                break
            for frontend in frontends:
                frontend.close()
        super().close()


def engine_config(config: EngineConfig) -> Any:
    fields = dataclasses.asdict(config)
    flags = lib.ISW_ENGINE_NO_BACKUP if fields.pop("no_backup") else 0
    flags |= lib.ISW_ENGINE_STANDBY if fields.pop("standby") else 0
    flags |= lib.ISW_ENGINE_READ_AHEAD if fields.pop("read_ahead") else 0
    flags |= lib.ISW_ENGINE_QUICKER if fields.pop("quicker") else 0
    flags |= lib.ISW_ENGINE_SEAL if config.seal_key_fd >= 0 else 0
    return ffi.new("struct isw_engine_config *", {**fields, "flags": flags})


def read_state(fd: int) -> StateInfo:
    """What the state file behind an open descriptor is of; nothing changes.

    Raises:
        EngineError: it is empty (ENODATA), damaged (EBADMSG), of another version
            (EPROTONOSUPPORT) or older than the last boot of this host (ESTALE).
    """
    error = ffi.new("struct isw_error *")
    info = ffi.new("struct isw_state_info *")
    check(lib.isw_state_read(fd, info, error), "cannot read the state file", error)
    ints = struct_ints(info[0])
    return StateInfo(no_backup=bool(ints.pop("no_backup")), ready=bool(ints.pop("ready")), **ints)


_STATE_ERRORS = (errno.EINVAL, errno.ENODATA, errno.EBADMSG, errno.ESTALE, errno.EPROTONOSUPPORT)


def _create_error(code: int, text: str, backup_path: str | None) -> InfiniswapError:
    """The error class for a failed isw_engine_create."""
    where = backup_path or ""
    if code == errno.EWOULDBLOCK:
        return ConflictError(
            text, where=where, mend="Stop the device that uses it, or give another --backup."
        )
    if code == errno.ENOMEM:
        return MemoryLimitError(
            text,
            where="the device's buffers and tables",
            mend="Make the device or device.staging smaller, or free some memory.",
        )
    if code in _STATE_ERRORS or backup_path is None:
        return EngineError(text, where=where, code=code)
    return BackupError(text, where=where, mend="Give another place with --backup.")


def _remote_config(config: RemoteConfig) -> tuple[Any, dict[str, Any]]:
    """The C struct, and what it points to: to be kept until the call returns."""
    names = ("port", "queues", "connect_ms_max", "request_ms_max", "export_bytes")
    fields = {name: getattr(config, name) for name in names}
    needed = 1 if config.over is not None else config.queues
    if len(config.tickets) != needed:
        raise EngineError(f"{len(config.tickets)} tickets for {needed} connections")
    texts = [ffi.new("char[]", ticket.encode()) for ticket in config.tickets]
    fields |= {
        "host": ffi.new("char[]", config.host.encode()),
        "tickets": ffi.new("char *[]", texts),
    }
    if config.over is not None:
        fields |= config.over.fields()
    return ffi.new("struct isw_remote_config *", fields), {**fields, "texts": texts}


def _remote_info(number: int, item: Any) -> RemoteInfo:
    ints = struct_ints(item)
    return RemoteInfo(
        remote=number,
        state=_REMOTE_STATES[item.state],
        queues=item.queues,
        totals={name: n for name, n in ints.items() if name.endswith("_pages") or name == "errors"},
        in_flight=item.in_flight,
        read_tail_ns=item.read_tail_ns,
        by_rdma=bool(item.rdma),
        expected_ns=item.expected_ns,
    )


def _slab_info(item: Any) -> SlabInfo:
    return SlabInfo(
        state=SlabState(item.state),
        remote=None if item.remote == lib.ISW_NO_REMOTE else item.remote,
        slot=item.slot,
        in_flight=item.in_flight,
        generation=item.generation,
        source_state=SlabState(item.source_state),
        source_remote=None if item.source_remote == lib.ISW_NO_REMOTE else item.source_remote,
        source_slot=item.source_slot,
        source_in_flight=item.source_in_flight,
        source_generation=item.source_generation,
        page_ins=item.page_ins,
        page_outs=item.page_outs,
        remote_valid_pages=item.remote_valid_pages,
    )
