# SPDX-License-Identifier: Apache-2.0
"""What the inviting host gives: read before the token is printed, so that a mistake is told to the
administrator there and costs no invitation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from infiniswap.config import Config, DeviceConfig
from infiniswap.control import pem
from infiniswap.control.roles import Role
from infiniswap.documents import page
from infiniswap.errors import ConfigError, DonorRefusedError, UsageError
from infiniswap.invitation.messages import Broker, InvitationRequest, Offer
from infiniswap.secret import read_password, read_public, secret_text
from infiniswap.units import HostPort, parse_host_port

if TYPE_CHECKING:
    from infiniswap.donor.authority import Pair, Period

SECRET: Final = "secret"
SESSION_KEY: Final = "session-key"
CERTIFICATE: Final = "certificate"


@dataclass(frozen=True, slots=True)
class Signing:
    """How a guest gets a certificate.

    Attributes:
        authority: signs.
        host: whom the certificate is for.
        roles: of that host.
        when: it counts.
    """

    authority: Pair = field(repr=False)
    host: str
    roles: tuple[Role, ...]
    when: Period


@dataclass(frozen=True, slots=True)
class Terms:
    """What every guest gets, and what depends on the guest.

    Attributes:
        offer: without the addresses of this host, and without a certificate.
        own: addresses of this host's daemon.
        signing: None: the cluster has a secret.
    """

    offer: Offer
    own: tuple[HostPort, ...]
    signing: Signing | None = None

    def offer_to(self, request: InvitationRequest, reached: str) -> Offer:
        """What a guest gets. Blocking, for a moment.

        Args:
            request: of the guest.
            reached: the address of this host at which it came.

        Raises:
            DonorRefusedError: its request for a certificate cannot be used.
        """
        # The address that has let the guest in is the one that surely leads here.
        own = sorted(self.own, key=lambda address: address.host != reached)[:1]
        found = replace(self.offer, peers=[*map(str, own), *self.offer.peers])
        broker = found.broker
        if broker is not None and parse_host_port(broker.address, 0).is_loopback:
            there = HostPort(reached, parse_host_port(broker.address, 0).port)
            found = replace(found, broker=replace(broker, address=str(there)))
        if request.preview:
            return _without_secrets(found)
        return found if self.signing is None else replace(found, certificate=self._signed(request))

    def _signed(self, request: InvitationRequest) -> str:
        from infiniswap.donor.authority import sign_request

        signing = self.signing
        assert signing is not None
        try:
            return sign_request(
                signing.authority,
                self.offer.cluster,
                signing.host,
                signing.roles,
                signing.when,
                request.csr.encode(),
            ).decode()
        except ValueError as error:
            raise DonorRefusedError(f"no certificate was made: {error}") from error


def _without_secrets(offer: Offer) -> Offer:
    broker = None if offer.broker is None else replace(offer.broker, password="")
    second = "" if not offer.second_secret else "?"
    return replace(offer, secret="", second_secret=second, broker=broker)


def terms(
    config: Config,
    path: Path,
    inviter: str,
    own: Sequence[HostPort],
    slab_bytes: int | None,
    *,
    session_key: bool = False,
    signing: Signing | None = None,
) -> Terms:
    """What this host gives. Blocking: it reads the files that the configuration names.

    Args:
        config: of this host.
        path: of its configuration file, for remedies.
        inviter: name of this host.
        own: addresses at which others reach this host's daemon.
        slab_bytes: of that daemon; None: as configured.
        session_key: give the session key in place of the secret.
        signing: where the cluster has certificates.

    Raises:
        ConfigError: this host is in no cluster, or a file cannot be used.
        UsageError: the arguments do not fit the cluster.
    """
    if slab_bytes is None:
        usual, daemon = DeviceConfig().slab_bytes, config.daemon.slab_bytes
        slab_bytes = config.device.slab_bytes if daemon == usual else daemon
    named = [str(peer) for peer in config.peers() if not peer.is_loopback and peer not in own]
    notes: list[str] = []
    broker = _broker(config, notes) if config.cluster.discovery == "mqtt" else None
    if broker is None and not named and not own:
        notes.append(
            f"{inviter} knows no donor: when there is one, name it under [cluster] peers on this "
            "host"
        )
    offer = Offer(
        inviter, config.cluster.name, SECRET, slab_bytes, named, broker=broker, notes=notes
    )
    if config.cluster.ca_file is not None:
        return _with_certificates(config, offer, own, signing, session_key=session_key)
    if signing is not None:
        raise UsageError("--authority needs a cluster with certificates, and this one has a secret")
    return Terms(_with_secret(config, path, offer, session_key=session_key), tuple(own))


def _with_secret(config: Config, path: Path, offer: Offer, *, session_key: bool) -> Offer:
    file = config.cluster.secret_file
    if file is None:
        raise ConfigError(
            "this host is in no cluster yet: it has no cluster secret to share",
            where="cluster.secret_file",
            mend=f"`infiniswap invite --new` makes one, in {path.with_name('secret')}, and a "
            "configuration that names it. If the cluster has a secret, name its file under "
            "[cluster] secret_file.",
        )
    keys, text = secret_text(file)
    second = ""
    if config.cluster.second_secret_file is not None:
        second_keys, second = secret_text(config.cluster.second_secret_file)
        second = second_keys.session_key_text() if session_key else second
    if session_key or keys.operator is None:
        # A host with a session key uses one at a time.
        return replace(offer, kind=SESSION_KEY, secret=keys.session_key_text())
    return replace(offer, secret=text, second_secret=second)


def _with_certificates(
    config: Config,
    offer: Offer,
    own: Sequence[HostPort],
    signing: Signing | None,
    *,
    session_key: bool,
) -> Terms:
    ca_file = config.cluster.ca_file
    assert ca_file is not None
    if session_key:
        raise UsageError("--session-key needs a cluster secret, and this cluster has certificates")
    if signing is None:
        raise UsageError(
            "this cluster has certificates, so an invitation needs the authority that signs for "
            "the new host",
            mend="On the host that keeps the authority, give --authority DIR, --host NAME and "
            "--role. With an authority of another kind, issue a certificate there and copy it as "
            f"{page('security.md')} says.",
        )
    trusted = read_public(ca_file, "certificate of the authority", "[cluster] ca_file")
    try:
        known = {pem.der(each) for each in pem.certificates(trusted)}
        signer = pem.der(pem.certificates(signing.authority.certificate)[0])
    except ValueError as error:
        raise ConfigError(
            f"a certificate of an authority cannot be used: {error}", where=str(ca_file)
        ) from None
    if signer not in known:
        raise UsageError(
            "the hosts of this cluster do not trust this authority",
            where="--authority",
            mend=f"Name the directory of an authority that {ca_file} has.",
        )
    authority = trusted.decode("ascii", errors="replace")
    return Terms(replace(offer, kind=CERTIFICATE, authority=authority), tuple(own), signing)


def _broker(config: Config, notes: list[str]) -> Broker:
    mqtt = config.mqtt
    assert mqtt.broker is not None
    password = "" if mqtt.password_file is None else read_password(mqtt.password_file)
    authority = b""
    if mqtt.ca_file is not None:
        authority = read_public(mqtt.ca_file, "certificate of the broker's authority", "[mqtt]")
    if mqtt.cert_file is not None:
        notes.append(
            "the broker asks for a certificate of each host: name this host's under [mqtt] "
            "cert_file and key_file"
        )
    return Broker(
        str(mqtt.broker),
        mqtt.protocol,
        mqtt.username,
        password,
        mqtt.tls,
        authority.decode("ascii", errors="replace"),
    )


def is_reachable(address: HostPort) -> bool:
    """Whether other hosts may reach it: no loopback address and no wildcard."""
    return not address.is_loopback and not address.is_wildcard
