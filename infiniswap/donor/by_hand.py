# SPDX-License-Identifier: Apache-2.0
"""What a daemon does before it has a second thread.

It starts what gives its slabs back after its end (infiniswap.donor.releaser). One that root has
started by hand, without systemd, first does what takes root: it mounts the home of the slabs, and
then gives its rights up. It stays root's process, which may write root's files; docs/security.md,
"Rights", says what that is worth.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from infiniswap import rights
from infiniswap.config import Config
from infiniswap.donor import home
from infiniswap.donor.identity import make_identity
from infiniswap.donor.memory import MemorySource
from infiniswap.donor.pool_limits import pool_limits
from infiniswap.donor.releaser import Releaser
from infiniswap.errors import InfiniswapError
from infiniswap.system.bounded import give_up
from infiniswap.system.process import leave_no_core

_PRIVILEGED_PORTS: Final = range(1, 1024)


@contextlib.contextmanager
def bounded(
    config: Config, memory: MemorySource, cgroup: Path | None
) -> Iterator[home.Release | None]:
    """Gives up root's rights for good; other users have none to give up.

    Args:
        config: of the daemon.
        memory: figures.
        cgroup: whose memory they are; None: the host's.

    Yields:
        What gives the home back; None: there is none.

    Raises:
        InfiniswapError: the configuration cannot work, or rights cannot be given up.
    """
    releaser = _prepare(config, memory, cgroup)
    try:
        if os.geteuid() == 0:
            leave_no_core()
            give_up(_kept(config))
        yield None if releaser is None else releaser.release
    finally:
        if releaser is not None:
            releaser.close()


def _prepare(config: Config, memory: MemorySource, cgroup: Path | None) -> Releaser | None:
    daemon = config.daemon
    if daemon.run_dir is None or not daemon.listen.port:
        return None
    path = daemon.run_dir / make_identity(daemon.name, daemon.listen).donor_id
    # Where it cannot be mounted the daemon finds that out, too, and says what it means.
    with contextlib.suppress(OSError, InfiniswapError):
        limits = pool_limits(config, memory.read())
        is_root = os.geteuid() == 0
        if not is_root and home.own_mount(path) is None:  # root has prepared none
            return None
        # Before the mount: a signal between the two would leave it.
        releaser = Releaser(path, daemon.lease_grace_s, limits.headroom_bytes, cgroup)
        if is_root:
            _mount(path, limits.slabs_max * limits.slab_bytes, releaser)
        return releaser
    return None


def _mount(path: Path, pool_bytes: int, releaser: Releaser) -> None:
    try:
        home.mount(path, pool_bytes)
    except BaseException:
        releaser.close()
        raise


def _kept(config: Config) -> tuple[str, ...]:
    """DAC_READ_SEARCH: settings, secrets and this program may lie in the home directory of the user
    who called sudo."""
    ports = (config.daemon.listen.port, config.daemon.data_port)
    return (
        "CAP_DAC_READ_SEARCH",
        *(("CAP_NET_BIND_SERVICE",) if any(port in _PRIVILEGED_PORTS for port in ports) else ()),
        # Only CAP_SYS_RESOURCE may raise the limit on locked memory.
        *(() if rights.has("CAP_SYS_RESOURCE") else ("CAP_IPC_LOCK",)),
    )
