# SPDX-License-Identifier: Apache-2.0
"""Generic netlink, as much of it as a request with an answer takes.

Why not a library: docs/adr/0014-own-generic-netlink.md. The formats are those of
<linux/netlink.h> and <linux/genetlink.h>; numbers are in the host's order, attributes are padded to
four bytes.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from infiniswap.errors import DeadlineError, NotFoundError, SystemCallError, from_oserror

_NETLINK_GENERIC: Final = 16
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENL_HEADER: Final = struct.Struct("=BBH")  # command, version, reserved
_ATTRIBUTE: Final = struct.Struct("=HH")  # length with this header, type
_ERROR: Final = struct.Struct("=i")
_NLMSG_ERROR: Final = 2
_REQUEST_ACK: Final = 0x1 | 0x4
_NESTED: Final = 0x8000
_TYPE_MASK: Final = 0x3FFF
_ANSWER_BYTES_MAX: Final = 1 << 16

_CONTROL_ID: Final = 16
_GET_FAMILY: Final = 3
_FAMILY_ID, _FAMILY_NAME, _FAMILY_ATTRIBUTES_MAX = 1, 2, 5


@dataclass(frozen=True, slots=True)
class Family:
    """A kernel part that speaks generic netlink.

    Attributes:
        number: its message type.
        attribute_max: the highest attribute it knows: tells newer kernels from older ones.
    """

    number: int
    attribute_max: int


class Link(Protocol):
    """What GenericNetlink does; tests have another."""

    def family(self, name: str) -> Family:
        """Looks a family up."""

    def ask(self, family: Family, command: int, payload: bytes) -> tuple[bytes, ...]:
        """Sends a request with these attributes; returns those of each answer."""


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded."""
    text = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value
    return text + bytes(-len(text) % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute made of attributes."""
    return attribute(kind | _NESTED, b"".join(parts))


def u32(kind: int, value: int) -> bytes:
    """A number of 32 bits."""
    return attribute(kind, struct.pack("=I", value))


def u64(kind: int, value: int) -> bytes:
    """A number of 64 bits."""
    return attribute(kind, struct.pack("=Q", value))


def text(kind: int, value: str) -> bytes:
    """A string with its closing zero."""
    return attribute(kind, os.fsencode(value) + b"\0")


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and values.

    Raises:
        SystemCallError: no attributes.
    """
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size or at + length > len(data):
            raise SystemCallError("the kernel's netlink answer makes no sense")
        yield kind & _TYPE_MASK, data[at + _ATTRIBUTE.size : at + length]
        at += length + -length % 4


def number_of(value: bytes) -> int:
    """An attribute's number, however wide."""
    return int.from_bytes(value, _BYTE_ORDER)


_BYTE_ORDER: Final = "little" if struct.pack("=H", 1)[0] else "big"


class GenericNetlink:
    """A socket to the kernel. One request at a time; blocking.

    Args:
        answer_s_max: how long an answer may take. (The nbd family waits for disks while it
            answers.)

    Raises:
        SystemCallError, NotPermittedError: no netlink here.
    """

    def __init__(self, *, answer_s_max: float = 60.0) -> None:
        self._sequence = 0
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_GENERIC
            )
        except OSError as error:
            raise from_oserror("cannot open a netlink socket", error) from error
        self._socket.bind((0, 0))
        self._socket.settimeout(answer_s_max)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def family(self, name: str) -> Family:
        """Looks a family up.

        Raises:
            NotFoundError: the kernel, or this network namespace, has none of that name.
        """
        try:
            (answer,) = self.ask(Family(_CONTROL_ID, 0), _GET_FAMILY, text(_FAMILY_NAME, name))
        except SystemCallError as error:
            if error.code != errno.ENOENT:
                raise
            raise NotFoundError(f"there is no generic netlink family {name}") from error
        found = dict(attributes(answer))
        return Family(
            number_of(found[_FAMILY_ID]), number_of(found.get(_FAMILY_ATTRIBUTES_MAX, b""))
        )

    def ask(self, family: Family, command: int, payload: bytes) -> tuple[bytes, ...]:
        """Sends a request with these attributes; returns those of each answer.

        Raises:
            NotPermittedError, SystemCallError: the kernel's refusal, with its reason.
            DeadlineError: no answer.
        """
        self._sequence += 1
        message = _GENL_HEADER.pack(command, 1, 0) + payload
        header = _HEADER.pack(
            _HEADER.size + len(message), family.number, _REQUEST_ACK, self._sequence, 0
        )
        try:
            self._socket.send(header + message)
            return tuple(self._answers())
        except TimeoutError:
            raise DeadlineError("the kernel does not answer a netlink request") from None
        except OSError as error:
            raise from_oserror("the kernel refused a netlink request", error) from error

    def _answers(self) -> Iterator[bytes]:
        while True:
            data = self._socket.recv(_ANSWER_BYTES_MAX)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, _flags, sequence, _port = _HEADER.unpack_from(data, at)
                body = data[at + _HEADER.size : at + length]
                at += max(length + -length % 4, _HEADER.size)
                if sequence != self._sequence:
                    continue  # of a request that was given up
                if kind == _NLMSG_ERROR:
                    (code,) = _ERROR.unpack_from(body)
                    if code != 0:
                        raise OSError(-code, os.strerror(-code))
                    return  # the acknowledgement, always the last
                yield body[_GENL_HEADER.size :]
