# SPDX-License-Identifier: Apache-2.0
"""A process that uses its memory in all ways that bring blocks back, or mislead who guesses them.

Run as a script: python mixed_job.py MIB SEED TURNS. Each turn takes one way: in order, block by
block, in a part of it, at random; some pages are written in each. Temporary memory comes and goes
meanwhile, and now and then a child goes through all of it, too. Its last line is the number of
pages that were wrong, in itself and in its children.
"""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections.abc import Callable, Iterable

_BLOCK_PAGES = 512
_TURN_PAGES = 50_000


class Memory:
    """Whose every page says which it is, and how often it was written."""

    def __init__(self, mib: int) -> None:
        self._bytes = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages = (mib << 20) // mmap.PAGESIZE
        self._written = [0] * self.pages
        self.wrong = 0
        for page in range(self.pages):
            self.write(page)

    def _is(self, page: int) -> bytes:
        return page.to_bytes(8, "little") + self._written[page].to_bytes(8, "little")

    def write(self, page: int) -> None:
        self._written[page] += 1
        at = page * mmap.PAGESIZE
        self._bytes[at : at + 16] = self._is(page)

    def check(self, page: int) -> None:
        at = page * mmap.PAGESIZE
        self.wrong += self._bytes[at : at + 16] != self._is(page)

    def check_all(self) -> None:
        for page in range(self.pages):
            self.check(page)

    def use(self, pages: Iterable[int], written: float, chance: random.Random) -> None:
        for page in pages:
            self.check(page)
            if chance.random() < written:
                self.write(page)


def in_order(pages: int, chance: random.Random) -> Iterable[int]:
    first = chance.randrange(pages)
    return ((first + n) % pages for n in range(_TURN_PAGES))


def block_by_block(pages: int, chance: random.Random) -> Iterable[int]:
    for _ in range(_TURN_PAGES // _BLOCK_PAGES):
        first = chance.randrange(pages // _BLOCK_PAGES) * _BLOCK_PAGES
        yield from (first + n for n in chance.sample(range(_BLOCK_PAGES), _BLOCK_PAGES))


def in_a_part(pages: int, chance: random.Random) -> Iterable[int]:
    first, size = chance.randrange(pages), chance.randrange(_BLOCK_PAGES, pages // 3)
    return ((first + chance.randrange(size)) % pages for _ in range(_TURN_PAGES))


def at_random(pages: int, chance: random.Random) -> Iterable[int]:
    return (chance.randrange(pages) for _ in range(_TURN_PAGES // 5))


_WAYS: tuple[Callable[[int, random.Random], Iterable[int]], ...]
_WAYS = (in_order, block_by_block, in_a_part, at_random)


def hold_for_a_while(mib: int) -> None:
    with mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1


def beside_a_child(memory: Memory, turn: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        memory.check_all()
        os._exit(min(memory.wrong, 255))
    turn()
    memory.wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def main(mib: int, seed: int, turns: int) -> None:
    chance, memory = random.Random(seed), Memory(mib)

    def turn() -> None:
        way, written = chance.choice(_WAYS), chance.choice((0.0, 0.2))
        memory.use(way(memory.pages, chance), written, chance)

    for number in range(1, turns + 1):
        if number % 5:
            turn()
        else:
            beside_a_child(memory, turn)
        hold_for_a_while(chance.randrange(4, mib // 8))
    memory.check_all()
    print(memory.wrong, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
