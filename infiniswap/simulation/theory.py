# SPDX-License-Identifier: Apache-2.0
"""Closed forms that simulations are compared with."""

from __future__ import annotations

from math import comb

_STEPS = 20_000


def all_light(slabs: int, busy: int, evict: int, extra: int) -> float:
    """Chance that batch eviction takes lightly active slabs only.

    Of E + E' slabs that are drawn without replacement at least E have to be light: the sum over
    i >= E of C(G, i) C(B, E + E' - i) / C(N, E + E'), with G light ones and B busy ones of N.

    Args:
        slabs: N.
        busy: B.
        evict: E.
        extra: E'.
    """
    light, drawn = slabs - busy, min(slabs, evict + extra)
    ways = sum(comb(light, i) * comb(busy, drawn - i) for i in range(evict, drawn + 1))
    return ways / comb(slabs, drawn)


def all_light_limit(busy_share: float, evict: int, extra: int) -> float:
    """The same for very many slabs: the paper's binomial distribution (section 4.3)."""
    drawn, light = evict + extra, 1.0 - busy_share
    return sum(
        comb(drawn, i) * light**i * busy_share ** (drawn - i) for i in range(evict, drawn + 1)
    )


def two_choices(levels: int, balls_per_bin: float = 1.0, choices: int = 2) -> list[float]:
    """Fraction of bins with at least 1, 2, ... balls, for very many bins.

    Each ball goes to the least loaded of `choices` random bins: s_i' = s_(i-1)^d - s_i^d
    (Mitzenmacher: The power of two choices in randomized load balancing, 1996). With one ball a bin
    and two choices the first fraction is tanh(1) = 0.7616.

    Args:
        levels: how many fractions.
        balls_per_bin: balls divided by bins.
        choices: d.
    """
    fractions = [1.0, *([0.0] * levels)]
    step = balls_per_bin / _STEPS

    def slope(s: list[float]) -> list[float]:
        return [0.0, *(s[i - 1] ** choices - s[i] ** choices for i in range(1, levels + 1))]

    def ahead(s: list[float], k: list[float], part: float) -> list[float]:
        return [a + b * part for a, b in zip(s, k, strict=True)]

    for _ in range(_STEPS):  # Runge and Kutta's second-order method, at the middle of each step
        middle = slope(ahead(fractions, slope(fractions), step / 2.0))
        fractions = ahead(fractions, middle, step)
    return fractions[1:]
