# SPDX-License-Identifier: Apache-2.0
"""Asks every donor before a device is made: a mistake is told before anything is attached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect
from infiniswap.device.donors.transports import allowed
from infiniswap.device.donors.transports.base import Transport
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.discovery.static import NO_DONOR_MEND
from infiniswap.errors import EngineError, InfiniswapError, NoDonorError, UnavailableError
from infiniswap.units import HostPort

_ANNOUNCED_ASKED_MAX = 8


class FoundDonors(Protocol):
    """The donors that are known: infiniswap.device.slabs.finder.Finder."""

    def named(self) -> Sequence[HostPort]:
        """Donors that the configuration or a peers file names."""

    def announced(self) -> Sequence[HostPort]:
        """Donors that announce themselves."""

    def degraded(self) -> list[str]:
        """What keeps donors from being found."""


async def check_donors(
    found: FoundDonors, spec: DeviceSpec, identity: Identity, client: ClientConfig
) -> list[str]:
    """Checks that at least one donor answers at both of its ports.

    All named donors are asked, and a named one that answers must suit the device. Announced donors
    may be many: a few of them are asked, at random, and only if no named one answers.

    Returns:
        What is wrong with the donors that do not answer, and which donors lend nothing.

    Raises:
        NoDonorError: no donor is known, or none answers.
        InfiniswapError: a named donor answers and does not suit the device.
    """
    named = found.named()
    notes: list[str] = []
    results = await asyncio.gather(
        *(_probe(donor, spec, identity, client, notes) for donor in named)
    )
    problems = [problem for problem in results if problem is not None]
    for problem in problems:
        if not isinstance(problem, NoDonorError):
            raise problem
    for transport in _required(spec):
        for donor in named:
            await asyncio.to_thread(_check_here, transport, donor)
    warnings = [*map(str, problems), *notes, *found.degraded()]
    if len(problems) < len(named):
        return warnings
    announced = list(found.announced())
    random.shuffle(announced)
    for donor in announced[:_ANNOUNCED_ASKED_MAX]:
        answer = await _probe(donor, spec, identity, client, warnings)
        if answer is None:
            return warnings
        problems.append(answer)
    raise _nobody(problems, found.degraded())


def _nobody(problems: list[InfiniswapError], degraded: list[str]) -> InfiniswapError:
    if len(problems) == 1:
        return problems[0]
    if problems:
        wrong = next((p for p in problems if not isinstance(p, NoDonorError)), None)
        return wrong or NoDonorError(
            "none of the donors can be reached: " + "; ".join(str(p) for p in problems)
        )
    if degraded:
        return NoDonorError("no donor is known: " + "; ".join(degraded))
    return NoDonorError("no donor is named or announced", mend=NO_DONOR_MEND)


def _required(spec: DeviceSpec) -> tuple[type[Transport], ...]:
    """The transports that have to work. With "auto" none has to: the device falls back."""
    return () if spec.config.device.transport == "auto" else allowed(spec.config.device.transport)


def _check_here(transport: type[Transport], donor: HostPort) -> None:
    """Checks this host's side of the transport. The donor's side is tried with the first slab."""
    try:
        transport.check(donor.host)
    except EngineError as error:
        raise UnavailableError(
            error.what,
            where=f"--transport {transport.name}, donor {donor}",
            mend=f"`infiniswap doctor` lists this host's {transport.label} devices; or use "
            "--transport auto.",
        ) from error


async def _probe(
    donor: HostPort, spec: DeviceSpec, identity: Identity, client: ClientConfig, notes: list[str]
) -> InfiniswapError | None:
    try:
        session = await connect(
            donor, identity, client, QuietHandler(), slab_bytes=spec.config.device.slab_bytes
        )
    except InfiniswapError as error:
        return error
    try:
        for transport in _required(spec):
            if not transport.is_offered(session.welcome):
                name = transport.name
                return UnavailableError(
                    f"it does not offer {transport.label}",
                    where=f"--transport {name}, donor {donor}",
                    mend=f'Set daemon.{name} = "auto" there, upgrade it, or use --transport auto.',
                )
        await session.check_data_port()
        if session.welcome.draining:
            notes.append(
                f"donor {donor} is draining and lends nothing: pages go to other donors or to the "
                f"local disk. `infiniswap donor undrain {donor}` lets it lend again."
            )
    except InfiniswapError as error:
        return error
    finally:
        await session.close()
    return None
