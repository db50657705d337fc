# SPDX-License-Identifier: Apache-2.0
"""`infiniswap init --authority` and `--certificate`: a cluster's own authority, and hosts'
certificates.

    DIR/ca.pem, ca-key.pem                      of the authority
        ca.pem, certificate.pem, key.pem        for a host, as [cluster] names them
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from infiniswap import config as configuration
from infiniswap.control.roles import Role
from infiniswap.errors import ConflictError, UsageError, from_oserror
from infiniswap.secret import write_new

if TYPE_CHECKING:
    from infiniswap.donor.authority import Pair

DAYS: Final = 30
DAYS_MAX: Final = 825
_PEM_MODE: Final = 0o644
_KEY_MODE: Final = 0o600


def add_options(parser: Any) -> None:
    """Those of the two commands."""
    add_host_options(
        parser, "directory of the cluster's certificate authority; alone: make one there"
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="DIR",
        help="with --authority, --host and --role: write a host's certificate, its key and the "
        "authority's certificate to this directory; an earlier one is renewed",
    )


def add_host_options(parser: Any, authority: str) -> None:
    """For whom a certificate is, and who signs it.

    Args:
        parser: of the command.
        authority: help text of --authority.
    """
    add = parser.add_argument
    add("--authority", type=Path, metavar="DIR", help=authority)
    add("--host", metavar="NAME", help="whom the certificate is for; quotas count this name")
    add(
        "--role",
        action="append",
        choices=tuple(Role),
        metavar="ROLE",
        help="donor, consumer or operator; may be given again",
    )
    add(
        "--days",
        type=int,
        metavar="N",
        help=f"how long the certificate is good for (default {DAYS})",
    )


def is_wanted(args: argparse.Namespace) -> bool:
    """Whether one of these commands was called."""
    return any(
        getattr(args, name) is not None
        for name in ("authority", "certificate", "host", "role", "days")
    )


def run(args: argparse.Namespace) -> int:
    """Makes an authority, or a certificate.

    Raises:
        UsageError: options that do not belong together, or an authority that cannot sign.
        ConflictError: there is an authority already.
        NotPermittedError, SystemCallError: a file cannot be read or written.
    """
    if args.authority is None:
        raise UsageError("--certificate, --host, --role and --days need --authority DIR")
    if args.certificate is None:
        if args.host or args.role or args.days is not None:
            raise UsageError("--host, --role and --days need --certificate DIR")
        return _make_authority(args)
    if not args.host or not args.role:
        raise UsageError(
            "--certificate needs --host NAME and at least one --role",
            mend="A host that lends and borrows has --role donor --role consumer.",
        )
    return _make_certificate(args)


def _make_authority(args: argparse.Namespace) -> int:
    from infiniswap.donor.authority import CA_FILE, CA_KEY_FILE, new_authority

    cluster = configuration.load(args.config).cluster.name
    made = new_authority(cluster)
    certificate, key = args.authority / CA_FILE, args.authority / CA_KEY_FILE
    if os.path.lexists(certificate):
        raise _there_already(certificate)
    _write_authority(key, made.key, _KEY_MODE)
    _write_authority(certificate, made.certificate, _PEM_MODE)
    print(
        f"wrote: {certificate}, {key}\n"
        f"Next: `infiniswap init --certificate DIR --authority {args.authority} --host NAME "
        f"--role donor --role consumer` for each host. Keep {key.name} where no other user can "
        "read it."
    )
    return 0


def _write_authority(path: Path, content: bytes, mode: int) -> None:
    try:
        write_new(path, content, mode)
    except FileExistsError as error:
        raise _there_already(path) from error
    except OSError as error:
        raise from_oserror("cannot write the file", error, where=str(path)) from error


def _there_already(path: Path) -> ConflictError:
    return ConflictError(
        "there is an authority already, and hosts may have certificates of it",
        where=str(path),
        mend="Name another directory.",
    )


def _make_certificate(args: argparse.Namespace) -> int:
    from infiniswap.donor.authority import (
        CA_FILE,
        CERTIFICATE_FILE,
        KEY_FILE,
        new_certificate,
        period,
    )

    days = checked_days(args.days)
    authority = read_authority(args.authority)
    cluster = configuration.load(args.config).cluster.name
    roles = [role for role in Role if role in args.role]
    try:
        made = new_certificate(authority, cluster, args.host, roles, period(days))
    except (ValueError, TypeError) as error:  # TypeError: its key has a password
        raise UsageError(f"no certificate was made: {error}", where=str(args.authority)) from error
    place = args.certificate
    _replace(place / KEY_FILE, made.key, _KEY_MODE)
    _replace(place / CERTIFICATE_FILE, made.certificate, _PEM_MODE)
    _replace(place / CA_FILE, authority.certificate, _PEM_MODE)
    print(
        f"wrote: {place / CERTIFICATE_FILE}, {place / KEY_FILE}, {place / CA_FILE}\n"
        f"Next: copy them to {args.host} and name them in [cluster]: ca_file, certificate_file, "
        f"key_file. Run this again before {days} days have passed; daemon and devices read the new "
        "ones by themselves."
    )
    return 0


def checked_days(days: int | None) -> int:
    """How long a certificate is good for. Raises UsageError: that is out of range."""
    days = DAYS if days is None else days
    if not 0 < days <= DAYS_MAX:
        raise UsageError(f"--days must be from 1 to {DAYS_MAX}")
    return days


def read_authority(directory: Path) -> Pair:
    """The authority in a directory.

    Raises:
        UsageError: there is none.
        NotPermittedError, SystemCallError: it cannot be read.
    """
    from infiniswap.donor.authority import CA_FILE, CA_KEY_FILE, Pair

    found = []
    for name in (CA_FILE, CA_KEY_FILE):
        try:
            found.append((directory / name).read_bytes())
        except FileNotFoundError as error:
            raise UsageError(
                "this directory holds no authority",
                where=str(directory / name),
                mend=f"`infiniswap init --authority {directory}` makes one.",
            ) from error
        except OSError as error:
            raise from_oserror(
                "cannot read the authority", error, where=str(directory / name)
            ) from error
    return Pair(*found)


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Puts a complete file in place of an earlier one."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        write_new(temporary, content, mode)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise from_oserror("cannot write the file", error, where=str(path)) from error
