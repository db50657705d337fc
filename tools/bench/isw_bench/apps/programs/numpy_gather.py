# SPDX-License-Identifier: Apache-2.0
"""`python numpy_gather.py MIB`: an array of that size, read in order, then gathered from at random.

Prints sums.
"""

import json
import sys

import numpy as np
from numpy.typing import NDArray

_PASSES = 6
_GATHERS = 40
_GATHERED = 10_000


def main(mib: int) -> dict[str, int]:
    """Makes the array and reads it."""
    array: NDArray[np.int64] = np.arange((mib << 20) // 8, dtype=np.int64)
    in_order = 0
    for number in range(_PASSES):
        in_order += int(array[number:].sum())
    numbers = np.random.default_rng(7)
    gathered = sum(
        int(array[numbers.integers(0, len(array), _GATHERED)].sum()) for _ in range(_GATHERS)
    )
    return {"in_order": in_order, "gathered": gathered}


if __name__ == "__main__":
    print(json.dumps({"check": main(int(sys.argv[1]))}))
