# SPDX-License-Identifier: Apache-2.0
"""`python pagerank.py DIRECTORY`: PageRank by power iteration on scipy's sparse matrix.

Twenty steps with damping 0.85 (Page, Brin, Motwani, Winograd, 1999); vertices without an edge out
share their rank with all. Prints sums over the ranks.
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import sparse

DAMPING = 0.85
STEPS = 20


def main(directory: Path) -> dict[str, float]:
    """Reads the edges, builds the matrix, iterates."""
    source = np.load(directory / "source.npy")
    target = np.load(directory / "target.npy")
    count = int(max(source.max(), target.max())) + 1
    matrix = sparse.csr_matrix(
        (np.ones(len(source)), (target, source)), shape=(count, count), dtype=np.float64
    )
    del source, target
    degrees = np.asarray(matrix.sum(axis=0)).ravel()
    dangling = degrees == 0
    shares = np.divide(1.0, degrees, where=~dangling, out=np.zeros(count))
    ranks = np.full(count, 1.0 / count)
    for _ in range(STEPS):
        lost = ranks[dangling].sum() / count
        ranks = DAMPING * (matrix @ (ranks * shares) + lost) + (1 - DAMPING) / count
    return {
        "vertices": count,
        "edges": int(matrix.nnz),
        "sum": float(ranks.sum()),
        "squares": float(ranks @ ranks),
        "largest": float(ranks.max()),
        "weighted": float(ranks @ np.arange(count)),
    }


if __name__ == "__main__":
    print(json.dumps({"check": main(Path(sys.argv[1]))}))
