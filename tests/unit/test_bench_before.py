# SPDX-License-Identifier: Apache-2.0
"""tools/bench: `make bench-before`, which runs a suite in two trees by turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from isw_bench import before, children
from isw_bench.before import Key, Pairs

STUB = """#!{python}
# Stands for an earlier tree's interpreter: tells who was called, and writes that tree's results.
import json, os, sys
from pathlib import Path
with open({log!r}, "a") as log:
    print({name!r}, os.environ.get("SEAL"), *sys.argv[3:-1], file=log)
Path(sys.argv[-1], "results.json").write_text(json.dumps({results!r}))
"""


def results(**values: float | None) -> dict[str, Any]:
    """A suite's results.json; names that end in `_s` are times, others rates."""
    figures = [
        {
            "name": name,
            "unit": "s" if name.endswith("_s") else "1/s",
            "better": "lower" if name.endswith("_s") else "higher",
            "ours": {"name": "fuse", "median": value},
        }
        for name, value in values.items()
    ]
    return {
        "versions": {"commit": "abc"},
        "comparisons": {"speed": {"figures": figures}, "left out": {"figures": []}},
    }


def test_a_ratio_below_one_is_a_gain_for_times_and_rates() -> None:
    found = before.paired(
        [results(read_s=2.0, reads=100), results(read_s=4.0, reads=10)],
        [results(read_s=1.0, reads=200), results(read_s=2.0, reads=20)],
    )
    assert [key.figure for key in found] == ["read_s", "reads"]
    assert [pairs.ratio.median for pairs in found.values()] == [0.5, 0.5]


def test_what_one_run_lacks_is_not_compared() -> None:
    whole = results(read_s=1.0, write_s=1.0)
    assert set(before.paired([whole], [results(read_s=1.0)])) == {Key("speed", "read_s", "fuse")}
    assert set(before.paired([whole], [results(read_s=1.0, write_s=None)])) == {
        Key("speed", "read_s", "fuse")
    }


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ([1.0, 1.0, 1.0], "pass"),
        ([1.02, 1.1, 1.1, 1.2, 1.03], "pass"),  # a quarter of the pairs are within the bound
        ([1.0, 1.1, 1.1, 1.2, 1.2], "worse"),
    ],
)
def test_the_lower_quartile_decides(now: list[float], verdict: str) -> None:
    assert Pairs("s", "lower", [1.0] * len(now), now).verdict == verdict


def stub_tree(path: Path, log: Path, **values: float) -> Path:
    python = path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    stub = STUB.format(
        python=sys.executable, log=str(log), name=path.name, results=results(**values)
    )
    python.write_text(stub)
    python.chmod(0o755)
    return path


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Which tree was run, with what; both trees are stubs."""
    path = tmp_path / "log"
    old = stub_tree(tmp_path / "before", path, read_s=1.0)
    monkeypatch.setattr(before, "check_out", lambda commit, into: old)
    monkeypatch.setattr(before, "ROOT", stub_tree(tmp_path / "now", path, read_s=1.2))
    return path


def test_each_tree_runs_its_own_benchmark_by_turns(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = [
        "--pairs",
        "3",
        "--now",
        "SEAL=false",
        "speed",
        "--seconds",
        "0.5",
        "--output",
        str(output),
    ]
    assert before.main(["v1", "frontends", *options]) == 1  # worse
    ran = [line.split() for line in log.read_text().splitlines()]
    assert [line[0] for line in ran] == ["before", "now", "now", "before", "before", "now"]
    expected = ["frontends", "speed", "--seconds", "0.5", "--rounds", "1", "--output"]
    assert all(line[2:] == expected for line in ran)
    assert {(line[0], line[1]) for line in ran} == {("before", "None"), ("now", "false")}
    (figure,) = json.loads((output / "results.json").read_text())["figures"]
    assert (figure["before"], figure["now"]) == ([1.0] * 3, [1.2] * 3)
    assert figure["ratio"]["count"] == 3


def test_a_tree_that_writes_no_results_ends_the_run(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before/.venv/bin/python").write_text("#!/bin/sh\nexit 1\n")
    assert before.main(["v1", "peers", "--output", str(tmp_path / "out")]) != 0
    assert "wrote no results" in capsys.readouterr().err


def test_programs_of_a_benchmark_get_the_settings_that_were_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And none of the host's own installation."""
    for name in ("INFINISWAP_DEVICE_SEAL", "INFINISWAP_DEVICE_STAGING"):
        monkeypatch.setenv(name, "of the host")
    _, _, kept, change, *_ = before._python(tmp_path, changes=["INFINISWAP_DEVICE_SEAL=false"])
    for text in (kept, change):
        name, _, value = text.partition("=")
        monkeypatch.setenv(name, value)
    found = children.environment("mark")
    assert found["INFINISWAP_DEVICE_SEAL"] == "false"
    assert "INFINISWAP_DEVICE_STAGING" not in found


def test_an_environment_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert before.main(["HEAD", "peers", "--now", "SEAL"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err


def test_an_unknown_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert before.main(["no-such-commit", "peers"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
