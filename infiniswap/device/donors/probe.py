# SPDX-License-Identifier: Apache-2.0
"""Asks every donor before a device is made: a mistake is told before anything is attached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect
from infiniswap.device.donors.transports import wished
from infiniswap.device.donors.transports.base import Transport
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.discovery.static import NO_DONOR_MEND
from infiniswap.errors import EngineError, InfiniswapError, NoDonorError, UnavailableError
from infiniswap.units import HostPort

_ANNOUNCED_ASKED_MAX = 8


class FoundDonors(Protocol):
    """Who is known: infiniswap.device.slabs.finder.Finder."""

    def named(self) -> Sequence[HostPort]:
        """Donors that somebody has written down."""

    def announced(self) -> Sequence[HostPort]:
        """Donors that announce themselves."""

    def degraded(self) -> list[str]:
        """What keeps donors from being found."""


async def check_donors(
    found: FoundDonors, spec: DeviceSpec, identity: Identity, client: ClientConfig
) -> list[str]:
    """At least one must answer, at both ports. Those that are named are all asked, and none may be
    of the wrong kind; of those that are announced, which may be many, a few at random, and only
    when no named one answers.

    Returns:
        What is wrong with those that do not answer, and who answers and lends nothing.

    Raises:
        NoDonorError: none is known, or none answers.
        InfiniswapError: what is wrong with one that does.
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
    """Of "auto" none is required: the device falls back."""
    return () if spec.config.device.transport == "auto" else wished(spec.config.device.transport)


def _check_here(transport: type[Transport], donor: HostPort) -> None:
    """What is missing here is told at once; the donor's side is tried with the first slab."""
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
