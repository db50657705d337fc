# SPDX-License-Identifier: Apache-2.0
"""What only this host shows of the addresses in a configuration, and of what has to match them."""

from __future__ import annotations

from collections.abc import Iterator

from infiniswap.config import Config
from infiniswap.control.listening import check_is_here, check_reach
from infiniswap.errors import ConfigError
from infiniswap.units import format_size


def problems(config: Config) -> Iterator[ConfigError]:
    """Addresses that cannot be listened on or reached, and slabs that no device here could use."""
    for key, address in (
        ("daemon.listen", config.daemon.listen),
        ("device.metrics_listen", config.device.metrics_listen),
    ):
        if address is None:
            continue
        try:
            check_reach(address, key)
            check_is_here(address, key)
        except ConfigError as error:
            yield error
    lent, used = config.daemon.slab_bytes, config.device.slab_bytes
    if lent != used:
        yield ConfigError(
            f"daemon.slab ({format_size(lent)}) and device.slab ({format_size(used)}) differ: "
            "devices refuse donors with slabs of another size",
            mend="Set both to one size, the same on every host of the cluster.",
        )
