# SPDX-License-Identifier: Apache-2.0
"""The life of a device process: start, serve until stopped, and handle signals meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from infiniswap import events, logs
from infiniswap.device.api import Ready
from infiniswap.device.process.control_socket import control_socket
from infiniswap.device.process.member_socket import member_socket
from infiniswap.device.process.metrics_port import metrics_port
from infiniswap.device.process.service import DeviceService
from infiniswap.device.spec import contents
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.device.succession.holder import Holder, TakeOver
from infiniswap.device.succession.patience import patiently
from infiniswap.errors import InfiniswapError
from infiniswap.system import systemd
from infiniswap.system.process import leave_no_core
from infiniswap.system.surroundings.limits import raise_limits

log = logging.getLogger(__name__)

_NOT_STOPPED = events.about(events.NOT_STOPPED)
_THREAD_STACK_BYTES = 256 * 1024
_STOP_PAUSE_S = 1.0


@contextlib.asynccontextmanager
async def _signals(service: DeviceService) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    stops: set[asyncio.Task[None]] = set()
    reloads: set[asyncio.Task[None]] = set()

    async def stop(name: str) -> None:
        log.info("%s: stopping", name)
        told: type[InfiniswapError] | None = None  # the figures in its text change
        while True:
            try:
                await service.stop(remove=not contents.keeps_record(service.spec))
            except InfiniswapError as error:
                if told is not (told := type(error)):
                    log.error("not stopped: %s", error, extra=_NOT_STOPPED)
            # systemd asks a device that was started by hand once, hears no refusal, and waits 90 s.
            # Who sent the signal does not say that: the holder passes it on, too.
            if service.stopped.is_set() or not await asyncio.to_thread(systemd.is_stopping):
                return
            await asyncio.sleep(_STOP_PAUSE_S)

    async def reload() -> None:
        try:
            await service.reload()
        except InfiniswapError as error:
            log.error("SIGHUP: not reloaded: %s", error)

    def begin(work: Coroutine[Any, Any, None], name: str, tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def on_stop(number: signal.Signals) -> None:
        if service.interrupt_start():
            log.info("%s: the start is undone", number.name)
        elif not stops:  # otherwise the stop under way serves this signal, too
            begin(stop(number.name), number.name, stops)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_stop, number)
    # A terminal that closes is no reason to take swap space away.
    loop.add_signal_handler(signal.SIGHUP, lambda: begin(reload(), "reload", reloads))
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def serve(
    spec: DeviceSpec,
    ready: Callable[[Ready], bool],
    *,
    own_log: bool,
    holder: Holder | None = None,
) -> int:
    """Runs a device until it is stopped.

    Args:
        spec: the device.
        ready: called once, when it serves; False when its starter is gone.
        own_log: write to the log in the run directory instead of standard error.
        holder: None for a device without a standby.

    Raises:
        InfiniswapError: it could not be started.
    """
    logs.identify(spec.name)
    service = DeviceService(spec, own_log=own_log, holder=holder)
    service.load()
    async with _signals(service), metrics_port(service) as url:
        try:
            answer = await service.start()
        except asyncio.CancelledError:
            raise InfiniswapError("the start was interrupted; nothing stays attached") from None
        settle()
        new = not service.was_kept or not contents.keeps_record(spec)
        async with _not_lost(service, remove=new), control_socket(service), member_socket(service):
            if service.begin() and ready(answer):
                log.info("device %s serves %s", spec.name, answer.path)
                if url:
                    log.info("metrics at %s", url)
            else:
                # No caller knows of it: the same as a start that was interrupted a moment earlier.
                log.warning("device %s: its starter has gone; it is stopped again", spec.name)
                try:
                    await service.stop(remove=new)
                except InfiniswapError as error:
                    log.error("it goes on serving: %s", error, extra=_NOT_STOPPED)
            await service.stopped.wait()
    return 0


def settle() -> None:
    """What exists now lives as long as the process: no collection of garbage, which every other
    thing then waits for, looks at it again."""
    gc.collect()
    gc.freeze()


async def succeed(service: DeviceService, turn: TakeOver) -> int:
    """Takes a device over from a predecessor and runs it until it is stopped.

    Raises:
        HopelessError: no process can take it over.
        InfiniswapError: this process could not; the next one may.
    """
    logs.identify(service.spec.name)
    async with _signals(service):
        await service.take_over(turn)
        service.begin()  # the holder waits for this, so nothing that can fail comes first
        remove = not contents.keeps_record(service.spec)
        async with (
            _not_lost(service, remove=remove),
            patiently("control socket", lambda: control_socket(service)),
            patiently("socket for members", lambda: member_socket(service)),
            patiently("metrics", lambda: metrics_port(service)),
        ):
            await service.stopped.wait()
    return 0


@contextlib.asynccontextmanager
async def _not_lost(service: DeviceService, *, remove: bool) -> AsyncIterator[None]:
    """Stops the device before an error ends the process: its swapped-out pages would be lost."""
    try:
        yield
    except BaseException:
        while not service.stopped.is_set():
            try:
                await service.stop(remove=remove)
            except InfiniswapError as error:
                log.error("it cannot be stopped yet: %s", error, extra=_NOT_STOPPED)
                await asyncio.sleep(_STOP_PAUSE_S)
        raise


def prepare_process(*, own_log: bool) -> None:
    """Prepares the process before any thread exists: small stacks, because all memory is locked,
    limits that allow that, and no core file.

    Args:
        own_log: standard error is going to be the log in the run directory.
    """
    leave_no_core()
    raise_limits()
    threading.stack_size(_THREAD_STACK_BYTES)
    logs.set_up("infiniswap-device", to_journal=not own_log and logs.is_journal(), waits=False)
