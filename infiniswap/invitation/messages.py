# SPDX-License-Identifier: Apache-2.0
"""What the two ends of an invitation say to each other, as frames of JSON. Pure.

    guest   InvitationRequest   the password, over TLS to the certificate of the token
    port    InvitationAnswer    with an Offer, or why not
    guest   Joined              once its files are written
    port    Noted               what the inviting host has done about the new donor

A frame is four bytes of length and JSON. Each end knows how long the other one's frames may be.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeVar

import msgspec

from infiniswap.control.text import clean_name, clean_text, cleaned
from infiniswap.errors import ProtocolMismatchError

VERSION: Final = 1
REQUEST_BYTES_MAX: Final = 16 * 1024
ANSWER_BYTES_MAX: Final = 512 * 1024
"""1024 donors and the certificates of a few authorities."""
NOTES_MAX: Final = 8
HEAD: Final = struct.Struct(">I")

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class InvitationRequest(msgspec.Struct, frozen=True):
    """A guest shows the password.

    Attributes:
        version: of these messages.
        password: of the token.
        host: how the guest calls itself.
        csr: PKCS #10 request for the certificate of a key that stays with the guest.
        lends: control address of the guest's own daemon; empty: it does not lend.
        preview: asks what would be written; secrets are left out, and the invitation stays open.
    """

    version: int
    password: bytes
    host: str
    csr: str = ""
    lends: str = ""
    preview: bool = False


class Broker(msgspec.Struct, frozen=True):
    """Where donors announce themselves: as [mqtt] names it, with the files' contents."""

    address: str
    protocol: str
    username: str = ""
    password: str = ""
    tls: str = "off"
    authority: str = ""


class Offer(msgspec.Struct, frozen=True):
    """What a host of the cluster has. Of secret and certificate one is empty, or both in a preview.

    Attributes:
        inviter: name of the inviting host.
        cluster: name of the cluster.
        kind: "secret", "session-key" or "certificate".
        slab_bytes: that the cluster uses.
        peers: control addresses of donors.
        secret: text of the secret's file.
        second_secret: of the second one, while the cluster changes its secret.
        authority: certificates of the authorities.
        certificate: of the guest.
        broker: None: donors are named in lists.
        notes: sentences for the administrator of the guest.
    """

    inviter: str
    cluster: str
    kind: str
    slab_bytes: int
    peers: list[str]
    secret: str = ""
    second_secret: str = ""
    authority: str = ""
    certificate: str = ""
    broker: Broker | None = None
    notes: list[str] = []


class InvitationAnswer(msgspec.Struct, frozen=True):
    """The answer to a request.

    Attributes:
        verdict: a Verdict, or "refused".
        offer: where it was given or previewed.
        why: a sentence, where it was refused.
    """

    verdict: str
    offer: Offer | None = None
    why: str = ""


class Joined(msgspec.Struct, frozen=True):
    """The guest has written its files."""

    lends: str = ""


class Noted(msgspec.Struct, frozen=True):
    """The inviting host knows it.

    Attributes:
        sentence: what it did about the guest's daemon, or what is left to do; may be empty.
    """

    sentence: str = ""


def encode(message: msgspec.Struct) -> bytes:
    """A frame."""
    body = msgspec.json.encode(message)
    return HEAD.pack(len(body)) + body


def decode(body: bytes, kind: type[MessageT]) -> MessageT:
    """The message of a frame's body. Texts that people read are cleaned; `membership` checks those
    that are written to files.

    Raises:
        ProtocolMismatchError: it is no such message.
    """
    try:
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolMismatchError(
            "the other end does not speak the language of invitations",
            mend="Install the same release of Infiniswap on both hosts.",
        ) from error
    clean: Any = _clean(found)
    result: MessageT = clean
    return result


def _clean(found: msgspec.Struct) -> msgspec.Struct:
    replace = msgspec.structs.replace
    match found:
        case InvitationRequest():
            return replace(found, host=clean_name(found.host, "?"), lends=clean_text(found.lends))
        case InvitationAnswer(offer=Offer() as offer):
            offer = replace(
                offer,
                inviter=clean_name(offer.inviter, "?"),
                notes=[clean_text(note) for note in offer.notes[:NOTES_MAX]],
            )
            return replace(found, offer=offer, why=clean_text(found.why))
        case InvitationAnswer():
            return replace(found, why=clean_text(found.why))
        case _:
            return cleaned(found)
