# SPDX-License-Identifier: Apache-2.0
"""Why a donor cannot be used: an error with a remedy for each reason."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from collections.abc import AsyncIterator
from typing import Final

from infiniswap.control import messages as m
from infiniswap.control.http import aiohttp
from infiniswap.control.mutual import (
    EXPIRED,
    NOT_YET_VALID,
    SELF_SIGNED,
    RefusedCertificateError,
)
from infiniswap.control.tls import FULL_REASON
from infiniswap.errors import (
    DonorBusyError,
    InfiniswapError,
    NoDonorError,
    ProtocolMismatchError,
    SlabSizeMismatchError,
    WrongCertificateError,
    WrongSecretError,
)
from infiniswap.units import HostPort, format_size

NO_ANSWER: Final = "no answer within"
"""How such an error begins."""
CERTIFICATE_REQUIRED: Final = "CERTIFICATE_REQUIRED"
_ANOTHER: Final = "Use a certificate of the authority that the donor trusts (its ca_file)."
_RENEW: Final = "Renew it and reload; if it is new, correct the clocks of both hosts."
_ALERTS: Final = {
    CERTIFICATE_REQUIRED: ("there is none", ""),
    "CERTIFICATE_EXPIRED": ("it has expired, or that of its authority has", _RENEW),
    "UNKNOWN_CA": ("another authority has signed it", _ANOTHER),
    "BAD_CERTIFICATE": ("it is not valid yet by the donor's clock, or damaged", _RENEW),
    "UNSUPPORTED_CERTIFICATE": ("it is not for use as a client", _ANOTHER),
    "CERTIFICATE_UNKNOWN": ("it cannot be used", _ANOTHER),
    "DECRYPT_ERROR": ("its signature is wrong", _ANOTHER),
}
"""TLS alerts about the certificate of the other end, RFC 8446, 6.2: the reason and the remedy."""
_LOOPBACK: Final = re.compile(r"Connect call failed \('(127\.|::1')")
"""In asyncio's words, which name the address that was tried."""
_ONE_MODE: Final = (
    "Use one of the two on every host: ca_file, certificate_file and key_file under [cluster], or "
    "secret_file."
)


@contextlib.asynccontextmanager
async def errors_explained(
    address: HostPort, wait_s: float, shown: str = ""
) -> AsyncIterator[None]:
    """Bounds the block and turns what aiohttp raises into errors for people.

    Args:
        address: of the donor.
        wait_s: how long the block may take.
        shown: the names in the certificate that this host shows.
    """
    try:
        async with asyncio.timeout(wait_s):
            yield
    except InfiniswapError as error:
        if not error.where:
            error.where = f"donor {address}"
        raise
    except TimeoutError:
        raise NoDonorError(
            f"{NO_ANSWER} {wait_s:g} s",
            where=f"donor {address}",
            mend=f"Check the address, that the host is up, and that its firewall lets TCP port "
            f"{address.port} in.",
        ) from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise untrusted(address, error.certificate_error) from error
    except aiohttp.ClientConnectorSSLError as error:
        if alert := _alert(error):
            raise refused_certificate(address, alert, shown) from error
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
        if alert := _alert(error):
            raise refused_certificate(address, alert, shown) from error
        raise not_a_daemon(address, "the answer is not HTTP") from error


def _alert(error: BaseException) -> str:
    """Which of the alerts about certificates the donor has sent; empty: none."""
    text = str(error).upper().replace(" ", "_")
    return next((name for name in _ALERTS if f"ALERT_{name}" in text), "")


def untrusted(address: HostPort, error: Exception) -> WrongCertificateError:
    """The donor's certificate does not count here."""
    presented, why, code = "", str(error), 0
    if isinstance(error, RefusedCertificateError):
        presented, why, code = f" ({error.presented})", error.why, error.verify_code
    said = f"the certificate of the donor{presented} {why}"
    if code in (EXPIRED, NOT_YET_VALID):
        mend = "Renew it there and reload the daemon; if it is new, correct the clock of this host."
    elif code == SELF_SIGNED:
        said = f"{said}: the donor uses a cluster secret, or is of another cluster"
        mend = _ONE_MODE
    else:
        mend = "Give both hosts certificates of one authority, and its certificate as ca_file."
    return WrongCertificateError(said, where=f"donor {address}", mend=mend)


def refused_certificate(address: HostPort, alert: str, shown: str) -> WrongCertificateError:
    """The donor does not accept what this host has shown, and `alert` says why."""
    if alert == CERTIFICATE_REQUIRED:
        what = "the donor asks for a certificate of its cluster, and this host has a cluster secret"
        return WrongCertificateError(what, where=f"donor {address}", mend=_ONE_MODE)
    why, mend = _ALERTS[alert]
    return WrongCertificateError(
        f"the donor does not accept the certificate of this host ({shown}): {why}",
        where=f"donor {address}",
        mend=mend,
    )


def not_a_donor(address: HostPort, detail: str) -> WrongCertificateError:
    """The authority has signed the certificate of the other end, but for something else."""
    return WrongCertificateError(
        f"who answers is no donor of this cluster: {detail}",
        where=f"donor {address}",
        mend="Give that host a certificate with the role donor, or correct cluster.name here.",
    )


def refused_role(address: HostPort, detail: str) -> WrongCertificateError:
    """The donor has verified our certificate, and what it says is not enough."""
    return WrongCertificateError(
        f"the donor refuses this host: {detail}",
        where=f"donor {address}",
        mend="Use a certificate of the donor's authority, in date, with that role and cluster.",
    )


def cannot_connect(address: HostPort, error: OSError) -> NoDonorError:
    """No connection was made."""
    where = f"donor {address}"
    if isinstance(error, socket.gaierror):
        return NoDonorError(
            f"the host name cannot be resolved ({error.strerror})",
            where=where,
            mend="Check the spelling, or give the address in numbers.",
        )
    refused = error.errno == errno.ECONNREFUSED
    if refused and _LOOPBACK.search(str(error)) and not address.is_loopback:
        return NoDonorError(
            f"connection refused: on this host the name {address.host} stands for a loopback "
            "address, where no daemon listens",
            where=where,
            mend="Name the donor by its address in figures, or correct /etc/hosts.",
        )
    if refused:
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


def older(address: HostPort, lacks: str) -> ProtocolMismatchError:
    """The daemon is of a release that lacks this ("has no page")."""
    return ProtocolMismatchError(
        f"this daemon is of an earlier release, which {lacks}",
        where=f"donor {address}",
        mend="Name a donor with this release, or upgrade that one.",
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
        mend="Copy the same secret file to every host and name it in [cluster] secret_file. If the "
        "files are the same, another host may be in between: find out which host has that address.",
    )
