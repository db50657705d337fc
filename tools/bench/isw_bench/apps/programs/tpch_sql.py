# SPDX-License-Identifier: Apache-2.0
"""`python tpch_sql.py duckdb|spark DIRECTORY ...`: TPC-H queries in DuckDB or Spark.

Loads the tables into memory, then runs queries 1, 3, 5, 9, 13, 18 and 21 of the specification with
its validation parameters.

    duckdb DIRECTORY [--memory SIZE WORK]
    spark DIRECTORY HEAP_MIB WORK

With --memory, DuckDB keeps within that size and writes the rest to WORK; SIZE may be `default`:
DuckDB's default, four fifths of the memory that it sees. Spark writes there what does
not fit into its heap.

Prints rows and column sums of each answer.
"""

import json
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

COLUMNS = json.loads(Path(__file__).with_name("tpch_tables.json").read_text())
"""That the queries read, by table."""

QUERIES = {
    "q1": """
        select l_returnflag, l_linestatus, sum(l_quantity), sum(l_extendedprice),
            sum(l_extendedprice * (1 - l_discount)),
            sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)),
            avg(cast(l_quantity as double)), avg(cast(l_extendedprice as double)),
            avg(cast(l_discount as double)), count(*)  -- Spark rounds a decimal average
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


Rows = list[tuple[object, ...]]
Ask = Callable[[str], Rows]


def told(rows: Rows) -> list[float]:
    """How many, and sums of the columns with numbers."""
    columns = zip(*rows, strict=True)
    sums = [
        float(sum(column))
        for column in columns
        if column and all(isinstance(value, int | float | Decimal) for value in column)
    ]
    return [len(rows), *sums]


def in_duckdb(directory: Path, memory: list[str]) -> Ask:
    """An in-memory database with the tables."""
    import duckdb

    database = duckdb.connect(":memory:")
    if memory:
        _, size, work = memory
        if size != "default":
            database.execute(f"set memory_limit = '{size}'")
        database.execute(f"set temp_directory = '{work}'")
    else:
        # By itself it would spill at four fifths of the cgroup's limit.
        database.execute("set memory_limit = '1TiB'")
    for table, columns in COLUMNS.items():
        file = directory / f"{table}.parquet"
        database.execute(f"create table {table} as select {', '.join(columns)} from '{file}'")
    return lambda query: database.execute(query).fetchall()


def in_spark(directory: Path, heap: list[str]) -> Ask:
    """A session in one Java process, with the tables cached."""
    from pyspark.sql import SparkSession

    heap_mib, work = heap
    settings = {
        "spark.driver.memory": f"{heap_mib}m",  # of a local session, all there is
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": work,
        "spark.sql.shuffle.partitions": "8",  # 200 by default, for clusters
        "spark.sql.warehouse.dir": f"{work}/warehouse",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[*]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    for table, columns in COLUMNS.items():
        frame = session.read.parquet(str(directory / f"{table}.parquet")).select(*columns)
        frame.createOrReplaceTempView(table)
        session.sql(f"cache table {table}")
    return lambda query: [tuple(row) for row in session.sql(query).collect()]


def main(engine: str, directory: str, *options: str) -> dict[str, list[float]]:
    """Loads and asks."""
    ask = {"duckdb": in_duckdb, "spark": in_spark}[engine](Path(directory), list(options))
    return {name: told(ask(query)) for name, query in QUERIES.items()}


if __name__ == "__main__":
    print(json.dumps({"check": main(*sys.argv[1:])}))
