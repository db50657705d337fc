# SPDX-License-Identifier: Apache-2.0
"""`python numpy_statistics.py MIB`: statistics of a matrix of that size in numpy.

Fills it with random numbers, then standardizes its columns in place, computes their covariance and
the largest values of each.

Prints sums of each.
"""

import json
import sys

import numpy as np

COLUMNS = 64
_ROWS_AT_ONCE = 1 << 16
_LARGEST = 10


def main(mib: int) -> dict[str, list[float]]:
    """Makes the matrix and looks at it."""
    rows = (mib << 20) // (COLUMNS * 8)
    matrix = np.empty((rows, COLUMNS))
    numbers = np.random.default_rng(7)
    for first in range(0, rows, _ROWS_AT_ONCE):
        part = matrix[first : first + _ROWS_AT_ONCE]
        numbers.standard_normal(out=part)
        part += np.arange(COLUMNS)
    means = matrix.mean(axis=0)
    matrix -= means
    spreads = np.sqrt(np.einsum("ij,ij->j", matrix, matrix) / rows)
    matrix /= spreads
    covariance = matrix.T @ matrix / rows
    largest = [float(np.partition(matrix[:, at], -_LARGEST)[-_LARGEST:].sum()) for at in (0, 1)]
    return {
        "means": [float(means.sum())],
        "spreads": [float(spreads.sum())],
        "covariance": [float(np.abs(covariance).sum()), float(np.trace(covariance))],
        "largest": largest,
    }


if __name__ == "__main__":
    print(json.dumps({"check": main(int(sys.argv[1]))}))
