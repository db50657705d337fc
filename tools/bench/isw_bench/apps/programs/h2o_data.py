# SPDX-License-Identifier: Apache-2.0
"""`python h2o_data.py groupby|join DIRECTORY ROWS`: inputs in the form of the db-benchmark.

The tables of H2O.ai's, now DuckDB Labs', "Database-like ops benchmark" (G1_1e7_1e2_0_0 and
J1_1e7_NA_0_0 for ten million rows), drawn by numpy from a fixed seed, in Parquet. Of the tables to
join, the column id6 is left out: as many strings as rows, in no question.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEED = 108
GROUPS = 100
CHUNK_ROWS = 1_000_000
UNMATCHED = 0.1
"""Part of the keys on either side of a join that the other side lacks."""


def names(pattern: str, codes: np.ndarray, count: int) -> pa.DictionaryArray:
    """Codes from 1 to `count` as strings."""
    words = pa.array([pattern % number for number in range(1, count + 1)])
    return pa.DictionaryArray.from_arrays(pa.array((codes - 1).astype(np.int32)), words)


def groupby(directory: Path, rows: int) -> None:
    """The table to group."""
    rng = np.random.default_rng(SEED)
    many = max(1, rows // GROUPS)

    def draw(count: int) -> np.ndarray:
        drawn: np.ndarray = rng.integers(1, count, rows, endpoint=True, dtype=np.int32)
        return drawn

    table = pa.table(
        {
            "id1": names("id%03d", draw(GROUPS), GROUPS),
            "id2": names("id%03d", draw(GROUPS), GROUPS),
            "id3": names("id%010d", draw(many), many),
            "id4": draw(GROUPS),
            "id5": draw(GROUPS),
            "id6": draw(many),
            "v1": draw(5),
            "v2": draw(15),
            "v3": np.round(rng.uniform(0, 100, rows), 6),
        }
    )
    pq.write_table(table, directory / "groupby.parquet", row_group_size=CHUNK_ROWS)


def join(directory: Path, rows: int) -> None:
    """The left table and three right ones: small, medium, big."""
    rng = np.random.default_rng(SEED)
    counts = {"id1": max(10, rows // 1_000_000), "id2": max(100, rows // 1000), "id3": rows}
    keys = {}  # of the left and of the right side
    for name, count in counts.items():
        shifted = int(count * UNMATCHED)
        every = rng.permutation(count + shifted).astype(np.int32) + 1
        keys[name] = every[:count], every[shifted:]

    def pick(name: str, side: int, size: int) -> np.ndarray:
        every = keys[name][side]
        found: np.ndarray = rng.choice(every, size, replace=size != len(every))
        return found

    def columns(side: int, size: int, *chosen: str) -> dict[str, object]:
        picked = {name: pick(name, side, size) for name in chosen}
        found: dict[str, object] = dict(picked)
        for name, other in (("id1", "id4"), ("id2", "id5")):
            if name in picked:
                total = counts[name] + int(counts[name] * UNMATCHED)
                found[other] = names("id%d", picked[name], total)
        return found

    for file, side, size, chosen, value in (
        ("left", 0, rows, ("id1", "id2", "id3"), "v1"),
        ("small", 1, counts["id1"], ("id1",), "v2"),
        ("medium", 1, counts["id2"], ("id1", "id2"), "v2"),
        ("big", 1, rows, ("id1", "id2", "id3"), "v2"),
    ):
        made = columns(side, size, *chosen)
        made[value] = np.round(rng.uniform(0, 100, size), 6)
        pq.write_table(pa.table(made), directory / f"{file}.parquet", row_group_size=CHUNK_ROWS)


if __name__ == "__main__":
    {"groupby": groupby, "join": join}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
