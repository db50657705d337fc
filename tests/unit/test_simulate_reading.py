# SPDX-License-Identifier: Apache-2.0
"""Scenario files and traces: what is read, and that each mistake names file, line and remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from infiniswap.config import key_name
from infiniswap.errors import ConfigError, NotFoundError
from infiniswap.simulation import reading
from infiniswap.simulation.load import host_load
from infiniswap.simulation.scenario import CONFIG_KEYS, LISTS, SECTIONS
from infiniswap.simulation.trace import read_trace
from infiniswap.units import GIB, parse_size

SCENARIO = """\
title = "mine"
[cluster]
hosts = 3
memory = "16G"

[[jobs]]
count = 2
[[jobs]]
working_set = "4G"
curve = [[0, 0.5], [60, 1.0]]
[policy]
choices = 4
"""
TRACE = """\
time_s,host,used_share
100,a,0.5
100,b,0.25
160,a,0.75
160,b,0.25
"""


def written(directory: Path, text: str, name: str = "mine.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_a_scenario_is_read(tmp_path: Path) -> None:
    found = reading.read(written(tmp_path, SCENARIO))
    assert (found.title, found.cluster.hosts, found.cluster.memory_bytes) == ("mine", 3, 16 * GIB)
    assert [job.count for job in found.jobs] == [2, 1]
    assert found.jobs[1].curve == ((0.0, 0.5), (60.0, 1.0))
    assert found.config.policy.choices == 4


@pytest.mark.parametrize(
    ("line", "text", "what", "mend"),
    [
        (4, 'memery = "16G"', "unknown key 'memery'", "key is memory"),
        (4, 'memory = "-1G"', "memory", ""),
        (4, "memory = -5", "out of range", "at least"),
        (4, "memory = nan", "not a size", ""),
        (3, 'hosts = "3"', "not a number", "without quotes"),
        (3, "hosts = 1", "out of range", "at least 2"),
        (3, "hosts = 3.5", "whole number", ""),
        (7, "count = 0", "out of range", "at least 1"),
        (7, "conut = 2", "unknown key 'conut'", "count"),
        (9, "pages_per_s = nan", "not a number", ""),
        (9, "pages_per_s = inf", "not a number", ""),
        (9, "local = -0.1", "out of range", ""),
        (10, "curve = [[0, 0.5], [0, 1.0]]", "0 comes after 0", "Sort"),
        (10, "curve = [[0, nan]]", "not a number", ""),
        (10, "curve = [[0, 2]]", "out of range", "at most 1"),
        (10, "curve = [0, 1]", "not a list of pairs", "[[0, 0.5]"),
        (12, "period_s = 2.0", "no effect in a simulation", "key that has one"),
        (12, "choises = 2", "unknown key 'choises'", "choices"),
        (12, "[polycy]", "unknown table or key 'polycy'", "policy"),
        (12, "[jobz]", "unknown table or key 'jobz'", "jobs"),
    ],
)
def test_a_mistake_names_file_line_and_remedy(
    tmp_path: Path, line: int, text: str, what: str, mend: str
) -> None:
    lines = SCENARIO.splitlines()
    lines[line - 1] = text
    path = written(tmp_path, "\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as caught:
        reading.read(path)
    assert caught.value.where == f"{path}, line {line}"
    assert what in caught.value.what
    assert mend in caught.value.mend
    assert caught.value.mend


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[cluster\n", "not valid TOML"),
        ("[[cluster]]\nhosts = 3\n", "not written like this"),
        ("[jobs]\ncount = 3\n", "not written like this"),
        ("title = 3\n", "not written like this"),
        ("[run]\nduration_s = 1\nperiod_s = 2\n", "longer than the whole run"),
        ("[eviction]\nextra = [11]\n", "extra is above"),
        ("[eviction]\nevict = 30\n", "more slabs are evicted"),
        ("[eviction]\nextra = []\n", "not a list"),
        ("[load]\nquantiles = [[0, 0.5], [1, 0.4]]\n", "below"),
        ("[load]\nquantiles = [[0, 0.5], [2, 0.6]]\n", "beyond 1"),
        ('[load]\nquantiles = [[0, 0.5]]\ntrace = "a.csv"\n', "exclude each other"),
        ('[cluster]\nmemory = "2G"\nsystem = "2G"\n', "not below"),
        ('[daemon]\nheadroom = "63.5G"\n', "leave no room for a slab"),
        ("[cluster]\nhosts = 4\ndonors = 4\n", "every host is a donor alone"),
    ],
)
def test_parts_that_do_not_go_together(tmp_path: Path, text: str, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=what) as caught:
        reading.read(path)
    assert caught.value.where.startswith(str(path))
    assert caught.value.mend


def test_a_name_that_no_scenario_has(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nearest known scenario is paper"):
        reading.find("papper")
    with pytest.raises(NotFoundError, match="Check the path"):
        reading.find(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", sorted(reading.shipped()))
def test_the_shipped_scenarios_are_right(name: str) -> None:
    assert reading.read(reading.find(name)).title


def test_the_manual_names_every_key_and_default() -> None:
    manual = (Path(__file__).resolve().parents[2] / "docs/man/infiniswap-simulate.1.md").read_text()
    for name, kind in {**SECTIONS, **LISTS}.items():
        form = f"[[{name}]]" if name in LISTS else f"[{name}]"
        table = manual.partition(f"| key of `{form}` |")[2].partition("\n\n")[0]
        rows = [row.split(" | ") for row in table.splitlines()[2:]]
        told: dict[str, str] = {}
        for keys, *_, default in rows:
            names = [key.strip("`") for key in keys.removeprefix("| ").split(", ")]
            defaults = default.removesuffix(" |").strip("`").split(", ", len(names) - 1)
            told |= dict(zip(names, defaults, strict=True))
        assert set(told) == {key_name(entry) for entry in fields(kind)}, form
        for entry in fields(kind):
            shown = told[key_name(entry)]
            if entry.metadata["kind"] in ("int", "float"):
                assert float(shown) == entry.default, (form, entry.name)
            elif entry.metadata["kind"] == "size":
                assert parse_size(shown) == entry.default, (form, entry.name)
    for section, known in CONFIG_KEYS.items():
        line = manual.partition(f"from `[{section}]`")[2].partition(";")[0]
        assert all(f"`{key}`" in line for key in known)


# -------------------------------------------------------------------------------- traces


def test_a_trace_is_read_from_beside_the_scenario(tmp_path: Path) -> None:
    written(tmp_path, TRACE, "use.csv")
    text = '[cluster]\nhosts = 4\nmemory = "16G"\n[load]\ntrace = "use.csv"\n'
    load = host_load(reading.read(written(tmp_path, text)), 0)
    assert [used / GIB for used in load.at(0.0)] == [8.0, 4.0, 8.0, 4.0]
    assert [used / GIB for used in load.at(59.0)] == [8.0, 4.0, 8.0, 4.0]
    assert [used / GIB for used in load.at(60.0)] == [12.0, 4.0, 12.0, 4.0]


def test_a_trace_with_more_hosts_than_the_cluster(tmp_path: Path) -> None:
    rows = "".join(f"0,{host},0.1\n" for host in "abc")
    written(tmp_path, "time_s,host,used_share\n" + rows, "use.csv")
    text = '[cluster]\nhosts = 2\n[load]\ntrace = "use.csv"\n'
    with pytest.raises(ConfigError, match=r"Raise cluster\.hosts"):
        host_load(reading.read(written(tmp_path, text)), 0)


@pytest.mark.parametrize(
    ("line", "text", "what", "mend"),
    [
        (1, "time,host,used", "does not name the columns", "time_s,host,used_share"),
        (3, "100,b,nan", "'nan', not a number", "hold"),
        (3, "100,b,", "empty', not a number", "hold"),
        (3, "inf,b,0.5", "'inf', not a number", ""),
        (3, "100,b", "2 columns", "time_s,host,used_share"),
        (3, "100,,0.5", "no name", "second column"),
        (3, "100,b,41", "used_share is 41", "0.41 for 41 %"),
        (3, "100,b,-0.1", "used_share is -0.1", "0 to 1"),
        (3, "100,a,0.5", "two rows", "Remove"),
        (4, "90,a,0.5", "time runs backwards, from 100 to 90 s", "Sort"),
        (4, "220,a,0.5", "time runs backwards, from 220 to 160 s", "Sort"),
    ],
)
def test_a_mistake_in_a_trace(tmp_path: Path, line: int, text: str, what: str, mend: str) -> None:
    lines = TRACE.splitlines()
    lines[line - 1] = text
    path = written(tmp_path, "\n".join(lines) + "\n", "use.csv")
    with pytest.raises(ConfigError) as caught:
        read_trace(path, hold_gaps=False)
    after = line + ("from 220" in what)
    assert caught.value.where == f"{path}, line {after}"
    assert what in caught.value.what
    assert mend in caught.value.mend


def test_a_gap_is_refused_or_held(tmp_path: Path) -> None:
    path = written(tmp_path, TRACE.replace("160,b,0.25\n", "220,b,0.5\n"), "use.csv")
    with pytest.raises(ConfigError) as caught:
        read_trace(path, hold_gaps=False)
    assert caught.value.where == f"{path}, line 4"
    assert "no row at 160 s: 'b'" in caught.value.what
    assert "hold" in caught.value.mend
    assert read_trace(path, hold_gaps=True).used == ((0.5, 0.25), (0.75, 0.25), (0.75, 0.5))
    path = written(tmp_path, TRACE.replace("100,b,0.25\n", ""), "use.csv")
    with pytest.raises(ConfigError, match="nothing to hold"):
        read_trace(path, hold_gaps=True)
    path = written(tmp_path, TRACE.splitlines()[0] + "\n", "use.csv")
    with pytest.raises(ConfigError, match="there is no row"):
        read_trace(path, hold_gaps=True)
