# SPDX-License-Identifier: Apache-2.0
"""The demo's job: prepares TPC-H order lines for analysis, as any such pandas script does.

It knows nothing of Infiniswap and of memory limits: `python job.py INPUT OUTPUT` reads Parquet
files, joins, sorts, groups and writes Parquet. Its output depends on nothing but its input.
"""

import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq


def read(path: Path, columns: list[str]) -> pd.DataFrame:
    """Columns of a table, with the types that pandas computes with natively."""
    table = pq.read_table(path, columns=columns, use_threads=False)
    for index, field in enumerate(table.schema):
        column = table.column(index)
        if pa.types.is_decimal(field.type):
            column = column.cast(pa.float64())
        elif pa.types.is_string_view(field.type):
            column = column.cast(pa.string()).dictionary_encode()
        elif pa.types.is_date(field.type):
            column = column.cast(pa.timestamp("s"))
        table = table.set_column(index, field.name, column)
    frame: pd.DataFrame = table.to_pandas(use_threads=False)
    return frame


def main(source: Path, target: Path) -> None:
    """Reads from one directory, writes to another."""
    lines = read(
        source / "lineitem.parquet",
        [
            "l_orderkey",
            "l_linenumber",
            "l_quantity",
            "l_extendedprice",
            "l_discount",
            "l_tax",
            "l_shipdate",
            "l_shipmode",
        ],
    )
    orders = read(
        source / "orders.parquet", ["o_orderkey", "o_custkey", "o_orderdate", "o_orderpriority"]
    )
    customers = read(
        source / "customer.parquet", ["c_custkey", "c_nationkey", "c_acctbal", "c_mktsegment"]
    )

    # Join: every order line with its order and its customer.
    lines = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    lines = lines.merge(customers, left_on="o_custkey", right_on="c_custkey")
    lines = lines.drop(columns=["o_orderkey", "c_custkey"])

    # Sort: each customer's lines in the order of their shipping.
    lines = lines.sort_values(
        ["o_custkey", "l_shipdate", "l_orderkey", "l_linenumber"], ignore_index=True
    )
    lines["revenue"] = lines["l_extendedprice"] * (1 - lines["l_discount"])
    lines["charge"] = lines["revenue"] * (1 + lines["l_tax"])
    lines["days"] = (lines["l_shipdate"] - lines["o_orderdate"]).dt.days
    lines["spent"] = lines.groupby("o_custkey")["charge"].cumsum()

    # Group: what was shipped how, for whom, month by month; and each customer's totals.
    month = lines["l_shipdate"].dt.to_period("M").dt.to_timestamp()
    monthly = (
        lines.assign(month=month)
        .groupby(["month", "c_nationkey", "c_mktsegment", "l_shipmode"], observed=True)
        .agg(
            quantity=("l_quantity", "sum"),
            revenue=("revenue", "sum"),
            days=("days", "mean"),
            orders=("l_orderkey", "nunique"),
        )
        .reset_index()
    )
    totals = (
        lines.groupby("o_custkey")
        .agg(
            lines=("l_linenumber", "size"),
            spent=("spent", "last"),
            largest=("charge", "max"),
            first=("l_shipdate", "min"),
            last=("l_shipdate", "max"),
        )
        .sort_values(["spent", "first"], ascending=False)
        .reset_index()
    )

    target.mkdir(exist_ok=True)
    monthly.to_parquet(target / "monthly.parquet")
    totals.to_parquet(target / "customers.parquet")
    lines[["o_custkey", "l_orderkey", "l_linenumber", "charge", "spent"]].to_parquet(
        target / "lines.parquet", row_group_size=250_000
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
