# SPDX-License-Identifier: Apache-2.0
"""`python h2o_polars.py groupby|join DIRECTORY [--streaming]`: the questions of the db-benchmark in
polars.

Prints rows and column sums of each answer. Without --streaming the tables are read once and stay in
memory; with it, which is polars' own way to do with less memory, each question reads what it needs.
"""

import json
import sys
from pathlib import Path

import polars as pl
import polars.selectors as cs

STREAMING = "--streaming" in sys.argv


def read(path: Path) -> pl.LazyFrame:
    """A table."""
    return pl.scan_parquet(path) if STREAMING else pl.read_parquet(path).lazy()


def told(answer: pl.LazyFrame, *columns: str) -> list[float]:
    """Rows and sums of these columns, or of all with numbers. The whole answer is made, unless it
    is streamed."""
    chosen = pl.col(columns) if columns else cs.numeric()
    sums = (pl.len().alias("rows"), chosen.cast(pl.Float64).sum())
    if STREAMING:
        row = answer.select(sums).collect(engine="streaming").row(0)
    else:
        row = answer.collect().select(sums).row(0)
    return [float(value) for value in row]


def groupby(directory: Path) -> dict[str, list[float]]:
    """Questions 1 to 8 and 10, as for pandas."""
    x = read(directory / "groupby.parquet")
    v1, v2, v3 = pl.col("v1"), pl.col("v2"), pl.col("v3")
    every = [f"id{number}" for number in range(1, 7)]
    return {
        "q1": told(x.group_by("id1").agg(v1.sum())),
        "q2": told(x.group_by("id1", "id2").agg(v1.sum())),
        "q3": told(x.group_by("id3").agg(v1.sum(), v3.mean())),
        "q4": told(x.group_by("id4").agg(v1.mean(), v2.mean(), v3.mean())),
        "q5": told(x.group_by("id6").agg(v1.sum(), v2.sum(), v3.sum())),
        "q6": told(x.group_by("id4", "id5").agg(v3.median().alias("m"), v3.std().alias("sd"))),
        "q7": told(x.group_by("id3").agg((v1.max() - v2.min()).alias("range"))),
        "q8": told(x.group_by("id6").agg(v3.top_k(2)).explode("v3")),
        "q10": told(x.group_by(every).agg(v3.sum(), v1.len().alias("count"))),
    }


def join(directory: Path) -> dict[str, list[float]]:
    """Questions 1 to 5."""
    x, small, medium, big = (
        read(directory / f"{name}.parquet") for name in ("left", "small", "medium", "big")
    )
    return {
        "q1": told(x.join(small, on="id1"), "v1", "v2"),
        "q2": told(x.join(medium, on="id2"), "v1", "v2"),
        "q3": told(x.join(medium, how="left", on="id2"), "v1", "v2"),
        "q4": told(x.join(medium, on="id5"), "v1", "v2"),
        "q5": told(x.join(big, on="id3"), "v1", "v2"),
    }


if __name__ == "__main__":
    answers = {"groupby": groupby, "join": join}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"check": answers}))
