# SPDX-License-Identifier: Apache-2.0
"""The device's side of listener_process.py: starts that process, reads its reports, restarts it.

Nothing of MQTT is loaded here. Each report is bounded; known donors stay known when the process
dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from infiniswap.discovery.order import REPORT_BYTES_MAX, Order, Report
from infiniswap.discovery.static import union
from infiniswap.errors import UsageError
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.policy.retry import Backoff
from infiniswap.system import programs
from infiniswap.units import HostPort, parse_host_port

log = logging.getLogger(__name__)

_RETRY_S_FIRST: Final = 1.0
_RETRY_S_MAX: Final = 60.0
_KILL_S_MAX: Final = 5.0
_REAP_S: Final = 0.01


class Watcher:
    """The donors that a broker announces. Everything runs on the event loop.

    Args:
        order: for the process that listens.
        rng: source of randomness.
        changed: called after each report.

    Attributes:
        donors: announced now, as far as known.
        has_heard: whether the broker was heard once.
        problem: why no new donor is heard of; empty when donors are.
        notes: sentences for an administrator.
    """

    def __init__(
        self,
        order: Order,
        rng: Random,
        changed: Callable[[], None],
    ) -> None:
        self.donors: tuple[HostPort, ...] = ()
        self.has_heard = False
        self.problem = ""
        self.notes: list[str] = []
        self._order = _encoded(order)
        self._backoff = Backoff(_RETRY_S_FIRST, _RETRY_S_MAX, rng)
        self._changed = changed
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to listen. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="discovery")

    def restart(self, order: Order) -> None:
        """Another process with another order takes over; known donors stay known."""
        self._order = _encoded(order)
        if self._task is not None:
            former, self._task = self._task, None
            self._ending.add(former)
            former.add_done_callback(self._ending.discard)
            former.cancel()
            self.start()

    async def first(self, wait_s: float) -> None:
        """Waits until a donor is announced or the broker has a fault; so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._first.wait()

    async def close(self) -> None:
        """Ends the other process. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._ending.add(task)
        if self._ending:
            await asyncio.wait(set(self._ending))
        self._ending.clear()

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
                reason = "it ended"
            except Exception as error:
                log.exception("the process that listens to the broker cannot be used")
                reason = str(error)
            self.problem = self.problem or (
                f"the process that listens to the broker is started again: {reason}"
            )
            self._first.set()
            self._changed()
            await asyncio.sleep(self._backoff.pause_s())

    async def _listen(self) -> None:
        """The life of one such process."""
        process = programs.start(
            programs.python("-m", "infiniswap.discovery.listener_process"),
            stdin=programs.PIPE,
            stdout=programs.PIPE,
        )
        transport: asyncio.ReadTransport | None = None
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._order)  # far less than a pipe holds
            process.stdin.flush()
            reader = asyncio.StreamReader(limit=REPORT_BYTES_MAX)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), process.stdout
            )
            while line := await reader.readline():
                self._take(line)
        except BrokenPipeError:
            pass  # it has ended already
        finally:
            if transport is not None:
                transport.close()
            await _end(process)

    def _take(self, line: bytes) -> None:
        try:
            report = decode_json(line, Report)
            donors = None if report.donors is None else union(map(parse_host_port, report.donors))
        except (NotJsonError, UsageError) as error:
            log.warning("a report about the broker cannot be read: %s", error)
            return
        if donors is not None:
            self._backoff.good()
            self.donors = donors
            self.has_heard = True
        for note in report.notes:
            if note not in self.notes:
                log.warning("%s", note)
        self.problem, self.notes = report.problem, report.notes
        if self.problem or self.donors:
            self._first.set()
        self._changed()


def _encoded(order: Order) -> bytes:
    return msgspec.json.encode(order, enc_hook=str) + b"\n"


async def _end(process: programs.Process) -> None:
    """By SIGKILL: it holds nothing that it would have to put in order."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    for _ in range(round(_KILL_S_MAX / _REAP_S)):
        if process.poll() is not None:
            return
        await asyncio.sleep(_REAP_S)
