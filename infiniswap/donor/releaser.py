# SPDX-License-Identifier: Apache-2.0
"""A process that gives the home of a daemon's slabs back after the daemon's end, however it ended.

It is a shell of 1 MB that waits for one line: how long to keep the home for a successor. Then it
becomes `infiniswap daemon --release`. If the daemon ends without that line (kill -9, the kernel's
kill for lack of memory), the time is `daemon.lease_grace_s`. It has the rights that the daemon had
at its start: root's home is unmounted, that of another user is emptied.

A signal that ends the daemon may reach this process too (`pkill -f "infiniswap daemon"`, the end of
a session), so it ignores the usual ones. It ends by itself after the grace period.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

from infiniswap.system import programs

log = logging.getLogger(__name__)

_SCRIPT: Final = (
    'trap "" HUP INT TERM; grace=$1; shift; read -r after || after=$grace; exec "$@" "$after"'
)
"""The time comes last, where the command takes a number: a daemon that somebody else controls can
add no option."""
_NO_FILE: Final = "/dev/null"
_RELEASE_S_MAX: Final = 30.0


class Releaser:
    """Gives a home back, once.

    Args:
        path: of the home.
        grace_s: how long to keep it after a daemon that could not say so.
        headroom_bytes: of the daemon; where half of it is gone, the home is given back at once.
        cgroup: whose memory that is; None: the host's.

    Raises:
        InfiniswapError: it cannot be started.
    """

    def __init__(
        self, path: Path, grace_s: float, headroom_bytes: int, cgroup: Path | None
    ) -> None:
        self._path = path
        command = [
            *programs.infiniswap("daemon", "--release", "--donor", path.name),
            *("--config", _NO_FILE),  # the host's file may be wrong by then
            *("--headroom", str(headroom_bytes)),
            *(() if cgroup is None else ("--memory-cgroup", str(cgroup))),
            "--after",
        ]
        # Not the daemon's settings: another file could name another directory.
        run_dir = {"INFINISWAP_DAEMON_RUN_DIR": str(path.parent)}
        self._process = programs.start(
            ["sh", "-c", _SCRIPT, "sh", f"{grace_s:g}", *command],
            stdin=programs.PIPE,
            stderr=programs.DEVNULL,
            env=programs.environment(run_dir, settings=False),
            what=f"nothing gives the memory in {path} back",
        )

    def release(self, after_s: float) -> None:
        """Gives the home back after this time, unless a successor has come. 0: waits for it, and
        logs a failure."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            pipe.write(f"{after_s:g}\n".encode())
            pipe.close()
        if after_s == 0 and not self._has_released():
            log.error(
                "the tmpfs of the slabs stays mounted at %s; give it back with `infiniswap daemon "
                "--release`",
                self._path,
            )

    def _has_released(self) -> bool:
        with contextlib.suppress(programs.TimeoutExpired):
            return self._process.wait(_RELEASE_S_MAX) == 0
        return False

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
