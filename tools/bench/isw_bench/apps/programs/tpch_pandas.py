# SPDX-License-Identifier: Apache-2.0
"""`python tpch_pandas.py DIRECTORY`: TPC-H queries in pandas.

The same seven queries, parameters and columns as in tpch_sql.py. All tables stay in memory.
Prices are floating-point numbers: pandas has no decimal ones.

Prints rows and column sums of each answer.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = json.loads(Path(__file__).with_name("tpch_tables.json").read_text())
"""That the queries read, by table."""

Tables = dict[str, pd.DataFrame]


def read(directory: Path, name: str) -> pd.DataFrame:
    """A table."""
    table = pq.read_table(directory / f"{name}.parquet", columns=COLUMNS[name])
    fields = [
        pa.field(field.name, pa.float64()) if pa.types.is_decimal(field.type) else field
        for field in table.schema
    ]
    table = table.cast(pa.schema(fields))
    frame: pd.DataFrame = table.to_pandas(
        date_as_object=False, split_blocks=True, self_destruct=True
    )
    return frame


def told(answer: pd.DataFrame) -> list[float]:
    """How many, and sums of the columns with numbers."""
    if answer.empty:
        return [0]
    return [len(answer), *(float(total) for total in answer.sum(numeric_only=True))]


def revenue(frame: pd.DataFrame) -> pd.Series:
    """What a line of an order brings in."""
    return frame["l_extendedprice"] * (1 - frame["l_discount"])


def q1(t: Tables) -> pd.DataFrame:
    """Pricing summary."""
    lines = t["lineitem"]
    lines = lines[lines["l_shipdate"] <= pd.Timestamp("1998-09-02")]
    price = revenue(lines)
    lines = lines.assign(price=price, charge=price * (1 + lines["l_tax"]))
    groups = lines.groupby(["l_returnflag", "l_linestatus"], as_index=False)
    return groups.agg(
        quantity=("l_quantity", "sum"),
        base=("l_extendedprice", "sum"),
        price=("price", "sum"),
        charge=("charge", "sum"),
        mean_quantity=("l_quantity", "mean"),
        mean_price=("l_extendedprice", "mean"),
        mean_discount=("l_discount", "mean"),
        count=("l_quantity", "size"),
    )


def q3(t: Tables) -> pd.DataFrame:
    """Shipping priority."""
    day = pd.Timestamp("1995-03-15")
    customers = t["customer"][t["customer"]["c_mktsegment"] == "BUILDING"]
    orders = t["orders"][t["orders"]["o_orderdate"] < day]
    lines = t["lineitem"][t["lineitem"]["l_shipdate"] > day]
    found = orders.merge(customers, left_on="o_custkey", right_on="c_custkey")
    found = found.merge(lines, left_on="o_orderkey", right_on="l_orderkey")
    found = found.assign(revenue=revenue(found))
    keys = ["l_orderkey", "o_orderdate", "o_shippriority"]
    found = found.groupby(keys, as_index=False)["revenue"].sum()
    found = found.sort_values(["revenue", "o_orderdate"], ascending=[False, True]).head(10)
    return found[["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]]


def q5(t: Tables) -> pd.DataFrame:
    """Local suppliers' volume."""
    regions = t["region"][t["region"]["r_name"] == "ASIA"]
    nations = t["nation"].merge(regions, left_on="n_regionkey", right_on="r_regionkey")
    date = t["orders"]["o_orderdate"]
    orders = t["orders"][(date >= pd.Timestamp("1994-01-01")) & (date < pd.Timestamp("1995-01-01"))]
    found = t["customer"].merge(nations, left_on="c_nationkey", right_on="n_nationkey")
    found = found.merge(orders, left_on="c_custkey", right_on="o_custkey")
    found = found.merge(t["lineitem"], left_on="o_orderkey", right_on="l_orderkey")
    found = found.merge(
        t["supplier"],
        left_on=["l_suppkey", "c_nationkey"],
        right_on=["s_suppkey", "s_nationkey"],
    )
    found = found.assign(revenue=revenue(found))
    return found.groupby("n_name", as_index=False)["revenue"].sum()


def q9(t: Tables) -> pd.DataFrame:
    """Profit by nation and year."""
    parts = t["part"][t["part"]["p_name"].str.contains("green", regex=False)]
    found = t["lineitem"].merge(parts, left_on="l_partkey", right_on="p_partkey")
    found = found.merge(
        t["partsupp"],
        left_on=["l_suppkey", "l_partkey"],
        right_on=["ps_suppkey", "ps_partkey"],
    )
    found = found.merge(t["supplier"], left_on="l_suppkey", right_on="s_suppkey")
    found = found.merge(t["nation"], left_on="s_nationkey", right_on="n_nationkey")
    orders = t["orders"][["o_orderkey", "o_orderdate"]]
    found = found.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    profit = revenue(found) - found["ps_supplycost"] * found["l_quantity"]
    found = found.assign(o_year=found["o_orderdate"].dt.year, profit=profit)
    return found.groupby(["n_name", "o_year"], as_index=False)["profit"].sum()


def q13(t: Tables) -> pd.DataFrame:
    """Customers by their number of orders."""
    special = t["orders"]["o_comment"].str.contains("special.*requests", regex=True)
    orders = t["orders"].loc[~special, ["o_orderkey", "o_custkey"]]
    customers = t["customer"][["c_custkey"]]
    found = customers.merge(orders, how="left", left_on="c_custkey", right_on="o_custkey")
    counts = found.groupby("c_custkey", as_index=False).agg(c_count=("o_orderkey", "count"))
    return counts.groupby("c_count", as_index=False).agg(custdist=("c_custkey", "size"))


def q18(t: Tables) -> pd.DataFrame:
    """Customers with large orders."""
    totals = t["lineitem"].groupby("l_orderkey", as_index=False)["l_quantity"].sum()
    large = totals[totals["l_quantity"] > 300]
    found = t["orders"].merge(large, left_on="o_orderkey", right_on="l_orderkey")
    found = found.merge(t["customer"], left_on="o_custkey", right_on="c_custkey")
    order = ["o_totalprice", "o_orderdate"]
    found = found.sort_values(order, ascending=[False, True]).head(100)
    columns = ["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "l_quantity"]
    return found[columns]


def q21(t: Tables) -> pd.DataFrame:
    """Suppliers that alone kept an order waiting."""
    lines = t["lineitem"][["l_orderkey", "l_suppkey"]]
    late = lines[t["lineitem"]["l_receiptdate"] > t["lineitem"]["l_commitdate"]]
    suppliers = lines.drop_duplicates().groupby("l_orderkey").size()
    late_suppliers = late.drop_duplicates().groupby("l_orderkey").size()
    several = suppliers[suppliers > 1].index
    alone = late_suppliers[late_suppliers == 1].index
    nations = t["nation"][t["nation"]["n_name"] == "SAUDI ARABIA"]
    own = t["supplier"].merge(nations, left_on="s_nationkey", right_on="n_nationkey")
    failed = t["orders"].loc[t["orders"]["o_orderstatus"] == "F", ["o_orderkey"]]
    found = late[late["l_orderkey"].isin(several) & late["l_orderkey"].isin(alone)]
    found = found.merge(own, left_on="l_suppkey", right_on="s_suppkey")
    found = found.merge(failed, left_on="l_orderkey", right_on="o_orderkey")
    counts = found.groupby("s_name", as_index=False).agg(numwait=("l_orderkey", "size"))
    return counts.sort_values(["numwait", "s_name"], ascending=[False, True]).head(100)


QUERIES: dict[str, Callable[[Tables], pd.DataFrame]] = {
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
