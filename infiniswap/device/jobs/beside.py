# SPDX-License-Identifier: Apache-2.0
"""The swap devices that `infiniswap run` makes, one per run, beside each other.

The kernel has no private swap areas: it spreads what programs swap out over all areas of one
priority, so pages of every job may lie in the device of every run. Which run ends first makes no
difference: its device moves what others have there to the areas that stay, or keeps them until
they fit or have gone (docs/adr/0030-areas-beside.md).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from infiniswap.device.api import DeviceStatus
from infiniswap.device.cleanup import leftovers, lost
from infiniswap.device.control import client
from infiniswap.device.spec import rundir
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.errors import ConflictError, InfiniswapError
from infiniswap.system import swap

FIRST_NAME: Final = "run"
"""Name of the device of a run that is alone; further ones are run-2, run-3, ..."""

_NAME = re.compile(rf"{FIRST_NAME}(-[2-9]|-[1-9][0-9]+)?", re.ASCII)
_LOOK_S = 1.0
_CLEARED_S = 5.0  # from the end of a device to the end of a job that had pages there
_ANSWER_S = 0.5
_DEATH_S = 0.5


def _names() -> Iterator[str]:
    yield FIRST_NAME
    for number in count(2):
        yield f"{FIRST_NAME}-{number}"


def is_of_run(name: str) -> bool:
    """Whether the device of a run may be called so."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class RunDevice:
    """The device of a run, with its swap area; the run itself may have ended."""

    paths: DevicePaths
    spec: DeviceSpec
    status: DeviceStatus

    @property
    def whose(self) -> str:
        """Names the run, for people."""
        pids = ", ".join(str(pid) for pid in self.status.runs)
        return f"process {pids}" if pids else f"device {self.paths.name} of one that has ended"


class NotServingError(ConflictError):
    """The device of another run is starting or stopping at this moment."""


def free_name(run_dir: Path, backup_dir: Path) -> str:
    """The first name that no device has, be it running, stopped, or dead and not a run's.

    Raises:
        ConfigError: the record of a dead one cannot be read.
    """
    taken = {*rundir.running_names(run_dir), *rundir.stopped_names(run_dir, backup_dir)}
    for name in rundir.died_names(run_dir):
        spec = rundir.read_record(rundir.paths_of(name, run_dir, backup_dir))
        if spec is not None and not spec.ephemeral:
            taken.add(name)
    return next(name for name in _names() if name not in taken)


def running(run_dir: Path, backup_dir: Path) -> tuple[RunDevice, ...]:
    """Every device of a run whose swap area is active.

    Raises:
        NotServingError: one of them is starting or stopping.
        ConfigError: the record of one cannot be read.
    """
    found = []
    for name in rundir.running_names(run_dir):
        if not is_of_run(name):
            continue
        paths = rundir.paths_of(name, run_dir, backup_dir)
        try:
            status, spec = client.status(paths), rundir.read_record(paths)
        except ConflictError as error:
            raise NotServingError(error.what, where=error.where, mend=error.mend) from error
        if spec is None:
            raise NotServingError("it is stopping", where=f"device {name}")
        if spec.ephemeral and status.swap.active:
            found.append(RunDevice(paths, spec, status))
    return tuple(found)


def clear_lost(run_dir: Path, backup_dir: Path) -> None:
    """Takes away what is left of devices that were killed together with their runs.

    Raises:
        ConflictError: somebody else is doing it.
        InfiniswapError: something cannot be taken away.
    """
    for name in rundir.died_names(run_dir):
        if is_of_run(name):
            leftovers.clear(rundir.paths_of(name, run_dir, backup_dir))


class Others:
    """Follows the devices of other runs, as long as a run's job may have pages there.

    Args:
        run_dir: where devices are recorded.
        own: name of the run's own device.

    Attributes:
        areas: block device by name of each device seen so far.
        lost: those that have died, once look() has said so.
    """

    def __init__(self, run_dir: Path, own: str) -> None:
        self._run_dir = run_dir
        self._own = own
        self._watches: dict[str, lost.Watch] = {}
        self._next_s = 0.0
        self._ended_s = float("-inf")  # when the last one was seen to have ended
        self.areas: dict[str, str] = {}
        self.lost: list[str] = []

    def look(self) -> None:
        """Called often; new devices are looked for once a second.

        Raises:
            DeviceLostError: one has died, and with it what was swapped out there.
        """
        for name, watch in list(self._watches.items()):
            if watch.ended():
                del self._watches[name]
                watch.close()
                self._ended_s = time.monotonic()
                self._check(name)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOOK_S
            self._look_for_new()

    def _check(self, name: str) -> None:
        # One that was stopped in order has left no record, and its area may be another's by now.
        died = rundir.paths_of(name, self._run_dir, self._run_dir).record.exists()
        if died and swap.find_area(Path(self.areas[name])) is not None:
            self.lost.append(name)
            raise lost.DeviceLostError(
                f"the process of the swap device {name}, of another run, has died, and with it "
                "what was swapped out there: the command cannot go on and is ended"
            )

    def _look_for_new(self) -> None:
        for name in rundir.running_names(self._run_dir):
            if name == self._own or not is_of_run(name):
                continue
            known = self._watches.get(name)
            if known is not None and not known.known_ended():
                continue
            paths = rundir.paths_of(name, self._run_dir, self._run_dir)
            try:
                status = client.status(paths, wait_s=_ANSWER_S)
            except InfiniswapError:
                continue  # starting, stopping, or being cleared
            if known is not None:
                known.close()
                del self._watches[name]
            if status.ephemeral and status.swap.active:
                self._watches[name] = lost.Watch(paths, status)
                self.areas[name] = status.path

    def one_is_gone(self) -> bool:
        """Whether one has just ended and was not seen to end in order: another run may be clearing
        it, or have done so, which ends this run's job. Waits for a moment: a process that dies
        fails what is read from its area before anybody can see that it has died."""
        if time.monotonic() - self._ended_s < _CLEARED_S:
            return True
        return any(watch.known_ended(_DEATH_S) for watch in self._watches.values())

    def held_bytes(self, path: Path) -> int:
        """What others have in the area at `path` that this run leaves; 0 where there are none."""
        if all(watch.known_ended() for watch in self._watches.values()):
            return 0
        with contextlib.suppress(InfiniswapError):
            return swap.used_bytes(path)
        return 0

    def close(self) -> None:
        """Idempotent."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
