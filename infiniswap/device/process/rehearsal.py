# SPDX-License-Identifier: Apache-2.0
"""What a start would find, and nothing of what it would do: for `infiniswap run --dry-run`.

The checks of infiniswap.device.process.start, in its order and with its errors. Donors are asked as
a start asks them, and lend nothing. Nothing is made, locked, loaded or attached.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect
from infiniswap.control.host_name import host_name
from infiniswap.device import frontends
from infiniswap.device.donors.check import check_donors
from infiniswap.device.donors.transports import allowed
from infiniswap.device.process.shown import Shown
from infiniswap.device.spec import contents
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.discovery.find import Found, find
from infiniswap.errors import EngineError, InfiniswapError, MemoryLimitError
from infiniswap.system import swap
from infiniswap.system.backup import check_backup
from infiniswap.system.service_units import as_device
from infiniswap.units import HostPort, counted

_ASKED_MAX: Final = 64
"""Donors that are asked what they can lend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorAnswer:
    """A donor, as it answers now.

    Attributes:
        name: empty: it has not answered.
        slabs: that it can lend to this host.
        transport: by which pages would travel; empty: not known.
        problem: why it lends nothing, or cannot be used; empty: it lends.
    """

    address: str
    name: str = ""
    slabs: int = 0
    transport: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a start would find.

    Attributes:
        frontend, why: see frontends.Choice.
        sealed_by: the library that would seal pages; empty: they would not be sealed.
        donors: at most 64 of those that are known.
        backup_free_bytes: on the file system of the backup; None: a block device, or no backup.
        priority: of the swap area.
        warnings: as those of a start.
    """

    frontend: str
    why: str
    sealed_by: str
    donors: tuple[DonorAnswer, ...]
    backup_free_bytes: int | None
    priority: int | None
    warnings: tuple[str, ...]


class _FoundOnce:
    """A FoundDonors that was found once."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._named = spec.config.peers()
        self._found: Found = find(spec.config)

    def named(self) -> Sequence[HostPort]:
        """See FoundDonors."""
        return self._named

    def announced(self) -> Sequence[HostPort]:
        """See FoundDonors."""
        return [address for address in self._found.addresses if address not in self._named]

    def degraded(self) -> list[str]:
        """See FoundDonors."""
        return self._found.problems

    def every(self) -> tuple[HostPort, ...]:
        """All of them."""
        return self._found.addresses


def rehearse(spec: DeviceSpec, paths: DevicePaths) -> Rehearsal:
    """Checks what a start of this device would check. Blocking, in bounded time.

    Raises:
        InfiniswapError: the start would end with it.
    """
    device = spec.config.device
    choice = frontends.choose(device.frontend, spec.swap, loads=False)
    contents.check(paths, spec)
    sealed_by = _library() if device.seal else ""
    client = Shown(spec.config, max(spec.config.cluster.ask_s, 0.5), is_start=True).client
    found = _FoundOnce(spec)
    warnings, donors = asyncio.run(_ask(found, spec, client))
    free_bytes = None if spec.backup is None else as_device(lambda: _check_backup(spec))
    slabs = sum(donor.slabs for donor in donors)
    # Of a larger cluster only some are asked; the others may have room.
    are_all = len(donors) == len(found.every())
    if spec.backup is None and slabs < spec.slab_count and are_all:
        raise MemoryLimitError(
            f"the donors can take {slabs} of {counted(spec.slab_count, 'slab')}, and without a "
            "backup all of them need a donor",
            mend="Use a smaller --size, more donors, or a backup.",
        )
    if slabs < spec.slab_count:
        warnings.append(
            "the donors that were asked can lend "
            f"{slabs} of {counted(spec.slab_count, 'slab')} now: "
            "pages of the others come from the local disk"
        )
    return Rehearsal(
        frontend=choice.frontend,
        why=choice.why,
        sealed_by=sealed_by,
        donors=tuple(donors),
        backup_free_bytes=free_bytes,
        priority=_priority(spec),
        warnings=tuple(warnings),
    )


def _library() -> str:
    from infiniswap.engine.native_seal import NativeSealKeys

    return NativeSealKeys().library()


def _priority(spec: DeviceSpec) -> int | None:
    if not spec.swap:
        return None
    priority = spec.config.device.priority
    return swap.priority_above(swap.active_areas()) if priority is None else priority


def _check_backup(spec: DeviceSpec) -> int | None:
    """Free bytes where the backup would be. A directory that a start would make is not there yet:
    what counts then is the one above it."""
    assert spec.backup is not None
    path = Path(spec.backup)
    directory = path.parent
    if directory.exists():
        contents.check_backup_is_ours(spec, was_kept=False)
    else:
        while not directory.exists():
            directory = directory.parent
        check_backup(directory / path.name, spec.engine_bytes)
    if path.is_block_device():
        return None
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


# ------------------------------------------------------------------------------ donors


async def _ask(
    found: _FoundOnce, spec: DeviceSpec, client: ClientConfig
) -> tuple[list[str], list[DonorAnswer]]:
    identity = Identity(spec.device_id, spec.name, host_name())
    warnings = await check_donors(found, spec, identity, client)
    every = found.every()
    answers = await asyncio.gather(
        *(_answer(donor, spec, identity, client) for donor in every[:_ASKED_MAX])
    )
    if len(every) > _ASKED_MAX:
        warnings.append(f"{len(every) - _ASKED_MAX} more donors are known; they were not asked")
    return warnings, answers


async def _answer(
    donor: HostPort, spec: DeviceSpec, identity: Identity, client: ClientConfig
) -> DonorAnswer:
    address, slab_bytes = str(donor), spec.config.device.slab_bytes
    try:
        session = await connect(donor, identity, client, QuietHandler(), slab_bytes=slab_bytes)
    except InfiniswapError as error:
        return DonorAnswer(address=address, problem=error.what)
    name = session.welcome.donor_name
    try:
        memory = await session.memory()
    except InfiniswapError as error:
        return DonorAnswer(address=address, name=name, problem=error.what)
    finally:
        await session.close()
    problem = "" if memory.can_map else memory.no_room or "does not say why it lends nothing"
    transport = ""
    for kind in allowed(spec.config.device.transport):
        if not kind.is_offered(session.welcome):
            continue
        try:
            await asyncio.to_thread(kind.check, donor.host)
        except EngineError:
            continue
        transport = kind.name
        break
    return DonorAnswer(
        address=address, name=name, slabs=memory.can_map, transport=transport, problem=problem
    )
