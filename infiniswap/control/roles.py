# SPDX-License-Identifier: Apache-2.0
"""Who a certificate of a cluster's authority is for: cluster, role and host in URIs. Pure.

    infiniswap://CLUSTER/ROLE/HOST        in the subject's alternative names; one for each role

Names in DNS and addresses say nothing here: hosts are reached by addresses that change.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from infiniswap.control.text import clean_text

SCHEME: Final = "infiniswap://"
PART: Final = r"[A-Za-z0-9_.-]{1,64}"
"""A cluster's name, or a host's."""

_URI: Final = re.compile(f"{SCHEME}({PART})/({PART})/({PART})")
_IN_DER: Final = re.compile(rb"\x86(.)(infiniswap://[A-Za-z0-9_./-]{1,200})", re.DOTALL)
"""uniformResourceIdentifier of a GeneralName, RFC 5280, 4.2.1.6, of less than 128 bytes."""
_SAID_MAX: Final = 4
_NAMELESS: Final = "without a name that begins with infiniswap://"


class Role(enum.StrEnum):
    """What a host may do with its certificate."""

    DONOR = "donor"
    """Lends memory; consumers accept nobody else as a donor."""
    CONSUMER = "consumer"
    """Borrows memory, reads status and metrics."""
    OPERATOR = "operator"
    """Drains donors, reads status and metrics."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a certificate names in one cluster.

    Attributes:
        cluster: its name.
        host: its name; quotas count it.
        roles: those of the host there.
    """

    cluster: str
    host: str
    roles: frozenset[Role]


def uri(cluster: str, role: Role, host: str) -> str:
    """The name of a host in a role.

    Raises:
        ValueError: cluster or host cannot be part of it.
    """
    made = f"{SCHEME}{cluster}/{role}/{host}"
    if not _URI.fullmatch(made):
        raise ValueError("only up to 64 letters, digits, `_`, `-` and `.` can be in a name")
    return made


def uris_of(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of ours in a certificate that `ssl` has verified and decoded."""
    names = certificate.get("subjectAltName", ())
    return tuple(text for kind, text in names if kind == "URI" and text.startswith(SCHEME))


def uris_in(der: bytes) -> tuple[str, ...]:
    """The names of ours that seem to be in a certificate that was refused: for sentences alone, as
    nobody has vouched for them."""
    found = _IN_DER.findall(der)  # what comes behind a name may look like a part of it
    return tuple(name[: length[0]].decode("ascii") for length, name in found)


def said(uris: Iterable[str]) -> str:
    """The names, for a sentence."""
    names = list(uris)
    more = ", ..." if len(names) > _SAID_MAX else ""
    return clean_text(", ".join(names[:_SAID_MAX]) + more, 500) or _NAMELESS


def subject(uris: Iterable[str], cluster: str) -> Subject:
    """Whom these names are for in that cluster; roles that are not known here do not count.

    Raises:
        ValueError: nobody there, a name that is none, or more than one host; says so.
    """
    names = tuple(uris)
    parts = [_URI.fullmatch(name) for name in names]
    if not parts:
        raise ValueError(f"the certificate is {_NAMELESS}, so it is for no host of a cluster")
    found = [part.groups() for part in parts if part is not None]
    if len(found) < len(parts):
        raise ValueError(f"not every name is infiniswap://CLUSTER/ROLE/HOST: {said(names)}")
    own = [(role, host) for its_cluster, role, host in found if its_cluster == cluster]
    if not own:
        raise ValueError(
            f"the certificate is for another cluster ({said(names)}), and this one is {cluster!r}"
        )
    hosts = {host for _, host in own}
    if len(hosts) > 1:
        raise ValueError(f"the certificate is for more than one host ({said(names)})")
    known = frozenset(Role(role) for role, _ in own if role in frozenset(Role))
    return Subject(cluster, hosts.pop(), known)


def require(uris: Iterable[str], cluster: str, roles: frozenset[Role]) -> Subject:
    """The subject, if it has one of these roles.

    Raises:
        ValueError: it has not; says what was shown and what is needed.
    """
    names = tuple(uris)
    found = subject(names, cluster)
    if not found.roles & roles:
        needed = " or ".join(role for role in Role if role in roles)
        raise ValueError(f"the certificate is for {said(names)}, and this takes the role {needed}")
    return found
