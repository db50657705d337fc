# SPDX-License-Identifier: Apache-2.0
"""TPC-H in four engines: every program of `make bench-apps` gives the same answers."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from isw_bench.apps.cell import agrees
from isw_bench.apps.jobs import JOBS, TINY, python

from infiniswap.demo import data

QUERIES = ["q1", "q3", "q5", "q9", "q13", "q18", "q21"]
RUN_S = 120.0
HEAP_MIB = 1024


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = data.generator()
    if generator is None:
        pytest.skip("needs tpchgen-cli")
    directory = tmp_path_factory.mktemp("tpch")
    scale = f"{JOBS['duckdb-tpch'].sizes[TINY]:g}"
    argv = [generator, "parquet", "--quiet", "--scale-factor", scale]
    subprocess.run([*argv, "--output-dir", str(directory)], check=True, timeout=RUN_S)
    return directory


def answers(program: str, *args: object) -> dict[str, Any]:
    done = subprocess.run(
        python(program, *args), stdout=subprocess.PIPE, check=True, timeout=RUN_S, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)["check"]
    return found


@pytest.fixture(scope="module")
def wanted(tables: Path) -> dict[str, Any]:
    if importlib.util.find_spec("duckdb") is None:
        pytest.skip("needs duckdb, of the extra bench-apps")
    found = answers("tpch_sql.py", "duckdb", tables)
    assert list(found) == QUERIES
    assert all(answer[0] > 0 for answer in found.values())
    return found


@pytest.mark.parametrize(
    ("library", "options"), [("pandas", []), ("polars", []), ("polars", ["--streaming"])]
)
def test_data_frames_answer_as_duckdb_does(
    tables: Path, wanted: dict[str, Any], library: str, options: list[str]
) -> None:
    for module in JOBS[f"{library}-tpch"].modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    found = answers(f"tpch_{library}.py", tables, *options)
    assert list(found) == QUERIES
    for query in QUERIES:
        assert agrees(found[query], wanted[query]), (query, found[query], wanted[query])


def test_spark_answers_as_duckdb_does(tables: Path, wanted: dict[str, Any], tmp_path: Path) -> None:
    if importlib.util.find_spec("pyspark") is None or shutil.which("java") is None:
        pytest.skip("needs pyspark, of the extra bench-spark, and Java")
    found = answers("tpch_sql.py", "spark", tables, HEAP_MIB, tmp_path)
    for query in QUERIES:
        assert agrees(found[query], wanted[query]), (query, found[query], wanted[query])
