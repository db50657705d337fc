# SPDX-License-Identifier: Apache-2.0
"""Draining: a donor takes every slab back and lends none until it is undrained.

Draining outlives the daemon: a host that is rebooted for maintenance comes back drained. While the
donor drains, a file in the state directory says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from infiniswap import events
from infiniswap.directories import make_directory
from infiniswap.donor.evict import Evictor
from infiniswap.errors import InfiniswapError, SystemCallError, from_oserror
from infiniswap.system.files import sync_directory

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_BATCH = 4
"""Few enough for each to be moved within its time over a slow network."""


class Drain:
    """Whether the donor drains, and the loop that carries it out.

    Args:
        evictor: takes slabs back.
        mapped: how many slabs are lent.
        told: tells the consumers.
        clock: seconds, as of the evictor.
        path: of the file that outlives the daemon; None: draining ends with it.
        move_s: how long a consumer may take to copy a slab to another donor.
    """

    def __init__(
        self,
        evictor: Evictor,
        mapped: Callable[[], int],
        told: Callable[[bool], Awaitable[None]],
        clock: Callable[[], float],
        path: Path | None,
        move_s: float,
    ) -> None:
        self._evictor = evictor
        self._mapped = mapped
        self._told = told
        self._clock = clock
        self._path = path
        self.move_s = move_s
        self._active = asyncio.Event()
        self._forced_s: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether the donor drains."""
        return self._active.is_set()

    def restore(self) -> None:
        """Continues to drain if the donor drained before a restart.

        Raises:
            NotPermittedError, SystemCallError: the file cannot be looked for.
        """
        if self._path is None:
            return
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise from_oserror(
                "cannot find out whether this donor drains",
                error,
                mend="Run it with sudo, or name a daemon.state_dir that this user may read.",
            ) from error
        log.warning(
            "still draining, as before the restart (`infiniswap donor undrain` ends it)",
            extra=events.about(events.DRAINING),
        )
        self._active.set()

    async def set(self, active: bool, *, force: bool = False) -> str:
        """Begins or ends draining at once; returns why it may not survive a restart, or "".

        Args:
            active: whether to drain.
            force: when nothing else is lent, takes slabs that hold the only copies of pages. Not
                after a restart: what cannot be undone is asked for again. A later call without it
                takes it back.
        """
        self._forced_s = self._clock() if active and force else None
        warning = ""
        try:
            self._keep(active)
        except InfiniswapError as error:
            warning = str(error)
            log.error("%s", warning)
        if active != self.is_active:
            log.info(
                "draining" if active else "no longer draining", extra=events.about(events.DRAINING)
            )
            (self._active.set if active else self._active.clear)()
            await self._told(active)
        return warning

    def _keep(self, active: bool) -> None:
        if self._path is None:
            if active:
                raise SystemCallError(
                    "a daemon with a port of the system's choice is another one after a restart: "
                    "it will not be draining then",
                )
            return
        try:
            if active:
                make_directory(self._path.parent, 0o755)
                self._path.touch(0o644)
            else:
                self._path.unlink(missing_ok=True)
            if self._path.parent.exists():
                sync_directory(self._path.parent)
        except OSError as error:
            raise from_oserror(
                "whether this donor drains does not survive a restart", error, where=str(self._path)
            ) from error

    async def run(self) -> None:
        """Takes slabs back while the donor drains; until cancelled."""
        while True:
            await self._active.wait()
            taken = 0
            if self._mapped():
                try:
                    taken = await self._evictor.evict(_BATCH, move_s=self.move_s)
                    if not taken and self._forced_s is not None:
                        taken = await self._evictor.evict(
                            _BATCH, move_s=self.move_s, kept_since_s=self._forced_s
                        )
                except InfiniswapError as error:
                    log.error("draining: %s", error)
            if not taken:
                await asyncio.sleep(_RETRY_S)


def drain_path(state_dir: Path, donor_id: str, port: int) -> Path | None:
    """The file of a donor; None without a fixed port, as the next daemon is another donor then."""
    return state_dir / f"{donor_id}.drain" if port else None
