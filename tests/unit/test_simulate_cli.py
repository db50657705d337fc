# SPDX-License-Identifier: Apache-2.0
"""`infiniswap simulate`: what it prints and draws, and mistakes on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infiniswap.cli.main import main

SMALL = """\
title = "Six hosts"
[cluster]
hosts = 6
[run]
duration_s = 20
[[jobs]]
count = 3
[optimum]
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "six.toml"
    path.write_text(SMALL)
    return path


def test_tables_of_a_cluster(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy")
    assert main(["simulate", str(small)]) == 0
    text = capsys.readouterr().out
    for words in ("Six hosts: memory in use at the end", "max/median", "slabs that got a donor"):
        assert words in text
    assert "distance from the best" in text


def test_json_is_the_same_for_the_same_seed(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy")
    found = []
    for seed in ("4", "4", "5"):
        assert main(["simulate", str(small), "--seed", seed, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] != found[2]
    ((outcome,), *_) = found
    assert outcome["seed"] == 4
    assert outcome["cluster"]["counts"]["jobs"] == 3
    assert len(outcome["cluster"]["hosts"]["held"]) == 6
    # The optimum is no worse than what the policies did, and not better than its bound.
    best = outcome["optimum"]
    assert best["bound"] - 1e-3 <= best["max_share"] <= best["ours"] + 1e-9


def test_several_seeds_run_in_processes_and_give_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "six.toml"
    path.write_text(SMALL.replace("[optimum]\n", ""))
    command = ["simulate", str(path), "--seed", "3", "--seeds", "3", "--processes", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "3 seeds: mean ± standard error" in text
    assert "±" in text
    assert main([*command, "--json"]) == 0
    several = json.loads(capsys.readouterr().out)
    assert [outcome["seed"] for outcome in several] == [3, 4, 5]
    assert main(["simulate", str(path), "--seed", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == several[1:2]


def test_a_mistake_of_a_seed_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[load]\ntrace = "none.csv"\n')
    assert main(["simulate", str(path), "--seeds", "2", "--processes", "1"]) != 0
    error = capsys.readouterr().err
    assert error.count("none.csv") == 1
    assert "seed 0" in error


@pytest.mark.parametrize("name", ["six", "eviction", "choices", "rules"])
def test_a_plot_is_a_small_png(
    name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    texts = {
        "six": SMALL.replace("[optimum]\n", ""),
        "eviction": "[eviction]\nbatches = 50\n",
        "choices": "[choices]\ndonors = [100]\n",
        "rules": "[run]\nduration_s = 5\n[[jobs]]\ncount = 3\n[compare]\nhosts = [8, 16]\n",
    }
    path, plot = tmp_path / "it.toml", tmp_path / "it.png"
    path.write_text(texts[name])
    assert main(["simulate", str(path), "--plot", str(plot)]) == 0
    content = plot.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 150_000
    assert capsys.readouterr().out


def test_the_shipped_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    text = capsys.readouterr().out
    assert "The paper's cluster" in text
    assert all(name in text for name in ("paper", "eviction", "choices", "rules"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "SCENARIO is missing"),
        (["papper"], 11, "nearest known scenario is paper"),
        (["paper", "--seeds", "0"], 2, "--seeds: 0 is not from 1"),
        (["paper", "--seed", "-1"], 2, "a seed is 0 or more"),
        (["paper", "--processes", "0"], 2, "--processes"),
        (["paper", "--plot", "/"], 2, "cannot be written there"),
        (["paper", "--plot", "/none/x.png"], 2, "cannot be written there"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_nothing_to_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    assert main(["simulate", str(path)]) == 3
    assert "there is nothing to simulate" in capsys.readouterr().err
