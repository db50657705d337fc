# SPDX-License-Identifier: Apache-2.0
"""A daemon that root has started by hand, without systemd.

It does first what takes root: it mounts the home of the slabs and leaves a process behind that can
unmount it. Then it gives its rights up, before it has a second thread. It stays root's process,
which may write root's files; docs/security.md, "Rights", says what that is worth.

The process that stays is a shell of 1 MB. It waits for one line, how long to keep the home for a
successor, and then becomes `infiniswap daemon --release`. If the daemon ends without that line
(kill -9), so does the shell, and the home stays as it is.
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
from infiniswap.errors import InfiniswapError
from infiniswap.system import programs
from infiniswap.system.bounded import give_up, raise_limits
from infiniswap.system.process import leave_no_core

_SCRIPT: Final = 'read -r after && exec "$@" "$after"'
"""The line comes last, where the command takes a number: a daemon that somebody else controls can
add no option."""
_PRIVILEGED_PORTS: Final = range(1, 1024)
_RELEASE_S_MAX: Final = 30.0


class Releaser:
    """A process with root's rights that gives a home back when it is told to, once.

    Args:
        path: of the home.

    Raises:
        InfiniswapError: it cannot be started.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = programs.start(
            ["sh", "-c", _SCRIPT, "sh", *home.release_command(path)],
            stdin=programs.PIPE,
            stderr=programs.DEVNULL,
            env=home.release_environment(path),
            what=f"nothing gives the memory in {path} back",
        )

    def release(self, after_s: float) -> None:
        """Gives the home back after this time, unless a successor has come. 0: waits for it."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            pipe.write(f"{after_s:g}\n".encode())
            pipe.close()
        if after_s == 0:
            with contextlib.suppress(programs.TimeoutExpired):
                self._process.wait(_RELEASE_S_MAX)

    def close(self) -> None:
        """At the end of a daemon, whatever ended it: nothing is left of a start that failed."""
        pipe = self._process.stdin
        assert pipe is not None
        if pipe.closed:
            return
        with contextlib.suppress(OSError):
            if not any(self._path.iterdir()):
                self.release(0)
        pipe.close()


@contextlib.contextmanager
def bounded(config: Config, memory: MemorySource) -> Iterator[home.Release | None]:
    """Gives up root's rights for good. Nothing happens for other users.

    Args:
        config: of the daemon.
        memory: figures.

    Yields:
        What gives the home back; None: the daemon does so itself, or there is none.

    Raises:
        InfiniswapError: the configuration cannot work, or rights cannot be given up.
    """
    if os.geteuid() != 0:
        yield None
        return
    releaser = _prepare(config, memory)
    try:
        leave_no_core()
        raise_limits()
        give_up(_kept(config))
        yield None if releaser is None else releaser.release
    finally:
        if releaser is not None:
            releaser.close()


def _prepare(config: Config, memory: MemorySource) -> Releaser | None:
    daemon = config.daemon
    if daemon.run_dir is None or not daemon.listen.port:
        return None
    limits = pool_limits(config, memory.read())
    path = daemon.run_dir / make_identity(daemon.name, daemon.listen).donor_id
    # Where it cannot be mounted the daemon finds that out, too, and says what it means.
    with contextlib.suppress(OSError, InfiniswapError):
        home.mount(path, limits.slabs_max * limits.slab_bytes)
        return Releaser(path)
    return None


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
