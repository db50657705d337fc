# SPDX-License-Identifier: Apache-2.0
"""Announcements of donors on a broker: how they are written, and how others are told from them.

    infiniswap/CLUSTER/donors/DONOR/SESSION   retained: {"schema", "proof", "body": {...}}
    infiniswap/CLUSTER/memory/DONOR           not retained: memory figures, for people and graphs

Each session (each connection of a daemon to its broker) has a topic of its own: the will of an
earlier session, which may come late, cannot withdraw the announcement of a later one, and two
daemons with one identity do not overwrite each other.

The proof is an HMAC of the body's bytes under a key of the cluster secret: a writer to the broker
without the secret cannot name hosts, nor withdraw them. The body says when it was signed, and has a
sequence number that rises with each announcement of a daemon, so a recorded one is worthless soon,
and at once when a later one was heard. It does not prove that the donor is still there; only the
donor itself does that, in a session of its control API.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from infiniswap.control.text import cleaned
from infiniswap.errors import InfiniswapError, UsageError
from infiniswap.fields import U53, Count, Name, Proof, Share, Uuid
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.units import HostPort, parse_host_port

SCHEMA: Final = 2
"""1 had neither time nor sequence, and other keys."""
ANNOUNCEMENT_BYTES_MAX: Final = 4096
ADDRESSES_MAX: Final = 8
EVERY_S_MAX: Final = 3600.0
LIVES: Final = 3.0
"""Times `every_s` after which a silent donor counts as gone, and an announcement as too old."""
REPEAT_S_UNKEPT: Final = 5.0
"""Time after which an announcement that the broker does not keep is repeated, at most."""
CLOCK_S_MAX: Final = 300.0
"""By how much the clocks of two hosts may differ."""

_PURPOSE: Final = b"infiniswap announcement 2\0"
_TOPIC = re.compile(r"infiniswap/([^/]+)/donors/([0-9a-f-]{36})/([0-9a-f]{16})")

Session = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Seconds = Annotated[float, Meta(ge=0.0, le=1e11)]
Address = Annotated[str, Meta(min_length=1, max_length=300)]


class Announcement(Struct, frozen=True, kw_only=True):
    """A donor. Unknown fields are ignored: later releases may add some.

    Attributes:
        cluster: `cluster.name`.
        donor_id: the same over restarts of a daemon.
        session: of its connection to the broker.
        addresses: of its control API, the best one first.
        transports: for pages.
        protocols: versions of the control API that it speaks.
        every_s: how often it repeats this; a donor silent for three times as long counts as gone.
        time_s: when it was signed, seconds since 1970 by the donor's clock.
        sequence: higher than that of every announcement of this donor before.
    """

    cluster: Name
    donor_id: Uuid
    session: Session
    name: Name
    addresses: Annotated[list[Address], Meta(min_length=1, max_length=ADDRESSES_MAX)]
    transports: Annotated[list[Name], Meta(max_length=8)]
    slab_bytes: U53
    protocols: Annotated[list[Count], Meta(max_length=16)]
    software: Name
    every_s: Annotated[float, Meta(ge=1.0, le=EVERY_S_MAX)]
    time_s: Seconds = 0.0
    sequence: U53 = 0

    @property
    def address(self) -> HostPort:
        """The address to ask it at."""
        return parse_host_port(self.addresses[0])


class Withdrawal(Struct, frozen=True, kw_only=True):
    """The end of a donor's session: no announcement of that session counts from now on. It needs no
    time, as a session never begins again; a will is signed long before the broker sends it."""

    cluster: Name
    donor_id: Uuid
    session: Session
    withdrawn: Literal[True] = True


class _Kind(Struct, frozen=True):
    withdrawn: bool = False


class MemoryTelemetry(Struct, frozen=True, kw_only=True):
    """For people and graphs; no decision uses it, as it is old when it arrives. Bytes, or slabs."""

    cluster: Name
    donor_id: Uuid
    name: Name
    used_share: Share
    total_bytes: U53
    slab_bytes: U53
    slabs_mapped: U53
    slabs_free: U53
    can_map: U53
    draining: bool
    schema: int = SCHEMA


class _Envelope(Struct, frozen=True):
    schema: int
    body: msgspec.Raw
    proof: Proof = ""


class NotOursError(InfiniswapError):
    """A message that is no announcement for us.

    Attributes:
        reason: one of REASONS.
    """

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


REASONS: Final = (
    "junk",
    "oversized",
    "schema",
    "cluster",
    "proof",
    "old",
    "clock",
    "sequence",
    "protocol",
    "slab",
    "loopback",
    "bound",
)
"""Reasons for which a message does not count."""


def donor_topic(cluster: str, donor_id: str, session: str) -> str:
    """The topic on which a donor announces itself; `+` for any."""
    return f"infiniswap/{cluster}/donors/{donor_id}/{session}"


def memory_topic(cluster: str, donor_id: str) -> str:
    """The topic of its memory figures."""
    return f"infiniswap/{cluster}/memory/{donor_id}"


def encode(announcement: Announcement | Withdrawal, secret: bytes | None) -> bytes:
    """The message. At most ANNOUNCEMENT_BYTES_MAX long, as its fields are bounded."""
    body = msgspec.json.encode(announcement)
    proof = "" if secret is None else _proof(secret, body)
    return msgspec.json.encode(_Envelope(SCHEMA, msgspec.Raw(body), proof))


def decode(
    topic: str, payload: bytes, secrets: Sequence[bytes], cluster: str
) -> Announcement | Withdrawal:
    """Reads and checks a message.

    Args:
        topic: that it came on.
        payload: its bytes, not empty.
        secrets: announcement keys that are accepted; empty: proofs are not looked at.
        cluster: the name that it has to be for.

    Raises:
        NotOursError: it does not count, and why.
    """
    if len(payload) > ANNOUNCEMENT_BYTES_MAX:
        raise NotOursError(
            "oversized", f"{len(payload)} bytes; an announcement has {ANNOUNCEMENT_BYTES_MAX} most"
        )
    place = _TOPIC.fullmatch(topic)
    if place is None:
        raise NotOursError("junk", "the topic is none of a donor's")
    try:
        envelope = decode_json(payload, _Envelope)
    except NotJsonError as error:
        raise NotOursError("junk", f"no announcement ({_short(error)})") from None
    if envelope.schema != SCHEMA:
        raise NotOursError(
            "schema",
            f"an announcement of schema {envelope.schema}; this release reads schema {SCHEMA}, so "
            "upgrade the older of the two hosts",
        )
    body = bytes(envelope.body)
    if secrets and not _is_proved(envelope.proof, secrets, body):
        raise NotOursError(
            "proof",
            "it was made with another cluster secret"
            if envelope.proof
            else "it was made without a cluster secret, and one is configured here",
        )
    try:
        found = _body(body)
    except (NotJsonError, UsageError) as error:
        raise NotOursError("junk", f"no announcement ({_short(error)})") from None
    if found.cluster != cluster:
        raise NotOursError(
            "cluster", f"it is for the cluster {found.cluster!a}, and this is {cluster!r}"
        )
    if place.groups() != (cluster, found.donor_id, found.session):
        raise NotOursError("junk", "it is another donor's than the topic says")
    return found


def _body(body: bytes) -> Announcement | Withdrawal:
    if decode_json(body, _Kind).withdrawn:
        return cleaned(decode_json(body, Withdrawal))
    found = cleaned(decode_json(body, Announcement))
    for address in found.addresses:
        parse_host_port(address)
    return found


def check_age(found: Announcement, wall_s: float) -> None:
    """Whether it can have been signed by a donor that is there.

    Args:
        found: with a proof that was right.
        wall_s: seconds since 1970 by this host's clock.

    Raises:
        NotOursError: it is too old, or signed in the future.
    """
    age_s = wall_s - found.time_s
    who = f"donor {found.name} ({found.addresses[0]})"
    if age_s < -CLOCK_S_MAX:
        raise NotOursError(
            "clock",
            f"the clock of {who} is {-age_s:.0f} s ahead of that of this host, and "
            f"{CLOCK_S_MAX:.0f} s are accepted: set both clocks",
        )
    if age_s > LIVES * found.every_s + CLOCK_S_MAX:
        raise NotOursError(
            "old",
            f"it was signed {age_s:.0f} s ago by {who}, which would have signed a later one since: "
            "somebody has kept it, or the clocks of the hosts differ",
        )


def _short(error: Exception) -> str:
    return ascii(str(error))[1:-1][:120]


def _is_proved(proof: str, secrets: Sequence[bytes], body: bytes) -> bool:
    return any(hmac.compare_digest(proof, _proof(secret, body)) for secret in secrets)


def _proof(secret: bytes, body: bytes) -> str:
    return hmac.new(secret, _PURPOSE + body, hashlib.sha256).hexdigest()
