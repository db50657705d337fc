# SPDX-License-Identifier: Apache-2.0
"""Donors by name: the one that `infiniswap status` shows may be given wherever an address may.

An address stays what it is: anything with a port, figures, and a host that the configuration names.
Every other word is first looked for among the names of the known donors. A word that is none of
them is a host's name, for the resolver.
"""

from __future__ import annotations

import asyncio
import difflib
import ipaddress
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from infiniswap import config as configuration
from infiniswap.config import Config
from infiniswap.control.text import clean_text
from infiniswap.discovery.static import only_these
from infiniswap.errors import InfiniswapError, NotFoundError, UsageError
from infiniswap.units import CONTROL_PORT, HostPort, parse_host_port, parse_host_ports

_LISTED_MAX: Final = 8
"""Donors, in a sentence."""


@dataclass(frozen=True, slots=True)
class KnownDonor:
    """A donor that has said its name."""

    name: str
    donor_id: str
    address: HostPort

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def is_address(text: str) -> bool:
    """Whether this can be no name: it has a port, or is an address in figures."""
    text = text.strip()
    if ":" in text or text.startswith("["):
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def named(word: str, known: Iterable[KnownDonor]) -> KnownDonor | None:
    """The donor of that name; None: there is none. One donor with several addresses is one.

    Raises:
        UsageError: several donors have it.
    """
    found: dict[str, KnownDonor] = {}
    for donor in known:
        if donor.name == word:
            found.setdefault(donor.donor_id, donor)
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} donors have the name {word}: {_listed(found.values())}",
            mend="Give the address of the one you mean.",
        )
    return next(iter(found.values()), None)


def unknown(word: str, known: Sequence[KnownDonor], silent: Sequence[HostPort]) -> NotFoundError:
    """The error for a word that is neither a donor's name nor a host's.

    Args:
        word: as it was given.
        known: donors that have said their names.
        silent: those that have not answered.
    """
    names = sorted({donor.name for donor in known})
    close = difflib.get_close_matches(word, names, n=1)
    mend = f"The nearest known name is {close[0]}. " if close else ""
    distinct = {donor.donor_id: donor for donor in known}.values()
    mend += f"Known donors: {_listed(distinct)}." if names else "No donor has told its name."
    if silent:
        more = f" and {len(silent) - _LISTED_MAX} more" if len(silent) > _LISTED_MAX else ""
        mend += f" Without an answer: {', '.join(map(str, silent[:_LISTED_MAX]))}{more}."
    return NotFoundError(
        f"there is no donor named {clean_text(word)}, and no host of that name", mend=mend
    )


def _listed(donors: Iterable[KnownDonor]) -> str:
    texts = sorted(map(str, donors))
    more = [f"{len(texts) - _LISTED_MAX} more"] if len(texts) > _LISTED_MAX else []
    return ", ".join(texts[:_LISTED_MAX] + more)


def load_with_donors(
    path: Path | None, donors: str | None, overrides: Mapping[str, object]
) -> Config:
    """The configuration with the donors of `--donors` in place of all others. Names are looked for
    among the donors that are configured without it.

    Raises:
        ConfigError: see infiniswap.config.load.
        UsageError, NotFoundError: see addresses_of.
    """
    these = only_these(donors_of(donors, path, overrides))
    return configuration.load(path, {**overrides, **these})


def donors_of(
    donors: str | None, path: Path | None, overrides: Mapping[str, object]
) -> tuple[HostPort, ...] | None:
    """The addresses that `--donors` gives, by themselves or as names; None: it is not given.

    Raises:
        ConfigError, UsageError, NotFoundError: see load_with_donors.
    """
    if donors is None:
        return None
    words = [word for word in donors.split(",") if word.strip()]
    if all(map(is_address, words)):
        return parse_host_ports(donors)
    return addresses_of(words, configuration.load(path, overrides))


# ------------------------------------------------------------------------- asking


def address_of(text: str, config: Config, *, own: bool = True) -> HostPort:
    """The control address of a donor that is given by address or by name. Blocking, in bounded
    time; asks nobody for what is an address.

    Args:
        text: of the command line.
        config: names the donors that are known.
        own: a daemon of this host is one of them, too.

    Raises:
        UsageError: several donors have the name; or it can be neither name nor address.
        NotFoundError: nobody knows it.
    """
    (found,) = addresses_of([text], config, own=own)
    return found


def addresses_of(
    texts: Sequence[str], config: Config, *, own: bool = False
) -> tuple[HostPort, ...]:
    """As address_of, for several at once. Each address once."""
    words = [text.strip() for text in texts]
    peers = config.peers()
    asked = None
    found: dict[HostPort, None] = {}
    for word in words:
        if is_address(word) or HostPort(word, CONTROL_PORT) in peers:
            found[parse_host_port(word)] = None
            continue
        if asked is None:
            asked = _ask(config, own=own)
        known, silent = asked
        donor = named(word, known)
        if donor is not None:
            found[donor.address] = None
            continue
        if known or silent:
            _check_host(word, known, silent, config.cluster.ask_s)
        found[parse_host_port(word)] = None
    return tuple(found)


def _ask(config: Config, *, own: bool) -> tuple[list[KnownDonor], list[HostPort]]:
    """The donors that say their names, and those that do not answer."""
    from infiniswap.control.access import client_config
    from infiniswap.discovery.find import find
    from infiniswap.watch.asking import ask, local_donor

    found = find(config)
    announced = [
        KnownDonor(clean_text(one.name), one.donor_id, one.address) for one in found.announced
    ]
    told = {donor.address for donor in announced}
    addresses = [address for address in found.addresses if address not in told]
    listen = config.daemon.listen
    if own and listen not in found.addresses:
        addresses.append(listen)
    client = client_config(config, config.cluster.ask_s)
    rows = asyncio.run(ask(addresses, client, local_donor(config)))
    known = announced + [
        KnownDonor(row.status.donor_name, row.status.donor_id, row.address)
        for row in rows
        if row.status is not None
    ]
    silent = [row.address for row in rows if row.status is None and row.address != listen]
    return known, silent


def _check_host(
    word: str, known: Sequence[KnownDonor], silent: Sequence[HostPort], wait_s: float
) -> None:
    """Raises NotFoundError for a word that the resolver does not know either. One that it does not
    answer for in time is left to whoever connects."""
    failures: list[Exception] = []

    def resolve() -> None:
        try:
            socket.getaddrinfo(word, CONTROL_PORT, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failures.append(error)

    try:
        parse_host_port(word)
    except InfiniswapError:
        raise unknown(word, known, silent) from None
    thread = threading.Thread(target=resolve, name="resolver", daemon=True)
    thread.start()
    thread.join(wait_s)
    if failures:
        raise unknown(word, known, silent)
