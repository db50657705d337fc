# SPDX-License-Identifier: Apache-2.0
"""Findings about the broker: whether it can be reached, and the donors announced there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from infiniswap.cli.doctor.finding import Finding, degraded, good
from infiniswap.config import Config
from infiniswap.discovery import broker as mqtt
from infiniswap.discovery.announcement import REPEAT_S_UNKEPT
from infiniswap.discovery.find import Found
from infiniswap.discovery.rehearsal import rehearse
from infiniswap.documents import page
from infiniswap.donor.identity import make_identity
from infiniswap.errors import InfiniswapError
from infiniswap.keys import announcement_keys
from infiniswap.units import counted, format_size
from infiniswap.watch.data_port import accepts

_NAME: Final = "discovery"
_SHOWN_MAX: Final = 64

_MENDS: Final = {
    "junk": "see what writes there: mosquitto_sub -v -t 'infiniswap/#' (or its like)",
    "oversized": "see what writes there: mosquitto_sub -v -t 'infiniswap/#' (or its like)",
    "schema": "upgrade the older of the two hosts",
    "protocol": "upgrade the older of the two hosts",
    "cluster": "the same cluster.name on every host, or another broker",
    "proof": "copy the cluster secret to that host (cluster.secret_file), and restart its daemon",
    "loopback": "on that host: daemon.listen with its address, or mqtt.advertise",
    "bound": "see what writes there, or give each part of the hosts a cluster.name of its own",
}
"""By reason (infiniswap.discovery.announcement.REASONS)."""


def announced(config: Config, found: Found) -> Iterator[Finding]:
    """What the broker has, and what of it does not count."""
    place = mqtt.where(config.mqtt)
    if found.failure is not None:
        failure = found.failure
        what = f"{failure.where or place}: {failure.what}"
        yield degraded(_NAME, what, failure.mend or "see the broker's log")
    else:
        yield good(_NAME, f"{place}: {counted(len(found.announced), 'donor')} announced")
    for donor in found.announced[:_SHOWN_MAX]:
        yield good(
            _NAME,
            f"{', '.join(donor.addresses)} ({donor.name}): {' and '.join(donor.transports)}, slabs "
            f"of {format_size(donor.slab_bytes)}, release {donor.software}",
        )
    if len(found.announced) > _SHOWN_MAX:
        yield good(_NAME, f"and {len(found.announced) - _SHOWN_MAX} more")
    for note in found.notes:
        what, _, mend = note.partition(". ")
        yield degraded(_NAME, what, mend)
    for reason, count in sorted(found.ignored.items()):
        yield degraded(
            _NAME,
            f"{count} ignored, the last of them {found.complaints.get(reason, reason)}",
            _MENDS.get(reason, f"see {page('discovery.md')}"),
        )
    if config.mqtt.username and config.mqtt.tls == "off" and not _is_loopback(config):
        yield degraded(
            _NAME,
            f"{place}: the password travels in plain text",
            'tls = "on" and ca_file under [mqtt], and a port of the broker with TLS',
        )


def announcing(config: Config) -> Iterator[Finding]:
    """Whether the daemon of this host could announce itself, where its configuration lets it."""
    if config.daemon.listen.is_loopback and not _is_loopback(config):
        return  # it lends to this host alone
    donor_id = make_identity(config.daemon.name, config.daemon.listen).donor_id
    accepted = [] if (keys := config.keys()) is None else announcement_keys([keys])
    key = accepted[0] if accepted else None
    place = mqtt.where(config.mqtt)
    try:
        keeps = asyncio.run(rehearse(config.mqtt, config.cluster.name, donor_id, key))
    except InfiniswapError as error:
        yield _not_announced(config, error)
        return
    yield good(_NAME, f"{place}: the daemon of this host can announce itself there")
    if not keeps:
        yield degraded(
            _NAME,
            f"{place}: it keeps no retained messages, so donors repeat their announcements every "
            f"{REPEAT_S_UNKEPT:g} s, and commands listen for as long",
            "allow retained messages in the broker's configuration (Mosquitto: retain_available)",
        )


def _not_announced(config: Config, error: InfiniswapError) -> Finding:
    missing = error.missing if isinstance(error, mqtt.BrokerError) else ""
    place = error.where or mqtt.where(config.mqtt)
    if missing and not accepts(config.daemon.listen, config.cluster.ask_s):
        return good(
            _NAME,
            f"{place}: no daemon runs on this host; one would also need the right to {missing} "
            "infiniswap/#",
        )
    cannot = "see whether it is announced" if missing == "read" else "announce itself"
    what = f"{place}: the daemon of this host cannot {cannot}: {error.what}"
    return degraded(_NAME, what, error.mend or "see the broker's log")


def _is_loopback(config: Config) -> bool:
    return mqtt.address_of(config.mqtt).is_loopback
