# SPDX-License-Identifier: Apache-2.0
"""`python tpch_duckdb.py DIRECTORY [--memory SIZE DIRECTORY]`: TPC-H queries in DuckDB.

Loads the tables into an in-memory database, then runs queries 1, 3, 5, 9, 13, 18 and 21 of the
specification with its validation parameters. With --memory DuckDB keeps within that size by itself
and writes the rest to the second directory.

Prints rows and column sums of each answer.
"""

import json
import sys
from decimal import Decimal
from pathlib import Path

import duckdb

COLUMNS = json.loads(Path(__file__).with_name("tpch_tables.json").read_text())
"""That the queries read, by table."""

QUERIES = {
    "q1": """
        select l_returnflag, l_linestatus, sum(l_quantity), sum(l_extendedprice),
            sum(l_extendedprice * (1 - l_discount)),
            sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)),
            avg(l_quantity), avg(l_extendedprice), avg(l_discount), count(*)
        from lineitem where l_shipdate <= date '1998-12-01' - interval 90 day
        group by all order by all""",
    "q3": """
        select l_orderkey, sum(l_extendedprice * (1 - l_discount)) as revenue, o_orderdate,
            o_shippriority
        from customer, orders, lineitem
        where c_mktsegment = 'BUILDING' and c_custkey = o_custkey and l_orderkey = o_orderkey
            and o_orderdate < date '1995-03-15' and l_shipdate > date '1995-03-15'
        group by l_orderkey, o_orderdate, o_shippriority
        order by revenue desc, o_orderdate limit 10""",
    "q5": """
        select n_name, sum(l_extendedprice * (1 - l_discount)) as revenue
        from customer, orders, lineitem, supplier, nation, region
        where c_custkey = o_custkey and l_orderkey = o_orderkey and l_suppkey = s_suppkey
            and c_nationkey = s_nationkey and s_nationkey = n_nationkey
            and n_regionkey = r_regionkey and r_name = 'ASIA'
            and o_orderdate >= date '1994-01-01' and o_orderdate < date '1995-01-01'
        group by n_name order by revenue desc""",
    "q9": """
        select n_name, extract(year from o_orderdate) as o_year,
            sum(l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity)
        from part, supplier, lineitem, partsupp, orders, nation
        where s_suppkey = l_suppkey and ps_suppkey = l_suppkey and ps_partkey = l_partkey
            and p_partkey = l_partkey and o_orderkey = l_orderkey and s_nationkey = n_nationkey
            and p_name like '%green%'
        group by n_name, o_year order by n_name, o_year desc""",
    "q13": """
        select c_count, count(*) as custdist
        from (select c_custkey, count(o_orderkey) as c_count
            from customer left outer join orders
                on c_custkey = o_custkey and o_comment not like '%special%requests%'
            group by c_custkey)
        group by c_count order by custdist desc, c_count desc""",
    "q18": """
        select c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity)
        from customer, orders, lineitem
        where o_orderkey in (select l_orderkey from lineitem group by l_orderkey
                having sum(l_quantity) > 300)
            and c_custkey = o_custkey and o_orderkey = l_orderkey
        group by c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice
        order by o_totalprice desc, o_orderdate limit 100""",
    "q21": """
        select s_name, count(*) as numwait
        from supplier, lineitem l1, orders, nation
        where s_suppkey = l1.l_suppkey and o_orderkey = l1.l_orderkey and o_orderstatus = 'F'
            and l1.l_receiptdate > l1.l_commitdate
            and exists (select * from lineitem l2 where l2.l_orderkey = l1.l_orderkey
                and l2.l_suppkey <> l1.l_suppkey)
            and not exists (select * from lineitem l3 where l3.l_orderkey = l1.l_orderkey
                and l3.l_suppkey <> l1.l_suppkey and l3.l_receiptdate > l3.l_commitdate)
            and s_nationkey = n_nationkey and n_name = 'SAUDI ARABIA'
        group by s_name order by numwait desc, s_name limit 100""",
}


def told(rows: list[tuple[object, ...]]) -> list[float]:
    """How many, and sums of the columns with numbers."""
    columns = zip(*rows, strict=True)
    sums = [
        float(sum(column))
        for column in columns
        if column and all(isinstance(value, int | float | Decimal) for value in column)
    ]
    return [len(rows), *sums]


def main(directory: Path, memory: list[str]) -> dict[str, list[float]]:
    """Loads and asks."""
    database = duckdb.connect(":memory:")
    if memory:
        size, temporary = memory
        database.execute(f"set memory_limit = '{size}'")
        database.execute(f"set temp_directory = '{temporary}'")
    else:
        # By itself it would spill at four fifths of the cgroup's limit.
        database.execute("set memory_limit = '1TiB'")
    for table, columns in COLUMNS.items():
        file = directory / f"{table}.parquet"
        database.execute(f"create table {table} as select {', '.join(columns)} from '{file}'")
    return {name: told(database.execute(query).fetchall()) for name, query in QUERIES.items()}


if __name__ == "__main__":
    limit = sys.argv[3:] if "--memory" in sys.argv else []
    print(json.dumps({"check": main(Path(sys.argv[1]), limit)}))
