# SPDX-License-Identifier: Apache-2.0
"""Why a donor cannot be used: an error with a remedy for each reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator

from infiniswap.control import messages as m
from infiniswap.control.http import aiohttp
from infiniswap.control.tls import FULL_REASON
from infiniswap.errors import (
    DonorBusyError,
    InfiniswapError,
    NoDonorError,
    ProtocolMismatchError,
    SlabSizeMismatchError,
    WrongSecretError,
)
from infiniswap.units import HostPort, format_size


@contextlib.asynccontextmanager
async def errors_explained(address: HostPort, wait_s: float) -> AsyncIterator[None]:
    """Bounds the block and turns what aiohttp raises into errors for people."""
    try:
        async with asyncio.timeout(wait_s):
            yield
    except InfiniswapError as error:
        if not error.where:
            error.where = f"donor {address}"
        raise
    except TimeoutError:
        raise NoDonorError(
            f"no answer within {wait_s:g} s",
            where=f"donor {address}",
            mend=f"Check the address, that the host is up, and that its firewall lets TCP port "
            f"{address.port} in.",
        ) from None
    except aiohttp.ClientConnectorSSLError as error:
        if FULL_REASON in str(error.os_error):
            raise full(address) from error
        raise not_tls(address) from error
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, ConnectionResetError | ConnectionAbortedError):
            # It was made: the other end closed it instead of speaking TLS.
            raise not_a_daemon(address, "the connection was reset, or closed") from error
        raise cannot_connect(address, error.os_error) from error
    except aiohttp.WSServerHandshakeError as error:
        if error.status == 503:
            raise full(address) from error
        raise not_a_daemon(address, f"HTTP status {error.status}") from error
    except aiohttp.ServerDisconnectedError as error:
        raise not_a_daemon(address, "the connection was closed without an answer") from error
    except ConnectionResetError as error:
        raise not_a_daemon(address, "the connection was reset") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise not_a_daemon(address, "the answer is not HTTP") from error


def cannot_connect(address: HostPort, error: OSError) -> NoDonorError:
    """No connection was made."""
    where = f"donor {address}"
    if isinstance(error, socket.gaierror):
        return NoDonorError(
            f"the host name cannot be resolved ({error.strerror})",
            where=where,
            mend="Check the spelling, or give the address in numbers.",
        )
    if error.errno == errno.ECONNREFUSED:
        return NoDonorError(
            "connection refused: nothing listens there",
            where=where,
            mend="Start `infiniswap daemon` there, with --listen on an address that this host "
            "can reach (the default is loopback only), and check the port.",
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return NoDonorError(
            "there is no route to that host",
            where=where,
            mend="Check the address and the network of both hosts.",
        )
    return NoDonorError(
        f"cannot connect: {error.strerror or error}", where=where, mend="Check the address."
    )


def full(address: HostPort) -> DonorBusyError:
    """The donor refused a connection above its limit."""
    return DonorBusyError(
        "its connection limit is reached, in all or for this host, or too many began lately",
        where=f"donor {address}",
        mend="Try again in a few seconds. If it repeats, raise daemon.connections_max or "
        "daemon.connections_per_host_max there.",
    )


def not_a_daemon(address: HostPort, detail: str) -> ProtocolMismatchError:
    """The service that answered is not a donor."""
    return ProtocolMismatchError(
        f"the service at this address is not an Infiniswap control port ({detail})",
        where=f"donor {address}",
        mend="Give the control port (9400 by default), not the data port or that of another "
        "service.",
    )


def not_tls(address: HostPort) -> ProtocolMismatchError:
    """The service that answered does not speak TLS as a donor does."""
    return ProtocolMismatchError(
        "the service at this address does not speak TLS 1.3: it is an Infiniswap daemon of "
        "protocol version 1, or no Infiniswap control port",
        where=f"donor {address}",
        mend="Install this release of Infiniswap there, and give the control port (9400 by "
        "default), not the data port or that of another service.",
    )


def version_mismatch(address: HostPort, detail: str) -> ProtocolMismatchError:
    """The ends have no protocol version in common."""
    ours = ", ".join(map(str, m.VERSIONS))
    return ProtocolMismatchError(
        f"no common protocol version: {detail}; here: {ours}",
        where=f"donor {address}",
        mend="Install the same release of Infiniswap on both hosts.",
    )


def slab_mismatch(address: HostPort, theirs: int, ours: int) -> SlabSizeMismatchError:
    """The donor lends slabs of another size, in bytes."""
    return SlabSizeMismatchError(
        f"the donor lends slabs of {format_size(theirs)}, this device uses {format_size(ours)}",
        where=f"donor {address}",
        mend="Set the same slab size on both (--slab or `slab` in the configuration).",
    )


def wrong_secret(address: HostPort, detail: str) -> WrongSecretError:
    """The ends do not share a secret."""
    return WrongSecretError(
        detail,
        where=f"donor {address}",
        mend="Copy the same secret file to every host and name it in [cluster] secret_file.",
    )
