# SPDX-License-Identifier: Apache-2.0
"""`python tpch_polars.py DIRECTORY [--streaming]`: TPC-H queries in polars.

The same seven queries, parameters and columns as in tpch_sql.py, in polars' lazy API. Without
--streaming the tables are read once and stay in memory; with it, polars' own way to do with
less memory, each query reads what it needs. Prices are floating-point numbers.

Prints rows and column sums of each answer.
"""

import json
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import polars as pl
import polars.selectors as cs

STREAMING = "--streaming" in sys.argv
COLUMNS = json.loads(Path(__file__).with_name("tpch_tables.json").read_text())
"""That the queries read, by table."""

REVENUE = pl.col("l_extendedprice") * (1 - pl.col("l_discount"))

Tables = dict[str, pl.LazyFrame]


def read(directory: Path, name: str) -> pl.LazyFrame:
    """A table."""
    table = pl.scan_parquet(directory / f"{name}.parquet").select(COLUMNS[name])
    table = table.with_columns(cs.decimal().cast(pl.Float64))
    return table if STREAMING else table.collect().lazy()


def told(answer: pl.LazyFrame) -> list[float]:
    """How many, and sums of the columns with numbers."""
    found = answer.collect(engine="streaming" if STREAMING else "auto")
    if found.is_empty():
        return [0]
    sums = found.select(cs.numeric().cast(pl.Float64).sum()).row(0)
    return [found.height, *(float(total) for total in sums)]


def q1(t: Tables) -> pl.LazyFrame:
    """Pricing summary."""
    lines = t["lineitem"].filter(pl.col("l_shipdate") <= date(1998, 9, 2))
    return lines.group_by("l_returnflag", "l_linestatus").agg(
        pl.col("l_quantity").sum(),
        pl.col("l_extendedprice").sum(),
        REVENUE.sum().alias("price"),
        (REVENUE * (1 + pl.col("l_tax"))).sum().alias("charge"),
        pl.col("l_quantity").mean().alias("mean_quantity"),
        pl.col("l_extendedprice").mean().alias("mean_price"),
        pl.col("l_discount").mean().alias("mean_discount"),
        pl.len().alias("count"),
    )


def q3(t: Tables) -> pl.LazyFrame:
    """Shipping priority."""
    day = date(1995, 3, 15)
    customers = t["customer"].filter(pl.col("c_mktsegment") == "BUILDING")
    orders = t["orders"].filter(pl.col("o_orderdate") < day)
    lines = t["lineitem"].filter(pl.col("l_shipdate") > day)
    found = orders.join(customers, left_on="o_custkey", right_on="c_custkey")
    found = found.join(lines, left_on="o_orderkey", right_on="l_orderkey")
    found = found.group_by("o_orderkey", "o_orderdate", "o_shippriority").agg(
        REVENUE.sum().alias("revenue")
    )
    found = found.sort("revenue", "o_orderdate", descending=[True, False]).head(10)
    return found.select("o_orderkey", "revenue", "o_orderdate", "o_shippriority")


def q5(t: Tables) -> pl.LazyFrame:
    """Local suppliers' volume."""
    regions = t["region"].filter(pl.col("r_name") == "ASIA")
    nations = t["nation"].join(regions, left_on="n_regionkey", right_on="r_regionkey")
    day = pl.col("o_orderdate")
    orders = t["orders"].filter((day >= date(1994, 1, 1)) & (day < date(1995, 1, 1)))
    found = t["customer"].join(nations, left_on="c_nationkey", right_on="n_nationkey")
    found = found.join(orders, left_on="c_custkey", right_on="o_custkey")
    found = found.join(t["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
    found = found.join(
        t["supplier"],
        left_on=["l_suppkey", "c_nationkey"],
        right_on=["s_suppkey", "s_nationkey"],
    )
    return found.group_by("n_name").agg(REVENUE.sum().alias("revenue"))


def q9(t: Tables) -> pl.LazyFrame:
    """Profit by nation and year."""
    parts = t["part"].filter(pl.col("p_name").str.contains("green", literal=True))
    found = t["lineitem"].join(parts, left_on="l_partkey", right_on="p_partkey")
    found = found.join(
        t["partsupp"],
        left_on=["l_suppkey", "l_partkey"],
        right_on=["ps_suppkey", "ps_partkey"],
    )
    found = found.join(t["supplier"], left_on="l_suppkey", right_on="s_suppkey")
    found = found.join(t["nation"], left_on="s_nationkey", right_on="n_nationkey")
    found = found.join(t["orders"], left_on="l_orderkey", right_on="o_orderkey")
    profit = REVENUE - pl.col("ps_supplycost") * pl.col("l_quantity")
    year = pl.col("o_orderdate").dt.year().alias("o_year")
    return found.group_by("n_name", year).agg(profit.sum().alias("profit"))


def q13(t: Tables) -> pl.LazyFrame:
    """Customers by their number of orders."""
    orders = t["orders"].filter(~pl.col("o_comment").str.contains("special.*requests"))
    found = t["customer"].join(orders, how="left", left_on="c_custkey", right_on="o_custkey")
    counts = found.group_by("c_custkey").agg(pl.col("o_orderkey").count().alias("c_count"))
    return counts.group_by("c_count").agg(pl.len().alias("custdist"))


def q18(t: Tables) -> pl.LazyFrame:
    """Customers with large orders."""
    totals = t["lineitem"].group_by("l_orderkey").agg(pl.col("l_quantity").sum())
    large = totals.filter(pl.col("l_quantity") > 300)
    found = t["orders"].join(large, left_on="o_orderkey", right_on="l_orderkey")
    found = found.join(t["customer"], left_on="o_custkey", right_on="c_custkey")
    found = found.sort("o_totalprice", "o_orderdate", descending=[True, False]).head(100)
    return found.select(
        "c_name",
        pl.col("o_custkey").alias("c_custkey"),
        "o_orderkey",
        "o_orderdate",
        "o_totalprice",
        "l_quantity",
    )


def q21(t: Tables) -> pl.LazyFrame:
    """Suppliers that alone kept an order waiting."""
    lines = t["lineitem"]
    late = lines.filter(pl.col("l_receiptdate") > pl.col("l_commitdate"))
    count = pl.col("l_suppkey").n_unique().alias("suppliers")
    several = lines.group_by("l_orderkey").agg(count).filter(pl.col("suppliers") > 1)
    alone = late.group_by("l_orderkey").agg(count).filter(pl.col("suppliers") == 1)
    nations = t["nation"].filter(pl.col("n_name") == "SAUDI ARABIA")
    own = t["supplier"].join(nations, left_on="s_nationkey", right_on="n_nationkey")
    failed = t["orders"].filter(pl.col("o_orderstatus") == "F")
    found = late.join(several, on="l_orderkey", how="semi").join(alone, on="l_orderkey", how="semi")
    found = found.join(own, left_on="l_suppkey", right_on="s_suppkey")
    found = found.join(failed, left_on="l_orderkey", right_on="o_orderkey", how="semi")
    counts = found.group_by("s_name").agg(pl.len().alias("numwait"))
    return counts.sort("numwait", "s_name", descending=[True, False]).head(100)


QUERIES: dict[str, Callable[[Tables], pl.LazyFrame]] = {
    "q1": q1,
    "q3": q3,
    "q5": q5,
    "q9": q9,
    "q13": q13,
    "q18": q18,
    "q21": q21,
}


def main(directory: Path) -> dict[str, list[float]]:
    """Loads and asks."""
    tables = {name: read(directory, name) for name in COLUMNS}
    return {name: told(query(tables)) for name, query in QUERIES.items()}


if __name__ == "__main__":
    print(json.dumps({"check": main(Path(sys.argv[1]))}))
