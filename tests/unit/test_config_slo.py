# SPDX-License-Identifier: Apache-2.0
"""infiniswap.config: [daemon.slo], and who may name the program in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infiniswap.config import check, load
from infiniswap.config_changes import concerning_keys
from infiniswap.errors import ConfigError
from infiniswap.own_code import changeable_by

COMMAND = '[daemon.slo]\ncommand = "/usr/bin/latency -x"\nbound = 1.5\n'


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_the_table_is_read_beside_the_one_that_it_is_in(tmp_path: Path) -> None:
    path = written(tmp_path / "x.toml", f'[daemon]\nslab = "64M"\n{COMMAND}')
    config = load(path, environ={"INFINISWAP_DAEMON_SLO_SETTLE_S": "20"})
    assert config.daemon.slab_bytes == 64 << 20
    assert (config.slo.command, config.slo.bound, config.slo.settle_s) == (
        "/usr/bin/latency -x", 1.5, 20.0,
    )  # fmt: skip
    assert config.slo.is_set
    assert not load(Path("/dev/null"), environ={}).slo.is_set


def test_it_concerns_daemons_alone() -> None:
    assert "daemon.slo.bound" in concerning_keys("daemon")
    assert "daemon.slo.bound" not in concerning_keys("device")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[daemon.slo]\nbond = 1\n", "line 2: unknown key daemon.slo.bond"),
        ("[daemon.slow]\nbound = 1\n", "unknown key daemon.slow"),
        ("[daemon]\nslo = 1\n", "line 2: 'daemon.slo' is a section"),
        ("[slo]\nbound = 1\n", "unknown section [slo]"),
        ('[daemon.slo]\ncommand = "/bin/x"\nquery = "y"\nbound = 1\n', "exclude each other"),
        ('[daemon.slo]\ncommand = "/bin/x"\n', "needs `bound`"),
        ("[daemon.slo]\nbound = 1\n", "needs a latency"),
        ("[daemon.slo]\nbound = -1\n", "out of range"),
        ("[daemon.slo]\nbound = nan\n", "not a number"),
        ('[daemon.slo]\ncommand = "x -y"\nbound = 1\n', "'x' is not an absolute path"),
        ("[daemon.slo]\ncommand = '/bin/x \"y'\nbound = 1\n", "No closing quotation"),
        ('[daemon.slo]\nquery = "x"\nbound = 1\nprometheus = "host:9090"\n', "not the address"),
        ('[daemon.slo]\npressure = "disk"\nbound = 1\n', "none of off, cpu, io, memory"),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, text: str, said: str) -> None:
    _, errors = check(written(tmp_path / "x.toml", text), environ={})
    assert len(errors) == 1, errors
    assert said in str(errors[0])
    assert errors[0].mend


def test_the_environment_names_no_program() -> None:
    with pytest.raises(ConfigError, match="cannot name a program"):
        load(Path("/dev/null"), environ={"INFINISWAP_DAEMON_SLO_COMMAND": "/bin/x"})


@pytest.mark.parametrize("place", ["file", "directory"])
def test_a_file_that_others_can_change_names_no_program(tmp_path: Path, place: str) -> None:
    (tmp_path / "etc").mkdir(mode=0o755)
    path = written(tmp_path / "etc" / "x.toml", COMMAND)
    assert load(path, environ={}).slo.command
    (path if place == "file" else path.parent).chmod(0o777)
    with pytest.raises(ConfigError, match=r"line 2: daemon.slo.command names a program, and other"):
        load(path, environ={})
    # Everything else may still be read from it.
    path.chmod(0o666)
    path.write_text('[daemon.slo]\npressure = "cpu"\nbound = 20\n')
    assert load(path, environ={}).slo.pressure == "cpu"


def test_a_link_is_looked_through(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    target = written(tmp_path / "open" / "x.toml", COMMAND)
    link = tmp_path / "link.toml"
    link.symlink_to(target)
    assert changeable_by(link, {os.geteuid(), 0}) == ""
    target.parent.chmod(0o777)
    assert "every user may write" in changeable_by(link, {os.geteuid(), 0})
