# SPDX-License-Identifier: Apache-2.0
"""`python rmat.py DIRECTORY SCALE`: a scale-free graph of 2^SCALE vertices, sixteen edges each.

A recursive matrix with the parameters of Graph500 (a = 0.57, b = c = 0.19): Chakrabarti, Zhan,
Faloutsos, "R-MAT: a recursive model for graph mining", 2004. Vertices are numbered at random, from
a fixed seed. Writes the edges' ends as two arrays of int32.
"""

import sys
from pathlib import Path

import numpy as np

SEED = 21
EDGES_PER_VERTEX = 16
A, B, C = 0.57, 0.19, 0.19
CHUNK = 1 << 22


def main(directory: Path, scale: int) -> None:
    """Draws the edges."""
    rng = np.random.default_rng(SEED)
    names = rng.permutation(1 << scale).astype(np.int32)
    count = EDGES_PER_VERTEX << scale
    ends = {
        name: np.lib.format.open_memmap(
            directory / f"{name}.npy", mode="w+", dtype=np.int32, shape=(count,)
        )
        for name in ("source", "target")
    }
    for begin in range(0, count, CHUNK):
        size = min(CHUNK, count - begin)
        source: np.ndarray = np.zeros(size, np.int32)
        target: np.ndarray = np.zeros(size, np.int32)
        for _ in range(scale):
            drawn = rng.random(size, dtype=np.float32)
            source = source * 2 + (drawn >= A + B)
            target = target * 2 + (((drawn >= A) & (drawn < A + B)) | (drawn >= A + B + C))
        ends["source"][begin : begin + size] = names[source]
        ends["target"][begin : begin + size] = names[target]
    for array in ends.values():
        array.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
