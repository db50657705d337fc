# SPDX-License-Identifier: Apache-2.0
"""Which cells a run measures, in which order, and how long the rest of them may take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

UNLIMITED = "no limit"
OURS, OURS_CLOUD = "infiniswap", "infiniswap + cloud volume"
OURS_PLAIN = "infiniswap, not sealed"
DISK, CLOUD = "disk", "cloud volume"
ZRAM, ZSWAP, OURS_ZSWAP = "zram", "zswap + disk", "infiniswap + zswap"
SPILL = "own spilling"
HUGE = "no limit, huge pages"
FAR, FAR_LOSSY = "far memory", "far memory, no backup"
FAR_KILLED = "far memory, device killed"
"""These four are rivals in the area `far` of `make bench` alone."""

ORDER = (OURS, OURS_PLAIN, OURS_ZSWAP, DISK, OURS_CLOUD, CLOUD, ZRAM, ZSWAP, SPILL)
"""Of the rivals in every round, those on the same disk side by side."""
RIVALS = tuple(name for name in ORDER if name != OURS_PLAIN)
"""Measured unless some are named."""
WHOLE = 100
"""As a share: all the memory that the job wants."""

OK, TIMEOUT, KILLED = "ok", "timeout", "killed for lack of memory"
FAILED, NO_ROOM, WRONG = "failed", "no room beside the pool", "wrong answer"
"""How a cell ended."""

_FIRST_GUESS_S = 45.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of one job.

    Attributes:
        job: its key.
        share: percent of the job's peak that it may have in memory.
        rival: where the rest goes.
        round: counted from 1.
    """

    job: str
    share: int
    rival: str
    round: int

    def __str__(self) -> str:
        where = self.rival if self.rival == UNLIMITED else f"{self.rival}, {self.share} %"
        return f"{self.job}, {where}, round {self.round}"


def cells_of_round(
    jobs: Iterable[str],
    shares: Sequence[int],
    rivals: Collection[str],
    spilling: Collection[str],
    number: int,
) -> list[Cell]:
    """One round: each job first without a limit, then with each rival in turn, share by share.

    Args:
        jobs: keys.
        shares: percent.
        rivals: those asked for.
        spilling: jobs that have a spilling of their own.
        number: of the round.
    """
    cells = []
    for job in jobs:
        cells.append(Cell(job, WHOLE, UNLIMITED, number))
        cells += [
            Cell(job, share, rival, number)
            for share in shares
            for rival in ORDER
            if rival in rivals and (rival != SPILL or job in spilling)
        ]
    return cells


def estimate_s(cell: Cell, took_s: Mapping[Cell, float]) -> float:
    """How long a cell may take: as long as the most similar ones that were measured.

    Args:
        cell: to come.
        took_s: wall time of measured cells, with their set-up.
    """
    for similar in (
        lambda other: (other.job, other.share, other.rival) == (cell.job, cell.share, cell.rival),
        lambda other: (other.job, other.share) == (cell.job, cell.share),
        lambda other: other.job == cell.job,
        lambda other: True,
    ):
        found = [seconds for other, seconds in took_s.items() if similar(other)]
        if found:
            return fmean(found)
    return _FIRST_GUESS_S


def left_s(cells: Iterable[Cell], took_s: Mapping[Cell, float]) -> float:
    """The time for the cells that were not measured yet."""
    return sum(estimate_s(cell, took_s) for cell in cells if cell not in took_s)


def fits_budget(cells: Collection[Cell], took_s: Mapping[Cell, float], budget_s: float) -> bool:
    """Whether another round may begin: it should end within the budget, of which the measured
    cells have used their part, in whichever invocation that was."""
    return sum(took_s.values()) + left_s(cells, took_s) <= budget_s
