# SPDX-License-Identifier: Apache-2.0
"""Records that a daemon leaves to its successor: who it is, and which lease is whose.

Which slab is in which slot stands only in the names of the slabs' files (csrc/store/slab_dir.h).
Tokens are not recorded: a lease that comes back has no connections, and its renewal makes a new
token.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from infiniswap.donor.leases import LeaseRecord
from infiniswap.errors import from_oserror
from infiniswap.fields import Hex128, Uuid
from infiniswap.json_text import NotJsonError, decode_json

log = logging.getLogger(__name__)

FORMAT = 2
"""Format of the records and of the slabs' names. Another one is not read."""
FORMAT_OF_PROTOCOL_1 = 1
"""The same, of daemons whose devices speak protocol version 1."""

_LEASE = re.compile(r"([1-9][0-9]{0,18})\.json")
_RECORD_BYTES_MAX = 64 * 1024


class DonorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The daemon whose slabs these are.

    Attributes:
        format: see FORMAT.
        donor_id: see DonorIdentity.
        incarnation: likewise; a successor that finds the contents takes it over.
        slab_bytes: size of a slab.
        boot_id: of the kernel that had them in its memory.
    """

    format: int
    donor_id: Uuid
    incarnation: Hex128
    slab_bytes: int
    boot_id: str


RecordT = TypeVar("RecordT", DonorRecord, LeaseRecord)


class LeaseRecords(Protocol):
    """Keeps records of leases. Methods block for a moment, and raise InfiniswapError."""

    def save(self, record: LeaseRecord) -> None:
        """Writes in one step: the old record or the new one is there, never a part."""

    def remove(self, lease: int) -> None:
        """Does nothing where there is none."""


class FileRecords:
    """Records as files.

    Args:
        path: a directory on the same file system as the slabs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._leases = path / "leases"

    @property
    def _donor(self) -> Path:
        return self._path / "donor.json"

    # ----------------------------------------------------------------------- donor

    def donor(self) -> DonorRecord | None:
        """The daemon that was here; None: there was none, or its record cannot be read."""
        return self._read(self._donor, DonorRecord)

    def save_donor(self, record: DonorRecord) -> None:
        """The slabs here are this daemon's from now on."""
        self._write(self._donor, record)

    def remove_donor(self) -> None:
        """The slabs here belong to no daemon from now on."""
        _system(lambda: self._donor.unlink(missing_ok=True), self._donor)

    # ---------------------------------------------------------------------- leases

    def has_leases(self) -> bool:
        """Whether any is recorded."""
        with contextlib.suppress(OSError):
            return any(_LEASE.fullmatch(path.name) for path in self._leases.iterdir())
        return False

    def load(self) -> list[LeaseRecord]:
        """Every lease, oldest first. Other files are removed, and logged."""
        _system(lambda: self._leases.mkdir(mode=0o700, exist_ok=True), self._leases)
        found = []
        for path in sorted(self._leases.iterdir()):
            number = _LEASE.fullmatch(path.name)
            record = self._read(path, LeaseRecord) if number else None
            if number and record is not None and record.lease == int(number[1]):
                found.append(record)
                continue
            # A name that begins with a dot is a record that was being written.
            log.log(
                logging.DEBUG if path.name.startswith(".") else logging.WARNING,
                "removed %s: not the record of a lease",
                path,
            )
            with contextlib.suppress(OSError):
                path.unlink()
        return sorted(found, key=lambda record: record.lease)

    def save(self, record: LeaseRecord) -> None:
        """See LeaseRecords."""
        self._write(self._leases / f"{record.lease}.json", record)

    def remove(self, lease: int) -> None:
        """See LeaseRecords."""
        path = self._leases / f"{lease}.json"
        _system(lambda: path.unlink(missing_ok=True), path)

    # ----------------------------------------------------------------------- files

    @staticmethod
    def _read(path: Path, kind: type[RecordT]) -> RecordT | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if os.fstat(descriptor).st_uid != os.geteuid():
                    return None
                return decode_json(file.read(_RECORD_BYTES_MAX), kind)
        except (OSError, NotJsonError):
            return None

    @staticmethod
    def _write(path: Path, record: DonorRecord | LeaseRecord) -> None:
        def write() -> None:
            temporary = path.with_name(f".{path.name}")
            temporary.write_bytes(msgspec.json.encode(record))
            # Nothing to sync: it is memory, and a loss of power takes the slabs, too.
            temporary.replace(path)

        _system(write, path)


def _system(call: Callable[[], object], path: Path) -> None:
    try:
        call()
    except OSError as error:
        raise from_oserror(
            "what a restarted daemon must know cannot be written", error, where=str(path)
        ) from error
