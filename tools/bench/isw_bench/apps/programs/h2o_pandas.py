# SPDX-License-Identifier: Apache-2.0
"""`python h2o_pandas.py groupby|join DIRECTORY`: the questions of the db-benchmark in pandas.

Prints rows and column sums of each answer. The tables stay in memory throughout, as they do in the
db-benchmark and in anybody's notebook.
"""

import json
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq


def read(path: Path) -> pd.DataFrame:
    """A table; its strings as categories."""
    frame: pd.DataFrame = pq.read_table(path).to_pandas(split_blocks=True, self_destruct=True)
    return frame


def told(answer: pd.DataFrame) -> list[float]:
    """Rows and sums of the columns with numbers."""
    return [len(answer), *(float(total) for total in answer.sum(numeric_only=True))]


def groupby(directory: Path) -> dict[str, list[float]]:
    """Questions 1 to 8 and 10. Question 9, a regression for each of ten thousand groups, is a loop
    in Python rather than work on memory."""
    x = read(directory / "groupby.parquet")

    def by(*keys: str) -> "pd.api.typing.DataFrameGroupBy":
        return x.groupby(list(keys), as_index=False, sort=False, observed=True, dropna=False)

    found = {
        "q1": told(by("id1").agg({"v1": "sum"})),
        "q2": told(by("id1", "id2").agg({"v1": "sum"})),
        "q3": told(by("id3").agg({"v1": "sum", "v3": "mean"})),
        "q4": told(by("id4").agg({"v1": "mean", "v2": "mean", "v3": "mean"})),
        "q5": told(by("id6").agg({"v1": "sum", "v2": "sum", "v3": "sum"})),
        "q6": told(by("id4", "id5").agg(median=("v3", "median"), sd=("v3", "std"))),
    }
    spans = by("id3").agg({"v1": "max", "v2": "min"})
    found["q7"] = told(spans.assign(range=spans["v1"] - spans["v2"])[["id3", "range"]])
    largest = x[["id6", "v3"]].sort_values("v3", ascending=False)
    largest = largest.groupby("id6", as_index=False, sort=False).head(2)
    found["q8"] = told(largest)
    del largest
    keys = [f"id{number}" for number in range(1, 7)]
    found["q10"] = told(by(*keys).agg(v3=("v3", "sum"), count=("v1", "size")))
    return found


def join(directory: Path) -> dict[str, list[float]]:
    """Questions 1 to 5."""
    x, small, medium, big = (
        read(directory / f"{name}.parquet") for name in ("left", "small", "medium", "big")
    )
    sums = ["v1", "v2"]
    return {
        "q1": told(x.merge(small, on="id1")[sums]),
        "q2": told(x.merge(medium, on="id2")[sums]),
        "q3": told(x.merge(medium, how="left", on="id2")[sums]),
        "q4": told(x.merge(medium, on="id5")[sums]),
        "q5": told(x.merge(big, on="id3")[sums]),
    }


if __name__ == "__main__":
    answers = {"groupby": groupby, "join": join}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"check": answers}))
