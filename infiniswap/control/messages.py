# SPDX-License-Identifier: Apache-2.0
"""Every message of the control API, and the codec. Pure: bytes to structs and back.

A session is one WebSocket at `SESSION_PATH`; each message is one text frame of JSON whose `type`
field names it. The order at the start:

    consumer                          donor
    hello {versions, nonce, ...}  ->
                                  <-  challenge {version, nonce}
    auth {proof}                  ->
                                  <-  welcome {proof, donor, incarnation, data_port, ...}

With certificates on both sides TLS has proved everything: the welcome follows the hello, and both
are without nonce and proof.

Both ends choose the highest version that both lists name; `hello`, `challenge` and `goodbye` never
change incompatibly, so that any two versions recognise each other. Afterwards either
end sends requests; each carries an `id` of its sender's own counting, and its answer repeats it.
Unknown fields are ignored (a newer peer of the same version may send them); unknown types and
values out of bounds are errors, which close the session.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Annotated, Any, Final, Generic, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from infiniswap.control.text import clean_text, cleaned, is_plain
from infiniswap.errors import ProtocolMismatchError
from infiniswap.fields import (
    SLOTS_MAX,
    U53,
    Count,
    Hex128,
    Hex256,
    Label,
    Name,
    Port,
    Proof,
    Rate,
    Share,
    Slot,
    Text,
    Uuid,
    Versions,
)
from infiniswap.rdma_address import RdmaEnd, RdmaKey

VERSIONS: Final = (2,)
"""Protocol versions this code speaks. Version 1 had no TLS."""

MESSAGE_BYTES_MAX: Final = 1 << 20
"""Longest message either end accepts."""

HELLO_BYTES_MAX: Final = 4096
"""Longest message accepted from a peer that has not proved the secret yet."""

SESSION_PATH: Final = "/v1/session"
STATUS_PATH: Final = "/v1/status"
VERSION_PATH: Final = "/v1/version"
OPENAPI_PATH: Final = "/v1/openapi.json"
NONCE_PATH: Final = "/v1/nonce"
DRAIN_PATH: Final = "/v1/drain"
DRAIN_FORCE_PATH: Final = "/v1/drain/force"
UNDRAIN_PATH: Final = "/v1/undrain"
PAGE_LINK_PATH: Final = "/v1/page-link"
PAGE_PATH: Final = "/ui"
SUBPROTOCOL: Final = "infiniswap"
"""WebSocket subprotocol: tells a daemon apart from any other WebSocket server."""


class Message(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of everything that is sent as a frame of its own.

    A request is declared once, as a class below: its base says who sends it, and the type in
    brackets is what answers it. The codec, the bounds of a session and the OpenAPI document are
    made from these classes. See "How to add a control message" in docs/architecture.md.
    """


class Answer(Message, frozen=True):
    """Base of every answer."""

    id: U53
    """That of the request."""


AnswerT = TypeVar("AnswerT", bound=Answer)
AnswerT_co = TypeVar("AnswerT_co", bound=Answer, covariant=True)


class Request(Message, Generic[AnswerT_co], frozen=True):
    """Base of every request; `AnswerT_co` is the type of its answer if it is not refused."""

    id: U53
    """Its sender's own counting."""


class ConsumerRequest(Request[AnswerT_co], frozen=True):
    """Base of what a consumer asks of a donor."""


class DonorRequest(Request[AnswerT_co], frozen=True):
    """Base of what a donor asks of a consumer."""


def answer_type(request: type[Request[AnswerT]]) -> type[AnswerT]:
    """What answers a request, as its declaration says."""
    declared: type[AnswerT] = get_args(vars(request)["__orig_bases__"][0])[0]
    return declared


# ------------------------------------------------------------------ start of a session
class Hello(Message, frozen=True, tag="hello", omit_defaults=True):
    """First message of a consumer. Without a nonce where both ends have shown certificates: the
    answer is a welcome then."""

    versions: Versions
    device_id: Uuid
    device_name: Name
    host_name: Name
    nonce: Proof = ""


class Challenge(Message, frozen=True, tag="challenge"):
    """The donor's answer: `version` is the highest common one. It proves nothing to strangers."""

    version: Count
    versions: Versions
    nonce: Hex256


class Auth(Message, frozen=True, tag="auth"):
    """The consumer's proof."""

    proof: Hex256


class Welcome(Message, frozen=True, tag="welcome", omit_defaults=True):
    """The session is open. Nothing in it counts before `proof`, the donor's, was compared. (It is
    empty where both ends have shown certificates.)

    A daemon that finds no slabs of its predecessor starts with a new `incarnation`: all earlier
    leases and their memory are gone. Pages are served at `data_port` of the
    host that was dialled.
    """

    version: Count
    proof: Proof
    donor_id: Uuid
    donor_name: Name
    incarnation: Hex128
    slab_bytes: U53
    data_port: Port
    grace_ms: Count
    heartbeat_ms: Count
    silence_ms: Count
    """A session that says nothing for this long is ended by either end."""
    draining: bool
    rdma: bool = False
    maps_ahead: bool = False
    """Knows `MapRequest.ahead` and KeepRequest; a donor that does not would evict for it."""
    test_page: bool = False
    """Grants a lease of no slots, whose export is one page, to test the data port with."""


class Goodbye(Message, frozen=True, tag="goodbye"):
    """Last message of a session, from either end.

    `reason` is one of GOODBYE_REASONS; an unknown one is to be treated like "error".
    """

    reason: Annotated[str, Meta(max_length=64)]
    detail: Text = ""


GOODBYE_SHUTDOWN: Final = "shutdown"
GOODBYE_RESTART: Final = "restart"
"""From a daemon: it comes back at once with the same leases. Unlike "shutdown" this is no reason to
give them up."""
GOODBYE_VERSION: Final = "version"
GOODBYE_SECRET: Final = "secret"
GOODBYE_CERTIFICATE: Final = "certificate"
GOODBYE_PROTOCOL: Final = "protocol"
GOODBYE_SILENCE: Final = "silence"
GOODBYE_BUSY: Final = "busy"
GOODBYE_FLOOD: Final = "flood"
"""The peer sends more than infiniswap.control.channel.Limits allow."""
GOODBYE_DONE: Final = "done"
GOODBYE_ERROR: Final = "error"
GOODBYE_REASONS: Final = (
    GOODBYE_SHUTDOWN,
    GOODBYE_RESTART,
    GOODBYE_VERSION,
    GOODBYE_SECRET,
    GOODBYE_CERTIFICATE,
    GOODBYE_PROTOCOL,
    GOODBYE_SILENCE,
    GOODBYE_BUSY,
    GOODBYE_FLOOD,
    GOODBYE_DONE,
    GOODBYE_ERROR,
)


class Ping(Message, frozen=True, tag="ping"):
    """Heartbeat, from either end."""

    id: U53


class Pong(Message, frozen=True, tag="pong"):
    """Answer to a heartbeat."""

    id: U53


# ----------------------------------------------- requests of the consumer and their answers


class OkAnswer(Answer, frozen=True, tag="ok"):
    """Done; nothing more to say."""


class RefusedAnswer(Answer, frozen=True, tag="refused"):
    """The request was understood and not carried out; `reason` is one of REFUSED_REASONS."""

    reason: Annotated[str, Meta(max_length=64)]
    detail: Text = ""


REFUSED_NO_MEMORY: Final = "no_memory"
REFUSED_DRAINING: Final = "draining"
REFUSED_QUOTA: Final = "quota"
REFUSED_UNKNOWN_LEASE: Final = "unknown_lease"
REFUSED_STALE: Final = "stale"
REFUSED_BUSY: Final = "busy"
REFUSED_ONLY_COPY: Final = "only_copy"
"""Answer to an eviction: the slab holds the only copy of some pages."""
REFUSED_NO_RDMA: Final = "no_rdma"
REFUSED_ERROR: Final = "error"
REFUSED_REASONS: Final = (
    REFUSED_NO_MEMORY,
    REFUSED_DRAINING,
    REFUSED_QUOTA,
    REFUSED_UNKNOWN_LEASE,
    REFUSED_STALE,
    REFUSED_BUSY,
    REFUSED_ONLY_COPY,
    REFUSED_NO_RDMA,
    REFUSED_ERROR,
)


class MemoryAnswer(Answer, frozen=True, tag="memory_answer", omit_defaults=True):
    """`used_share` counts lent slabs as used; `can_map` is how many slabs could be mapped now;
    `no_room` why none, as in Status."""

    used_share: Share
    free_slabs: Count
    can_map: Count
    no_room: Text = ""


class MemoryRequest(ConsumerRequest[MemoryAnswer], frozen=True, tag="memory", omit_defaults=True):
    """Asks for the donor's memory use, now, and what a tenant of this host could get. `tenant` is
    absent from older devices, and older donors ignore it."""

    tenant: Label = ""


class LeaseUse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a lease is for, as its device says. Nobody checks it: it is for tables, and the tenant
    divides the share of its own host, never that of others. It is told after both ends have proved
    themselves. What is empty is not told.

    `job`: name of the program of a `run`, without its arguments; `user`, `uid`: who has started
    the device; `tenant`: on whose account.
    """

    job: Label = ""
    user: Label = ""
    uid: U53 | None = None
    tenant: Label = ""


TICKET_NUMBERS: Final = 32
"""Data connections of a lease have numbers below it."""


class LeaseAnswer(Answer, frozen=True, tag="lease_answer", omit_defaults=True):
    """A fresh lease; `reclaim` is the secret that RenewRequest needs. `tickets`: those that were
    asked for, as in TicketsAnswer; none from an older donor."""

    lease: U53
    epoch: U53
    reclaim: Hex128
    export_bytes: U53
    grace_ms: Count
    tickets: Annotated[list[Hex128], Meta(max_length=TICKET_NUMBERS)] = []


class LeaseRequest(ConsumerRequest[LeaseAnswer], frozen=True, tag="lease", omit_defaults=True):
    """Asks for a lease of `slots_max` slots, all empty, and at once for tickets for its first
    `tickets` data connections. No slots: a donor with `Welcome.test_page` gives that one. `use` and
    `tickets` are absent from older devices, and older donors ignore them."""

    slots_max: Annotated[int, Meta(ge=0, le=SLOTS_MAX)]
    use: LeaseUse | None = None
    tickets: Annotated[int, Meta(ge=0, le=TICKET_NUMBERS)] = 0


class MapAnswer(Answer, frozen=True, tag="map_answer", omit_defaults=True):
    """The slab is in this slot; `key` where the lease has RDMA connections."""

    slot: Slot
    generation: U53
    key: RdmaKey | None = None


class MapRequest(ConsumerRequest[MapAnswer], frozen=True, tag="map", omit_defaults=True):
    """Asks for a slab in a slot of the lease; `slab` is the device's own number, for tables.

    `ahead`, to a donor with `Welcome.maps_ahead`: not written to yet. Gets a free slab or none, and
    is the first to be evicted when others ask for memory.
    """

    lease: U53
    slab: Count
    ahead: bool = False


class KeepRequest(ConsumerRequest[OkAnswer], frozen=True, tag="keep"):
    """To a donor with `Welcome.maps_ahead`: a slab that was mapped ahead is in use from now on."""

    lease: U53
    slot: Slot
    generation: U53


class UnmapRequest(ConsumerRequest[OkAnswer], frozen=True, tag="unmap"):
    """The consumer's DONE: no transfer is in flight, the donor may take the slab."""

    lease: U53
    slot: Slot
    generation: U53


class SlotInfo(Struct, frozen=True, array_like=True):
    """One occupied slot."""

    slot: Slot
    generation: U53
    slab: Count


class RenewAnswer(Answer, frozen=True, tag="renew_answer"):
    """The lease's new epoch, and which slots it holds (an answer may have been lost)."""

    epoch: U53
    slots: Annotated[list[SlotInfo], Meta(max_length=SLOTS_MAX)]


class RenewRequest(ConsumerRequest[RenewAnswer], frozen=True, tag="renew", omit_defaults=True):
    """Reclaims a lease on a new session: fences the old connections, kills every ticket.

    `epoch` is the last one that the consumer knows of. `use` replaces what the donor knows; without
    it the donor keeps that.
    """

    lease: U53
    reclaim: Hex128
    epoch: U53
    use: LeaseUse | None = None


class TicketsAnswer(Answer, frozen=True, tag="tickets_answer"):
    """Names of the lease's export at the data port, in the order of their numbers."""

    tickets: Annotated[list[Hex128], Meta(max_length=TICKET_NUMBERS)]


class TicketsRequest(ConsumerRequest[TicketsAnswer], frozen=True, tag="tickets"):
    """Asks for tickets, one for each data connection of the numbers from `first` on.

    A ticket opens one connection, within 10 s. A later ticket of the same number makes the earlier
    one worthless and ends the connection that it has opened, before it is given.
    """

    lease: U53
    first: Annotated[int, Meta(ge=0, lt=TICKET_NUMBERS)]
    count: Annotated[int, Meta(ge=1, le=TICKET_NUMBERS)]


class LastingTicketRequest(ConsumerRequest[TicketsAnswer], frozen=True, tag="lasting_ticket"):
    """Asks for a ticket that opens so many connections, for as long as the session lasts: for
    programs that speak NBD. Connections that it has opened end with the session."""

    lease: U53
    connections: Annotated[int, Meta(ge=1, le=65536)]


class ReleaseRequest(ConsumerRequest[OkAnswer], frozen=True, tag="release"):
    """Gives a lease and everything in it back."""

    lease: U53


class SlotKey(Struct, frozen=True, array_like=True):
    """Where the slab of an occupied slot lies."""

    slot: Slot
    generation: U53
    key: RdmaKey


class RdmaAnswer(Answer, frozen=True, tag="rdma_answer"):
    """The donor's ends, in their order; a page to try them with; slots that could be registered."""

    ends: Annotated[list[RdmaEnd], Meta(max_length=16)]
    probe: RdmaKey
    slots: Annotated[list[SlotKey], Meta(max_length=SLOTS_MAX)]


class RdmaRequest(ConsumerRequest[RdmaAnswer], frozen=True, tag="rdma"):
    """To a donor with `Welcome.rdma`: asks for connections to these ends, none: for their end."""

    lease: U53
    ends: Annotated[list[RdmaEnd], Meta(max_length=16)]


# ------------------------------------------------- requests of the donor and their answers


class EvictAnswer(Answer, frozen=True, tag="evict_done"):
    """The consumer's DONE for an eviction."""


class EvictRequest(DonorRequest[EvictAnswer], frozen=True, tag="evict"):
    """The donor takes a slab back; past `deadline_ms` it does so without the consumer.

    For the first `move_ms` of these the consumer may go on reading it, to copy it elsewhere. The
    donor may ask again for the same slab, in more of a hurry; the shortest time counts.
    `last_copy`: it takes the slab even if that holds the only copy, so that a refusal is of no use.
    Older consumers ignore it.
    """

    lease: U53
    slot: Slot
    generation: U53
    deadline_ms: Count
    move_ms: Count = 0
    last_copy: bool = False


class SlotActivity(Struct, frozen=True, array_like=True):
    """Page I/O per second of one slot."""

    slot: Slot
    pages_per_s: Rate


class DeviceFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device says of itself, for tables. Nobody checks it.

    Pages are those since its process began, `uptime_s` ago. `size_bytes` and `slabs` are its swap
    area's and far memory's together;
    `suspended`: of those that have a donor, how many it cannot reach now. `page_in_us_*`: latency
    of its page-ins in the last seconds; null: there were none. `alarms`: how many it raises.
    `far_bytes`: far memory that processes have there.
    """

    uptime_s: Annotated[float, Meta(ge=0.0)]
    size_bytes: U53
    slabs: Count
    suspended: Count = 0
    in_donors_pages: U53 = 0
    in_disk_pages: U53 = 0
    out_pages: U53 = 0
    page_in_us_p50: Rate | None = None
    page_in_us_p99: Rate | None = None
    alarms: Count = 0
    far_bytes: U53 = 0


class ActivityAnswer(Answer, frozen=True, tag="activity_answer", omit_defaults=True):
    """Slots that are left out are unknown. Older devices say nothing of themselves, and older
    donors ignore it."""

    slots: Annotated[list[SlotActivity], Meta(max_length=SLOTS_MAX)]
    device: DeviceFigures | None = None


class ActivityRequest(DonorRequest[ActivityAnswer], frozen=True, tag="activity"):
    """Asks how busy the slots of a lease are."""

    lease: U53


class DrainNotice(Message, frozen=True, tag="drain"):
    """The donor takes no more slabs on (or, `draining` false, does again)."""

    draining: bool


# ------------------------------------------------------------------------------ HTTP


class PoolStatus(Struct, frozen=True, kw_only=True):
    """The slab pool; slabs unless the name says bytes."""

    limit_bytes: U53
    slabs_max: Count
    slabs_free: Count
    slabs_mapped: Count
    slabs_dirty: Count
    slabs_unpinned: Count
    can_map: Count


class MemoryStatus(Struct, frozen=True, kw_only=True):
    """The donor's memory, bytes. `others_bytes` is the average use of all but the pool, and
    `cache_bytes` page cache that counts as used, as it is read again and again."""

    source: Name
    total_bytes: U53
    available_bytes: U53
    headroom_bytes: U53
    others_bytes: U53
    used_share: Share
    cache_bytes: U53 = 0


class SlabUse(Struct, frozen=True, array_like=True):
    """One slab of a lease: the device's own number of it, and its page I/O per second as the device
    says; null: it has not said."""

    slab: Count
    pages_per_s: Rate | None


class LeaseStatus(Struct, frozen=True, kw_only=True):
    """One lease; `state` is "active", "grace" or "expired".

    `host_certified`: `host_name` is that of the host's certificate; false: the device claims it;
    null: an older daemon does not say.
    `job`, `user`, `uid`, `tenant`: as in LeaseUse, all claimed. `granted_unix_s`: when it was
    granted; null where an older daemon has granted it. `transport`: "rdma", "tcp" or, without a
    data connection, empty. `pages_per_s`: average of pages read and written; null where pages
    travel by RDMA, which this host does not see, and from older daemons. `slabs`: those it holds;
    empty where the donor lends too many to list them, and from older daemons. `device`: null where
    the device does not say, or cannot be asked now.
    """

    lease: U53
    device_id: Uuid
    device_name: Name
    host_name: Name
    address: Text
    state: Name
    session: bool
    epoch: U53
    slots_max: Count
    slots_mapped: Count
    connections: Count
    read_bytes: U53
    write_bytes: U53
    host_certified: bool | None = None
    job: Label = ""
    user: Label = ""
    uid: U53 | None = None
    tenant: Label = ""
    granted_unix_s: Annotated[float, Meta(ge=0.0)] | None = None
    transport: Label = ""
    pages_per_s: Rate | None = None
    slabs: Annotated[list[SlabUse], Meta(max_length=SLOTS_MAX)] = []
    device: DeviceFigures | None = None


class Status(Struct, frozen=True, kw_only=True):
    """Everything an administrator sees of a donor. Never a token or a secret."""

    donor_id: Uuid
    donor_name: Name
    incarnation: Hex128
    software: Name
    versions: Versions
    uptime_s: Annotated[float, Meta(ge=0.0)]
    slab_bytes: U53
    control_port: Port
    data_port: Port
    draining: bool
    no_room: Text = ""
    """Why the donor can lend no slab now, as the rest of a sentence that begins with its name.
    Empty: it can, or it does not say."""
    degraded: Annotated[list[Text], Meta(max_length=64)] = []
    """What this donor lacks on its host, as sentences; older daemons leave this out."""
    second_secret_idle_s: Annotated[float, Meta(ge=0.0)] | None = None
    """Seconds since the second cluster secret was used last or, if it never was, since it is
    accepted. Null: there is none."""
    sessions: Count
    pool: PoolStatus
    memory: MemoryStatus
    leases: list[LeaseStatus]
    leases_left_out: Count = 0
    """Number of leases left out to keep the answer short: those with the fewest slabs."""
    counters: dict[Name, U53]


class DrainInfo(Struct, frozen=True, kw_only=True):
    """Answer to a drain or undrain: of which donor, as an address may lead to another one than
    meant. `warning` is empty when it also survives a restart."""

    donor_id: Uuid
    donor_name: Name
    draining: bool
    slabs_mapped: Count
    warning: Text = ""


class PageLink(Struct, frozen=True, kw_only=True):
    """Lets one browser in at the page /ui: `link` is good once, for `valid_s` seconds. The browser
    is shown the certificate whose SHA-256 digest is `certificate`."""

    donor_id: Uuid
    donor_name: Name
    link: Hex128
    valid_s: Count
    certificate: Hex256


class VersionInfo(Struct, frozen=True, kw_only=True):
    """Who answers at this port."""

    product: Name
    software: Name
    versions: Versions


class NonceInfo(Struct, frozen=True, kw_only=True):
    """A nonce for one authenticated HTTP request."""

    nonce: Hex256


class HttpError(Struct, frozen=True, kw_only=True):
    """Body of every HTTP answer that is no success."""

    error: Text


# ----------------------------------------------------------------------------- codec

_CONSUMER_REQUESTS: Final = tuple(ConsumerRequest.__subclasses__())
_DONOR_REQUESTS: Final = tuple(DonorRequest.__subclasses__())


def _answers(requests: Iterable[type[Request[Any]]]) -> dict[type[Message], None]:
    return dict.fromkeys((*map(answer_type, requests), RefusedAnswer))


TO_DONOR: Final[tuple[type[Message], ...]] = (
    *(Hello, Auth, Ping, Pong, Goodbye),
    *_CONSUMER_REQUESTS,
    *_answers(_DONOR_REQUESTS),
)
"""Everything that a consumer may say."""

TO_CONSUMER: Final[tuple[type[Message], ...]] = (
    *(Challenge, Welcome, Ping, Pong, Goodbye, DrainNotice),
    *_answers(_CONSUMER_REQUESTS),
    *_DONOR_REQUESTS,
)
"""Everything that a donor may say."""

BodyT = TypeVar("BodyT")

_ENCODER: Final = msgspec.json.Encoder()
_TO_DONOR: Final = msgspec.json.Decoder[Any](functools.reduce(operator.or_, TO_DONOR))
_TO_CONSUMER: Final = msgspec.json.Decoder[Any](functools.reduce(operator.or_, TO_CONSUMER))


def encode(message: Struct) -> bytes:
    """A message or an HTTP body as JSON."""
    return _ENCODER.encode(message)


def decode_to_donor(frame: bytes | str) -> Message:
    """Decodes what a consumer sent.

    Raises:
        ProtocolMismatchError: no such message, or a value out of bounds.
    """
    message: Message = _decode(_TO_DONOR, frame)
    return message


def decode_to_consumer(frame: bytes | str) -> Message:
    """Decodes what a donor sent.

    Raises:
        ProtocolMismatchError: no such message, or a value out of bounds.
    """
    message: Message = _decode(_TO_CONSUMER, frame)
    return message


def decode_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Decodes an HTTP body.

    Raises:
        ProtocolMismatchError: it is no such thing.
    """
    decoded: BodyT = _decode(msgspec.json.Decoder(kind), body)
    return decoded


def _decode(decoder: Any, frame: bytes | str) -> Any:
    try:
        message = decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # It may quote the peer's bytes (an unknown `type`), and ends up in the log.
        why = clean_text(str(error))
        raise ProtocolMismatchError(f"not a message of this protocol ({why})") from None
    # Whatever is said for people ends up in logs and on terminals: cleaned here, once.
    return message if is_plain(frame) else cleaned(message)


def choose_version(ours: Iterable[int], theirs: Iterable[int]) -> int | None:
    """The highest version in both lists; None without a common one."""
    return max(set(ours) & set(theirs), default=None)
