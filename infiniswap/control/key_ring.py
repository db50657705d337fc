# SPDX-License-Identifier: Apache-2.0
"""The keys that a daemon accepts: those of the cluster secret and, while a cluster changes it, of a
second one. A reload changes them; open sessions go on."""

from __future__ import annotations

from collections.abc import Callable

from infiniswap.keys import Keys


class KeyRing:
    """One or two sets of keys.

    Args:
        first: of `cluster.secret_file`; None: the cluster has certificates, and no proof counts.
        second: of `cluster.second_secret_file`; None: there is none.
        clock: seconds, monotonic.

    Attributes:
        first, second: as they are now.
        second_uses: proofs under the second one that were right, since it is the second one.
        last_user: who made the last of these.
    """

    def __init__(self, first: Keys | None, second: Keys | None, clock: Callable[[], float]) -> None:
        self.first = first
        self.second = second
        self.second_uses = 0
        self.last_user = ""
        self._clock = clock
        self._since_s = clock()

    def accepted(self) -> tuple[Keys, ...]:
        """All of them, the first one first."""
        return tuple(keys for keys in (self.first, self.second) if keys is not None)

    def change(self, first: Keys | None, second: Keys | None) -> bool:
        """After a reload; returns whether anything has changed."""
        if (first, second) == (self.first, self.second):
            return False
        if second != self.second:
            self.second_uses, self.last_user, self._since_s = 0, "", self._clock()
        self.first, self.second = first, second
        return True

    def used(self, keys: Keys, who: str) -> None:
        """`who` has made a proof with these."""
        if keys is self.second:
            self.second_uses += 1
            self.last_user, self._since_s = who, self._clock()

    def second_idle_s(self) -> float | None:
        """Seconds since the last proof under the second secret or, where there was none, since it
        is the second one. None: there is no second one."""
        return None if self.second is None else max(0.0, self._clock() - self._since_s)

    def sentences(self) -> list[str]:
        """What an administrator should know of it."""
        idle_s = self.second_idle_s()
        if idle_s is None:
            return []
        said = "a second cluster secret is accepted (cluster.second_secret_file)"
        if not self.second_uses:
            return [f"{said}; nobody has used it in the last {_ago(idle_s)}"]
        return [f"{said}; {self.last_user} used it last, {_ago(idle_s)} ago"]


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
