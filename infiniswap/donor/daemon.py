# SPDX-License-Identifier: Apache-2.0
"""The process of `infiniswap daemon`: a donor until a signal ends it.

SIGTERM leaves what is lent to a successor, SIGINT gives it back, SIGHUP reads the configuration
again. A SIGTERM of earlyoom or its like gives it back, too: no successor comes, and another program
would be ended next. See infiniswap.donor.serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from infiniswap.config import Config
from infiniswap.control.service import CONNECTIONS_MAX
from infiniswap.donor import descriptors
from infiniswap.donor.home import Release
from infiniswap.donor.memory import MemorySource
from infiniswap.donor.serve import Donor, Ports, StoreFactory, serve
from infiniswap.errors import from_oserror
from infiniswap.system.memory_killers import is_memory_killers
from infiniswap.system.notify import Notifier
from infiniswap.system.process import named
from infiniswap.system.signals import stop_signals

log = logging.getLogger(__name__)


async def run(
    config: Config,
    store_factory: StoreFactory,
    memory: MemorySource,
    ready_file: Path | None = None,
    load: Callable[[], Config] | None = None,
    release: Release | None = None,
) -> None:
    """Runs a donor until SIGTERM (a successor may have what is lent) or SIGINT (it may not).

    Args:
        config: the configuration.
        store_factory: makes the slab pool.
        memory: figures.
        ready_file: gets the ports as JSON when everything is served; removed at the stop.
        load: reads the configuration again, at SIGHUP; None: there is nothing to read.
        release: see serve.

    Raises:
        See serve.
    """
    descriptors.allow(config.daemon.connections_max + CONNECTIONS_MAX)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(descriptors.ShortageLog())
    stopped = asyncio.Event()
    gives_back = False

    def stop(number: int, sender: int) -> None:
        nonlocal gives_back
        if is_memory_killers(sender):
            log.warning("ended for want of memory by process %s: nothing stays lent", named(sender))
            gives_back = True
        gives_back = gives_back or number == signal.SIGINT
        stopped.set()

    hung_up = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)
    try:
        async with (
            stop_signals(stop),
            serve(config, store_factory, memory, release=release) as donor,
        ):
            if ready_file is not None:
                _write_ready(ready_file, donor.ports)
            notifier = Notifier()
            serving = f"serving on ports {donor.ports.control_port}, {donor.ports.data_port}"
            notifier.ready(serving)
            watchdog = asyncio.create_task(notifier.watchdog(), name="watchdog")
            reloading = asyncio.create_task(
                _reload(donor, load or (lambda: config), hung_up, notifier, serving), name="reload"
            )
            reloading.add_done_callback(donor.task_done)
            try:
                await donor.wait(stopped)
            finally:
                watchdog.cancel()
                reloading.cancel()
                notifier.stopping()
            donor.gives_back = gives_back
            log.info("stopping")
    finally:
        if ready_file is not None:
            _remove_ready(ready_file)
        loop.remove_signal_handler(signal.SIGHUP)


async def _reload(
    donor: Donor,
    load: Callable[[], Config],
    hung_up: asyncio.Event,
    notifier: Notifier,
    serving: str,
) -> None:
    """At each SIGHUP, until cancelled."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        notifier.reloading()
        outcome = await donor.reloader.reload(load)
        notifier.ready("; ".join([serving, *outcome.sentences("daemon")]))


def _write_ready(path: Path, ports: Ports) -> None:
    text = json.dumps(
        {
            "control_port": ports.control_port,
            "data_port": ports.data_port,
            "pid": os.getpid(),
        }
    )
    try:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.touch(0o644)  # whatever the umask is
        temporary.write_text(text + "\n", encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        raise from_oserror("cannot write the ready file", error, where=str(path)) from error


def _remove_ready(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
