# SPDX-License-Identifier: Apache-2.0
"""Sizes, pages and addresses: their constants, and text to value and back.

Sizes are binary: K, M, G, T, P are powers of 1024; `Ki`, `KiB` and `kb` are other spellings of K.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from infiniswap.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
PIB = 1 << 50

PAGE_BYTES = 4096
"""Unit of validity and of I/O."""

SLAB_BYTES_DEFAULT = GIB
"""Unit of lending and mapping."""

SIZE_BYTES_MAX = 1 << 62
"""Largest size accepted: leaves room for arithmetic in signed 64 bits."""

CONTROL_PORT = 9400
DATA_PORT = 9401
METRICS_PORT = 9402
INVITATION_PORT = 9403

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket (sun_path, less its end)."""

ANY_IPV6 = "::"
"""To listen on it is to listen on every address of this host, those of IPv4 included."""

_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB, "p": PIB}
_NUMBER = r"([0-9]{1,20})(?:\.([0-9]{1,9}))?"
_SIZE = re.compile(_NUMBER + r"\s*([kmgtp]?)(ib?|b)?", re.ASCII | re.IGNORECASE)
_SHARE = re.compile(_NUMBER + r"\s*%", re.ASCII)
_GIB_MEANT_MAX = 99
"""A number without a letter up to this is taken for one of gibibytes, above it of mebibytes."""


LINK_LOCAL: Final = "is a link-local address, which means another host on each interface"


def counted(number: int, noun: str) -> str:
    """ "1 slab", "2 slabs", "3 processes"; the noun is in the singular."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def parse_size(text: str) -> int:
    """Bytes of a size such as `4096`, `512M`, `1G`, `1.5G`, `4Gi`, `64 KiB`.

    Raises:
        UsageError: not a size, not a whole number of bytes, or above SIZE_BYTES_MAX.
    """
    match = _SIZE.fullmatch(text.strip())
    mend = "Write a number with K, M, G or T, for example 512M or 1.5G."
    if match is None:
        raise UsageError(f"{text!r} is not a size", mend=mend)
    whole, fraction, unit, suffix = match.groups()
    if suffix is not None and suffix.lower().startswith("i") and not unit:
        raise UsageError(f"{text!r} is not a size", mend=mend)
    exact = Fraction(f"{whole}.{fraction or '0'}") * _UNITS[unit.lower()]
    if exact.denominator != 1:
        raise UsageError(f"{text!r} is not a whole number of bytes", mend=mend)
    if exact > SIZE_BYTES_MAX:
        raise UsageError(
            f"{text!r} is too large", mend=f"The largest size is {format_size(SIZE_BYTES_MAX)}."
        )
    return int(exact)


def parse_page_size(text: str) -> int:
    """As parse_size, for sizes of devices, slabs and buffers.

    Raises:
        UsageError: as parse_size, or zero, or not a multiple of PAGE_BYTES.
    """
    size_bytes = parse_size(text)
    if size_bytes == 0 or size_bytes % PAGE_BYTES:
        fitting_bytes = max(1, pages_for(size_bytes)) * PAGE_BYTES
        mend = f"The nearest that fits is {format_size(fitting_bytes)}."
        if text.strip().isdecimal() and (meant := letter_meant(size_bytes)):
            mend = meant
        raise UsageError(
            f"{text!r} is not a multiple of a page ({PAGE_BYTES} bytes)"
            if size_bytes
            else f"{text!r}: the size must be above zero",
            mend=mend,
        )
    return size_bytes


def letter_meant(size_bytes: int, size_bytes_max: int = SIZE_BYTES_MAX) -> str:
    """A remedy for a size that came without a letter; "" for one that may be meant so.

    Args:
        size_bytes: the size.
        size_bytes_max: the largest that fits.
    """
    if not 0 < size_bytes < PAGE_BYTES:
        return ""
    in_gib = size_bytes <= _GIB_MEANT_MAX and size_bytes * GIB <= size_bytes_max
    letter = "G" if in_gib else "M"
    return f"Did you mean {size_bytes}{letter}? A number without a letter counts bytes."


def parse_share(text: str) -> Fraction | None:
    """`50%` as one half; None for text that is no percentage.

    Raises:
        UsageError: not above 0 %, or above 100 %.
    """
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        return None
    share = Fraction(f"{match[1]}.{match[2] or '0'}") / 100
    if not 0 < share <= 1:
        raise UsageError(
            f"{text!r} is no share of the memory", mend="Write above 0% and up to 100%."
        )
    return share


def format_size(size_bytes: int) -> str:
    """Shortest text that parse_size turns back into exactly `size_bytes`: `1G`, `1536M`, `4097`."""
    if size_bytes < 0:
        return "-" + format_size(-size_bytes)
    for unit, factor in (("P", PIB), ("T", TIB), ("G", GIB), ("M", MIB), ("K", KIB)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def format_size_short(size_bytes: int | float) -> str:
    """For people: about three digits, `1.5 GiB`, `312 MiB`, `17 B`. Not exact."""
    value = float(size_bytes)
    if abs(value) < 999.5:
        return f"{value:.0f} B"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5:
            break
        value /= 1024
        unit = larger
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def pages_for(size_bytes: int) -> int:
    """Pages that hold `size_bytes`, rounded up."""
    return -(-size_bytes // PAGE_BYTES)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """A TCP address; the host is a name or an address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def in_uri(self) -> str:
        """The address as a URI has it, with `%25` before an interface (RFC 6874)."""
        return str(self).replace("%", "%25")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than `localhost` counts as not."""
        return is_loopback(self.host)

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every address of a host."""
        return self.host == "" or is_wildcard(self.host)


def is_wildcard(host: str) -> bool:
    """Whether `host` is 0.0.0.0 or `::`, in any spelling."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, or a name that is only used for one."""
    name = host.lower().rstrip(".")
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
"""Those of RFC 6761 and of distributions' /etc/hosts."""
_FIGURES = re.compile(r"[0-9.]+", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9_.:@-]{1,15}", re.ASCII)
"""Names of interfaces are shorter than IFNAMSIZ; the kernel allows more characters in them."""


def parse_host_port(text: str, default_port: int = CONTROL_PORT) -> HostPort:
    """`host`, `host:port`, `1.2.3.4:port`, `[::1]:port`, `[::1]` or a bare IPv6 address.

    Raises:
        UsageError: no such form, or a port outside 0..65535.
    """
    stripped = text.strip()
    example = default_port or CONTROL_PORT
    mend = f"Write HOST or HOST:PORT, for example 10.0.0.2:{example} or [::1]:{example}."
    host, port_text = _split_host_port(stripped, mend)
    if ":" in host:
        _check_ipv6(text, host, mend)
    elif not _HOST_NAME.fullmatch(host):
        raise UsageError(f"{text!r} is not an address", mend=mend)
    elif _FIGURES.fullmatch(host):
        _check_ipv4(text, host, mend)
    if port_text is None:
        return HostPort(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", port_text, re.ASCII) or int(port_text) > 65_535:
        raise UsageError(f"{text!r}: {port_text!r} is not a port (0 to 65535)", mend=mend)
    return HostPort(host, int(port_text))


def _check_ipv6(text: str, host: str, mend: str) -> None:
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise UsageError(f"{text!r} is not an address", mend=mend) from None
    zone = address.scope_id
    if zone is not None and not _ZONE.fullmatch(zone):
        raise UsageError(f"{text!r} is not an address: {zone!r} names no interface", mend=mend)
    if zone is None and address.is_link_local:
        raise UsageError(
            f"{text!r} {LINK_LOCAL}",
            mend=f"Name this host's interface too, for example {_with_interface(text.strip())}.",
        )


def _with_interface(text: str) -> str:
    """An example for a link-local address. Without brackets the last four digits look like a port
    where an address is left without them."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest if re.fullmatch(r":[0-9]{1,5}", rest, re.ASCII) else ""
        return f"[{host}%eth0]{port}"
    host, _, last = text.rpartition(":")
    try:
        if re.fullmatch(r"[0-9]{4}", last, re.ASCII) and ipaddress.IPv6Address(host):
            return f"[{host}%eth0]:{last}"
    except ValueError:
        pass
    return f"[{text}%eth0]"


def _check_ipv4(text: str, host: str, mend: str) -> None:
    """Only figures and points: no name, and shorter forms, which resolvers accept, are mistakes."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise UsageError(
            f"{text!r} is not an address: IPv4 has four numbers of 0 to 255", mend=mend
        ) from None


def _split_host_port(text: str, mend: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise UsageError(f"{text!r} is not an address", mend=mend)
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        return text, None
    host, colon, port_text = text.partition(":")
    return host, port_text if colon else None


def parse_host_ports(text: str, default_port: int = CONTROL_PORT) -> tuple[HostPort, ...]:
    """A comma-separated list; empty items are ignored, duplicates dropped, order kept.

    Raises:
        UsageError: see parse_host_port.
    """
    items = (item for item in text.split(",") if item.strip())
    return tuple(dict.fromkeys(parse_host_port(item, default_port) for item in items))
