# SPDX-License-Identifier: Apache-2.0
"""Findings about the donors that are configured or announced, and the secret shared with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from infiniswap.cli.config import addresses
from infiniswap.cli.doctor import broker, data_port
from infiniswap.cli.doctor.finding import Finding, degraded, good
from infiniswap.config import Config
from infiniswap.control.explain import NO_ANSWER
from infiniswap.discovery.find import find
from infiniswap.secret import CertificateFiles, check_listen_secret
from infiniswap.units import format_size, format_size_short
from infiniswap.watch.asking import AskedDonor, ask, local_donor
from infiniswap.watch.data_port import accepts


def secret(config: Config) -> Iterator[Finding]:
    """Whether a daemon could serve other hosts. Raises what is wrong with it."""
    check_listen_secret(config.daemon.listen, config.cluster.trust_file)
    files = config.certificates()
    if files is not None:
        yield from _certificate(files, config.cluster.name)
        return
    found = config.keys()
    if found is None or config.cluster.secret_file is None:
        yield good("secret", "none; none is needed, because the daemon serves this host alone")
    elif found.operator is None:
        yield good("secret", f"{config.cluster.secret_file}: a session key, which drains no donor")
    else:
        yield good("secret", f"{config.cluster.secret_file}: 256 bits, for root alone")


def listening(config: Config) -> Iterator[Finding]:
    """Whether the addresses in the configuration are this host's, and others reach them."""
    wrong = list(addresses.problems(config))
    for error in wrong:
        what = f"{error.where}: {error.what}" if error.where else error.what
        yield degraded("listen", what, error.mend)
    if not wrong:
        listen = config.daemon.listen
        whom = "this host alone" if listen.is_loopback else "other hosts"
        yield good("listen", f"{listen} (daemon.listen), for {whom}")


def _certificate(files: CertificateFiles, cluster: str) -> Iterator[Finding]:
    from infiniswap.control.dated import day
    from infiniswap.control.pki import check_date, load

    found = load(files, cluster)
    check_date(found)
    now_s = time.time()
    warnings = found.warnings(now_s)
    for each in warnings:
        yield degraded("secret", each.warning(now_s), each.mend)
    if not warnings:
        until = day(found.until_s)
        yield good("secret", f"none: {files.certificate} ({found.shown}), good until {until}")


def donors(config: Config, *, speed: bool = False) -> Iterator[Finding]:
    """Every donor that is named or announced, and whether pages get there and back.

    Args:
        config: names the donors.
        speed: whether to measure the bandwidth to each.
    """
    found = find(config)
    peers = found.addresses
    if config.cluster.discovery == "mqtt":
        yield from broker.announced(config, found)
        if found.failure is None:
            yield from broker.announcing(config)
    if not peers:
        yield degraded(
            "donors",
            "none is configured, and none was announced",
            "infiniswap doctor --donors HOST[:PORT],... (for good: `peers` under [cluster])",
        )
        return
    from infiniswap.control.access import client_config

    client = client_config(config, config.cluster.ask_s)
    rows = asyncio.run(ask(peers, client, local_donor(config)))
    for row in rows:
        yield from _donor(config, row)
    answering = [row.address for row in rows if row.status is not None]
    if client.keys is not None or client.credentials is not None:
        yield from data_port.data_ports(answering, client, speed=speed)


def _donor(config: Config, row: AskedDonor) -> Iterator[Finding]:
    if row.status is None:
        failure = row.failure
        what, mend = (failure.what, failure.mend) if failure else (row.error, "")
        if what.startswith(NO_ANSWER) and accepts(row.address, config.cluster.ask_s):
            what += (
                ", although it accepts connections: its daemon is busy or stopped, or something in "
                "between drops large packets"
            )
            mend = (
                f"see the daemon's log on {row.address.host}; give both hosts, and every switch "
                "and tunnel in between, one MTU: `ip link set INTERFACE mtu 1500`"
            )
        yield degraded(
            "donors", f"{row.address}: {what}", mend or f"see the daemon's log on {row.address}"
        )
        return
    status, pool = row.status, row.status.pool
    slab_bytes = status.slab_bytes
    text = (
        f"{row.address} ({status.donor_name}): can lend "
        f"{format_size_short(pool.can_map * slab_bytes)}"
    )
    if slab_bytes != config.device.slab_bytes:
        size = format_size(slab_bytes)
        yield degraded(
            "donors",
            f"{text}, in slabs of {size}; devices here have slabs of "
            f"{format_size(config.device.slab_bytes)}, so it refuses them",
            f'slab = "{size}" under [device] (or --slab {size}); the same in the whole cluster',
        )
    elif status.draining:
        yield degraded(
            "donors", f"{text}; it is {row.state}", f"name another donor, or wait for {row.address}"
        )
    elif not pool.can_map:
        yield degraded(
            "donors",
            f"{text}: it {status.no_room}"
            if status.no_room
            else f"{text}: its pool is lent, or its host needs the memory itself",
            "raise --pool or lower --headroom there, or name more donors",
        )
    else:
        yield good("donors", text)
    if pool.slabs_unpinned:
        yield degraded(
            "donors",
            f"{row.address}: {pool.slabs_unpinned} of its slabs are not locked in memory: that "
            "host may swap them out",
            "there: LimitMEMLOCK=infinity in the daemon's unit (or ulimit -l unlimited), then "
            "restart it",
        )
