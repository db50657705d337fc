# SPDX-License-Identifier: Apache-2.0
"""Starts device processes: from a shell in the background, or in the foreground."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infiniswap.control import own_certificate
from infiniswap.device.api import Ready
from infiniswap.device.control import client
from infiniswap.device.control.client import DeviceError
from infiniswap.device.spec import rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec, encode_spec
from infiniswap.errors import (
    DeadlineError,
    InfiniswapError,
    MemoryLimitError,
    UnavailableError,
)
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.system import programs, ublk
from infiniswap.system.notify import Notifier
from infiniswap.system.service_units import capabilities_by_hand
from infiniswap.system.surroundings import leave
from infiniswap.system.surroundings.kills import KillWatch
from infiniswap.system.surroundings.limits import check_ulimits
from infiniswap.units import MIB

START_S_MAX = 120.0
"""Reserving the backup of a large device takes its time on a slow disk."""

_BYTES_PER_STATE_BYTE = 128
"""24.4 bytes of state for a page, and some."""
_MEMORY_BYTES = 256 * MIB
"""Allowance for one process beside staging buffers and state: twice what one was seen to map."""
_READY_BYTES_MAX = 64 * 1024
_INSIST_S = 2.0
_ORPHAN_PAUSE_S = 0.5


def device_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a device process: one malloc arena, as each would be locked."""
    return programs.environment({"MALLOC_ARENA_MAX": "1"}, base=base)


def holder_program() -> Path:
    """The holder, which lies beside the C extension.

    Raises:
        UnavailableError: it is not installed.
    """
    from infiniswap.engine.binding import extension_path

    program = extension_path().parent.parent / "device" / "infiniswap-holder"
    if not os.access(program, os.X_OK):
        raise UnavailableError(
            "the program that restarts devices is not installed",
            where=str(program),
            mend='Install the package again; or do without: standby = "off" under [device].',
        )
    return program


def _command(spec: DeviceSpec, spec_fd: int, ready_fd: int, *, foreground: bool) -> list[str]:
    mode = "foreground" if foreground else "background"
    device = programs.python("-m", "infiniswap.device", mode)
    if spec.config.device.standby == "off":
        return [*device, "alone", str(spec_fd), str(ready_fd)]
    return [str(holder_program()), str(spec_fd), str(ready_fd), *device]


def keep_certificate(spec: DeviceSpec) -> None:
    """Makes the certificate of the metrics port where there is to be one: the device's process only
    reads it.

    Raises:
        ConfigError: the one that is there cannot be used.
        NotPermittedError, SystemCallError: it cannot be written.
    """
    if spec.has_metrics_port and spec.config.cluster.ca_file is None:
        own_certificate.keep_certificate(spec.config.device.backup_dir, own_certificate.DEVICE)


def start(spec: DeviceSpec, paths: DevicePaths, *, foreground: bool = False) -> Ready:
    """Starts a device process and waits until it serves.

    Args:
        foreground: keep standard error; the caller then waits for `foreground_wait`.

    Raises:
        DeviceError: it could not start; carries the reason and the exit code.
        DeadlineError: it does not answer; it has been ended.
        InfiniswapError: nothing was started.
    """
    check_limits(spec)
    keep_certificate(spec)
    if spec.config.device.frontend in ("auto", "ublk"):
        ublk.load_driver()  # the device may not: it has no CAP_SYS_MODULE
    process, ready_read, kills = _spawn(spec, foreground=foreground)
    with os.fdopen(ready_read, "rb", buffering=0) as pipe:
        try:
            ready = _wait_ready(pipe.fileno())
        except BaseException:
            _end(process)  # Ctrl-C: it undoes what it has done ...
            _clear_unused(paths)  # ... unless it had no time to begin
            raise
    # Before its end, which may be to undo what it has begun, and to delete the log with it.
    hint = rundir.log_hint(paths, stays=False)
    if ready is None or not ready.ok:
        _end(process)
    if ready is None and (cause := kills.cause()):
        raise MemoryLimitError(
            f"the kernel has killed the device process while it started, for {cause}",
            where=f"device {spec.name}",
            mend="Raise that limit, or start the device from outside.",
        )
    if ready is None:
        if not spec.ephemeral and paths.log.exists():
            hint = rundir.log_hint(paths, stays=True)
        raise DeadlineError(
            "the device process ended or did not answer while it started",
            where=f"device {spec.name}",
            mend=hint,
        )
    if not ready.ok:
        raise DeviceError(ready.error, ready.exit_code)
    _CHILDREN[paths.name] = process
    return ready


def _spawn(spec: DeviceSpec, *, foreground: bool) -> tuple[programs.Process, int, KillWatch]:
    """A process of its own for the device, which none of the starter's limits and cgroups holds.

    Returns:
        The process, the pipe on which it says that it serves, and what tells why it was killed.
    """
    watches: list[KillWatch] = []

    def settle(pid: int) -> None:
        leave.settle(pid, f"infiniswap-device-{spec.name}-{pid}", managed=Notifier().managed)
        watches.append(KillWatch(pid))

    ready_read, ready_write = os.pipe()
    # In memory: a full disk is no reason not to start.
    with os.fdopen(os.memfd_create("spec"), "wb+") as spec_file:
        spec_file.write(encode_spec(spec))
        spec_file.seek(0)  # writes it as well
        try:
            process = programs.start(
                _command(spec, spec_file.fileno(), ready_write, foreground=foreground),
                # It makes its run directory and writes its log there as soon as it has the lock:
                # what we made, nobody would take away if we were killed now.
                stdout=2,
                pass_fds=(spec_file.fileno(), ready_write),
                env=device_environment(),
                keep=capabilities_by_hand(),
                before=settle,
                what="cannot start the device process",
            )
        except InfiniswapError:
            os.close(ready_read)
            raise
        finally:
            os.close(ready_write)
    return process, ready_read, watches[0]


def check_limits(spec: DeviceSpec) -> None:
    """Raises UnavailableError where a limit would end the device, or refuse it memory or a file."""
    staging_bytes = spec.config.device.staging_bytes
    state_bytes = staging_bytes + spec.engine_bytes // _BYTES_PER_STATE_BYTE
    has_file = spec.backup is not None and not Path(spec.backup).is_block_device()
    check_ulimits(
        file_bytes=max(state_bytes, spec.engine_bytes if has_file else 0) + MIB,
        memory_bytes=_MEMORY_BYTES + staging_bytes + state_bytes,
    )


# Not state that anything depends on: it only keeps Popen objects from being collected, which
# would warn that a child still runs - as it is meant to.
_CHILDREN: dict[str, programs.Process] = {}


def wait(paths: DevicePaths, waiting: Callable[[], None], manager: Notifier) -> int:
    """Waits for the end of a device that this process has started; returns its exit code.

    Args:
        paths: of the device.
        waiting: called once, when signals no longer end this process.
        manager: the service manager that has started us, if one has.

    Signals that mean "end" are passed on. It has a session of its own and so does not get those
    of the terminal by itself: it may have to refuse, and must outlive a first Ctrl-C then. A
    service manager does not hear a refusal, and asks only once; so it is asked again in its name
    until the programs that use the device have ended, as they do when a host shuts down.
    """
    process = _CHILDREN.pop(paths.name)

    def end() -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            return
        with contextlib.suppress(InfiniswapError, OSError):  # its holder is gone
            os.kill(client.status(paths).pid, signal.SIGTERM)

    def ask(*_: object) -> None:
        end()
        if manager.managed:
            manager.stopping("waiting until nothing is swapped out")
            signal.setitimer(signal.ITIMER_REAL, _INSIST_S)

    def reload(*_: object) -> None:
        with contextlib.suppress(InfiniswapError, OSError):  # it is ending
            os.kill(client.status(paths).pid, signal.SIGHUP)

    asking = (signal.SIGINT, signal.SIGTERM, *((signal.SIGALRM,) if manager.managed else ()))
    previous = {number: signal.signal(number, ask) for number in asking}
    if manager.managed:  # a terminal that closes still ends this process, and not the device
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, reload)
    try:
        waiting()
        code = process.wait()
        while code < 0 and rundir.is_running(paths):
            time.sleep(_ORPHAN_PAUSE_S)  # the holder was killed; the device goes on without it
        return code
    finally:
        if manager.managed:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _clear_unused(paths: DevicePaths) -> None:
    if not paths.run.exists() or paths.record.exists():
        return
    with contextlib.suppress(InfiniswapError):  # another device of that name is starting
        lock = rundir.take_lock(paths)
        rundir.clear(paths)
        os.close(lock)


def _wait_ready(pipe: int) -> Ready | None:
    """The first line, or None at its end or after START_S_MAX."""
    end_s = time.monotonic() + START_S_MAX
    data = b""
    while b"\n" not in data and len(data) < _READY_BYTES_MAX:
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
            return None
        chunk = os.read(pipe, 65536)
        if not chunk:
            return None
        data += chunk
    try:
        return decode_json(data.split(b"\n")[0], Ready)
    except NotJsonError:
        return None


def _end(process: programs.Process) -> None:
    process.terminate()
    try:
        process.wait(30)
    except programs.TimeoutExpired:
        process.kill()
        process.wait()
