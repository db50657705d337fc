# SPDX-License-Identifier: Apache-2.0
"""The best possible placement of the slabs that devices want, by an integer program (scipy's
HiGHS): the highest used share of a host is as low as it can be.

All slabs are placed; no device has two at one donor, if there are enough donors; none is on its own
host; no donor lends more than its pool or less memory than its headroom leaves.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from infiniswap.errors import DeadlineError, UnavailableError
from infiniswap.simulation.load import install
from infiniswap.simulation.world import World

VARIABLES_MAX: Final = 100_000
"""More than this no solver proves in an acceptable time."""


class Best(Struct, frozen=True):
    """What the program found.

    Attributes:
        max_share: highest used share of its placement.
        bound: no placement has a lower one.
        ours: that of the simulated run.
        own: what the busiest host uses for itself.
        slabs: how many were placed.
    """

    max_share: float
    bound: float
    ours: float
    own: float
    slabs: int

    @property
    def distance(self) -> float:
        """How far above the optimum we are, as a part of it."""
        return self.ours / self.max_share - 1.0


def best(world: World, limit_s: float) -> Best:
    """Solves the program for the end of a run.

    Raises:
        UnavailableError: scipy is not installed, or there are too many variables.
        DeadlineError: the solver found no placement in its time, or there is none.
    """
    np, optimize, sparse = _packages()
    donors = [donor for donor in world.donors if donor.is_alive]
    wanted = [(device, sum(device.donors.values())) for device in world.devices()]
    wanted = [(device, slabs) for device, slabs in wanted if slabs]
    count = len(wanted) * len(donors)
    if count > VARIABLES_MAX:
        raise UnavailableError(
            f"{len(wanted)} devices on {len(donors)} donors are too many for the integer program",
            where="optimum",
            mend=f"Make the scenario smaller, to at most {VARIABLES_MAX} pairs, or remove "
            "[optimum].",
        )
    slab_bytes = donors[0].policy.config.slab_bytes
    upper = np.ones(count + 1)
    rows: list[tuple[dict[int, float], float, float]] = []
    for place, (device, slabs) in enumerate(wanted):
        base = place * len(donors)
        others = sum(donor.number != device.host for donor in donors)
        for at, donor in enumerate(donors):
            allowed = 0 if donor.number == device.host else -(-slabs // max(1, others))
            upper[base + at] = allowed
        rows.append(({base + at: 1.0 for at in range(len(donors))}, slabs, slabs))
    for at, donor in enumerate(donors):
        own = donor.own_bytes / donor.total_bytes
        part = slab_bytes / donor.total_bytes
        mine = range(at, count, len(donors))
        rows.append(({**dict.fromkeys(mine, part), count: -1.0}, -np.inf, -own))
        config = donor.policy.config
        free_bytes = donor.total_bytes - config.headroom_bytes - donor.own_bytes
        room = max(donor.pool.mapped, min(config.slabs_max, free_bytes // slab_bytes))
        rows.append((dict.fromkeys(mine, 1.0), 0, room))
    solution = _solve(np, optimize, sparse, rows, upper, limit_s)
    own_max = max(donor.own_bytes / donor.total_bytes for donor in donors)
    return Best(
        max_share=float(solution.x[-1]),
        bound=float(solution.mip_dual_bound),
        ours=max(world.shares()["slabs"]),
        own=own_max,
        slabs=sum(slabs for _, slabs in wanted),
    )


def _solve(
    np: Any,
    optimize: Any,
    sparse: Any,
    rows: list[tuple[dict[int, float], float, float]],
    upper: Any,
    limit_s: float,
) -> Any:
    """Minimises the last variable; the others are whole numbers."""
    at: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for place, (row, _, _) in enumerate(rows):
        at += [place] * len(row)
        columns += row.keys()
        values += row.values()
    matrix = sparse.csr_array((values, (at, columns)), shape=(len(rows), len(upper)))
    cost, integral = np.zeros(len(upper)), np.ones(len(upper))
    cost[-1], integral[-1] = 1.0, 0.0
    solution = optimize.milp(
        cost,
        integrality=integral,
        bounds=optimize.Bounds(np.zeros(len(upper)), upper),
        constraints=optimize.LinearConstraint(
            matrix, [low for _, low, _ in rows], [high for _, _, high in rows]
        ),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-3},
    )
    if solution.x is None:
        raise DeadlineError(
            f"the integer program has no solution: {solution.message}",
            where="optimum",
            mend="Raise optimum.limit_s, or place fewer slabs.",
        )
    return solution


def _packages() -> tuple[Any, Any, Any]:
    try:
        import numpy
        from scipy import optimize, sparse
    except ImportError as error:
        raise UnavailableError(
            f"[optimum] needs numpy and scipy: {error}", where="optimum", mend=install()
        ) from error
    return numpy, optimize, sparse
