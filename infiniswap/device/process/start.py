# SPDX-License-Identifier: Apache-2.0
"""The start of a new device: everything up to serving, or nothing.

Lock, contents checked, donors asked, backup checked, engine, kernel device, memory locked, swap.
Whatever fails, or a signal, undoes what stood before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from infiniswap import events
from infiniswap.device import frontends
from infiniswap.device.api import Ready
from infiniswap.device.donors.check import check_donors
from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.process.parts import Parts
from infiniswap.device.process.runs import Runs
from infiniswap.device.spec import contents, rundir
from infiniswap.device.succession.holder import LOG
from infiniswap.errors import InfiniswapError
from infiniswap.system.surroundings.in_force import in_force
from infiniswap.system.surroundings.limits import check_room

log = logging.getLogger(__name__)

_UNDO_PAUSE_S = 1.0


class Start:
    """One start.

    Args:
        parts: of the device; only what is shown to donors is made.
        runs: what uses it.
        own_log: write to the log in the run directory.
    """

    def __init__(self, parts: Parts, runs: Runs, *, own_log: bool) -> None:
        self._parts = parts
        self._runs = runs
        self._own_log = own_log
        self._task: asyncio.Task[object] | None = None
        self.interrupted = False

    def interrupt(self) -> None:
        """Makes the start undo itself."""
        self.interrupted = True
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def run(self) -> Ready:
        """Everything up to serving.

        Raises:
            InfiniswapError: what could not be done; nothing stays attached.
        """
        parts, spec = self._parts, self._parts.spec
        self._task = asyncio.current_task()
        parts.lock_fd = rundir.take_lock(parts.paths)
        try:
            parts.succession.keep_lock(parts.lock_fd)
            if self._own_log:
                rundir.write_log(parts.paths)
                parts.holder.keep(LOG, 2)
            choice = frontends.choose(spec.config.device.frontend, spec.swap)
            # Watched from the first moment: a `run` that dies during this start is noticed.
            if spec.owner_pid is not None:
                self._runs.join(spec.owner_pid)
            parts.was_kept = parts.paths.kept.exists()
            contents.check(parts.paths, spec)
            await parts.blocking(lambda: parts.key.begin(parts.paths, spec))
            await parts.finder.begin()
            client = parts.shown.client
            if spec.needs_donors:
                parts.warnings += await check_donors(parts.finder, spec, parts.identity, client)
            await parts.blocking(parts.make_engine)
            parts.start_mapper()
            parts.finder.follow()
            parts.start_waker()
            parts.start_tending()
            if spec.backup is None:
                await parts.map_everything()
            attachment = parts.attachment = Attachment(spec, parts.paths, choice)
            rundir.write_record(parts.paths.record, spec)
            parts.begun = True
            await parts.blocking(self._begin_contents)
            await parts.blocking(lambda: attachment.attach_device(parts.engine))
            parts.start_repairs(attachment)
            parts.succession.keep_device(spec, attachment, parts.shown.kept())
            self._tell_of_seals()
            self._make_safe(choice.frontend)
            check_room(os.getpid(), 1 if parts.holder.present else 0)
            await parts.far.start(parts.engine)
            if spec.swap:
                await parts.blocking(attachment.attach_swap)
        except BaseException:
            await self._undo()
            raise
        self._task = None
        parts.warnings += attachment.warnings
        return Ready(
            ok=True,
            path=attachment.path,
            frontend=choice.frontend,
            why=choice.why,
            warnings=parts.warnings,
            degraded=parts.degraded,
        )

    def _begin_contents(self) -> None:
        """The last step before pages are written. Blocking."""
        parts = self._parts
        contents.begin(parts.paths, parts.spec)
        parts.key.keep(parts.paths, parts.spec)
        if lost := contents.renew_seals(parts.engine, parts.spec):
            sentence = f"pages of the backup that were altered or damaged are lost: {lost}"
            log.warning("%s", sentence, extra=events.about(events.BACKUP_DATA))
            parts.warnings.append(
                f"{sentence}. Reading one of them is an error until it is written"
            )

    def _tell_of_seals(self) -> None:
        key = self._parts.key
        if key.library:
            log.info("pages are sealed (AES-256-GCM by %s)", key.library)
            return
        for sentence in key.degraded(self._parts.spec):
            log.warning("%s", sentence, extra=events.about(events.NOT_SEALED))
            self._parts.warnings.append(sentence)

    def _make_safe(self, frontend: str) -> None:
        parts = self._parts
        parts.make_safe()
        warning = frontends.FRONT_ENDS[frontend].warning
        if warning and parts.spec.swap and not parts.spec.ephemeral:
            parts.warnings.append(warning)
        parts.warnings += map(str, in_force(os.getpid()))
        if parts.keep_awake is not None and parts.keep_awake.problem is not None:
            parts.warnings.append(str(parts.keep_awake.problem))

    async def _undo(self) -> None:
        self._task = None  # the undoing itself must not be interrupted
        parts, attachment = self._parts, self._parts.attachment
        if attachment is not None:
            await self._undo_swap(attachment)
            with contextlib.suppress(InfiniswapError):
                await parts.blocking(attachment.detach_device)
        await parts.end(self._runs, keep=parts.was_kept and parts.begun, remove=not parts.was_kept)

    async def _undo_swap(self, attachment: Attachment) -> None:
        # Whatever is swapped out there already is lost when this process ends: no giving up.
        while True:
            try:
                await self._parts.blocking(attachment.detach_swap)
                return
            except InfiniswapError as error:
                log.error("the start cannot be undone yet: %s", error)
            await asyncio.sleep(_UNDO_PAUSE_S)
