# SPDX-License-Identifier: Apache-2.0
"""Asks every donor before a device is made: a mistake is told before anything is attached."""

from __future__ import annotations

import asyncio

from infiniswap.control.client import ClientConfig, Identity, QuietHandler, connect
from infiniswap.device.spec import DeviceSpec
from infiniswap.engine.native_rdma import rdma_choose
from infiniswap.errors import EngineError, InfiniswapError, NoDonorError, UnavailableError
from infiniswap.units import HostPort


async def check_donors(spec: DeviceSpec, identity: Identity, client: ClientConfig) -> list[str]:
    """At least one must answer, at both ports, and none may be of the wrong kind.

    Returns:
        What is wrong with those that do not answer.

    Raises:
        NoDonorError: none is named, or none answers.
        InfiniswapError: what is wrong with one that does.
    """
    donors = spec.donors
    if not donors:
        raise NoDonorError(
            "no donor is named",
            mend="Give --donors HOST[:PORT],... or set `peers` under [cluster] in the "
            "configuration.",
        )
    results = await asyncio.gather(*(_probe(donor, spec, identity, client) for donor in donors))
    problems = [problem for problem in results if problem is not None]
    for problem in problems:
        if not isinstance(problem, NoDonorError):
            raise problem
    if spec.transport == "rdma":
        for donor in donors:
            await asyncio.to_thread(_check_rdma, donor)
    if len(problems) == len(donors):
        if len(problems) == 1:
            raise problems[0]
        raise NoDonorError(
            "none of the donors can be reached: " + "; ".join(str(p) for p in problems)
        )
    return [f"{problem}" for problem in problems]


def _check_rdma(donor: HostPort) -> None:
    """What is missing here is told at once; the donor's side is tried with the first slab."""
    try:
        rdma_choose(donor.host)
    except EngineError as error:
        raise UnavailableError(
            error.what,
            where=f"--transport rdma, donor {donor}",
            mend="`infiniswap doctor` lists this host's RDMA devices; or use --transport auto.",
        ) from error


async def _probe(
    donor: HostPort, spec: DeviceSpec, identity: Identity, client: ClientConfig
) -> InfiniswapError | None:
    try:
        session = await connect(donor, identity, client, QuietHandler(), slab_bytes=spec.slab_bytes)
    except InfiniswapError as error:
        return error
    try:
        if spec.transport == "rdma" and not session.welcome.rdma:
            return UnavailableError(
                "it does not offer RDMA",
                where=f"--transport rdma, donor {donor}",
                mend='Set daemon.rdma = "auto" there, upgrade it, or use --transport auto.',
            )
        await session.check_data_port()
    except InfiniswapError as error:
        return error
    finally:
        await session.close()
    return None
