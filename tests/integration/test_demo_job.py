# SPDX-License-Identifier: Apache-2.0
"""The demo's data and job, at a hundredth of the size."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from infiniswap.demo import children, data, legs

pd = pytest.importorskip("pandas", reason="needs the demo extra (pandas)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs the demo extra (pyarrow)")
if data.generator() is None:
    pytest.skip("needs the demo extra (tpchgen-cli)", allow_module_level=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tpch") / "data"
    data.generate(made, "0.01")
    return made


def run_job(source: Path, target: Path) -> None:
    command = [sys.executable, str(legs.JOB), str(source), str(target)]
    subprocess.run(command, check=True, env=children.environment(), timeout=240)


def test_the_generator_makes_a_complete_data_set(source: Path) -> None:
    assert data.is_complete(source)


def test_the_job_is_deterministic(source: Path, tmp_path: Path) -> None:
    run_job(source, tmp_path / "one")
    run_job(source, tmp_path / "two")
    first = legs.digests(tmp_path / "one")
    assert set(first) == {"customers.parquet", "lines.parquet", "monthly.parquet"}
    assert legs.digests(tmp_path / "two") == first


def test_the_job_joins_sorts_and_groups(source: Path, tmp_path: Path) -> None:
    run_job(source, tmp_path / "out")
    lines = pd.read_parquet(tmp_path / "out/lines.parquet")
    monthly = pd.read_parquet(tmp_path / "out/monthly.parquet")
    customers = pd.read_parquet(tmp_path / "out/customers.parquet")
    given = pq.read_table(source / "lineitem.parquet", columns=["l_quantity"])
    assert len(lines) == given.num_rows
    assert monthly["quantity"].sum() == float(sum(given["l_quantity"].to_pylist()))
    assert lines["o_custkey"].is_monotonic_increasing
    assert customers["spent"].is_monotonic_decreasing
    assert customers["lines"].sum() == len(lines)
    assert customers["spent"].sum() == pytest.approx(lines["charge"].sum())


def test_the_job_knows_nothing_of_infiniswap() -> None:
    tree = ast.parse(legs.JOB.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or ".").partition(".")[0])
    assert names == {"pandas", "pathlib", "pyarrow", "sys"}


def test_a_failed_generator_is_told_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infiniswap.errors import SystemCallError

    broken = tmp_path / "tpchgen-cli"
    broken.write_text("#!/bin/sh\necho no room >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr(data, "generator", lambda: str(broken))
    with pytest.raises(SystemCallError, match="exit code 4; it last said: no room"):
        data.generate(tmp_path / "data", "0.01")


def test_kept_data_is_whole(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = data.keep(source, "0.01")
    assert kept == data.cache_dir("0.01")
    assert legs.digests(kept) == legs.digests(source)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
