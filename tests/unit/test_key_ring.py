# SPDX-License-Identifier: Apache-2.0
"""Two secrets at once, and what is told of the second one's use."""

from __future__ import annotations

from infiniswap.control.key_ring import KeyRing
from infiniswap.keys import Keys, announcement_keys, derive

OLD, NEW = derive(b"o" * 32), derive(b"n" * 32)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_use_of_the_second_secret_is_told() -> None:
    clock = Clock()
    ring = KeyRing(OLD, None, clock)
    assert ring.accepted() == (OLD,)
    assert (ring.second_idle_s(), ring.sentences()) == (None, [])
    assert ring.change(NEW, OLD)
    assert ring.accepted() == (NEW, OLD)
    clock.now_s += 90
    assert ring.second_idle_s() == 90
    assert "nobody has used it in the last 90 s" in ring.sentences()[0]
    ring.used(OLD, "device swap0 on c1")
    clock.now_s += 600
    ring.used(NEW, "device swap1 on c1")
    assert ring.second_idle_s() == 600
    assert "device swap0 on c1 used it last, 10 min ago" in ring.sentences()[0]
    # A reload that changes nothing forgets nothing.
    assert not ring.change(derive(b"n" * 32), derive(b"o" * 32))
    assert ring.second_uses == 1
    assert ring.change(NEW, None)
    assert (ring.accepted(), ring.second_idle_s(), ring.sentences()) == ((NEW,), None, [])
    assert ring.change(NEW, OLD)
    assert ring.second_uses == 0


def test_the_first_secret_that_becomes_the_second_begins_unused() -> None:
    clock = Clock()
    ring = KeyRing(OLD, NEW, clock)
    ring.used(NEW, "x")
    ring.change(NEW, OLD)
    assert ring.second_uses == 0


def test_which_keys_check_announcements() -> None:
    session = Keys(OLD.session)
    assert announcement_keys([]) == ()
    assert announcement_keys([OLD]) == (OLD.announcement,)
    assert announcement_keys([NEW, OLD]) == (NEW.announcement, OLD.announcement)
    assert announcement_keys([NEW, session]) == (NEW.announcement,)
    # A session key alone checks none, as before.
    assert announcement_keys([session, OLD]) == ()
