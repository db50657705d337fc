# SPDX-License-Identifier: Apache-2.0
"""`infiniswap`'s entry point: how errors and exit codes come out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import infiniswap
from infiniswap.cli import main as cli
from infiniswap.errors import NoDonorError
from infiniswap.own_code import FAR_VARIABLE


def _run(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> int:
    """`status` that ends so."""

    def run(_args: object) -> int:
        if isinstance(outcome, int):
            return outcome
        raise outcome

    def add_parser(subparsers: Any) -> None:
        subparsers.add_parser("status")

    command = SimpleNamespace(add_parser=add_parser, run=run)
    monkeypatch.setattr(cli, "_load", lambda name: command)
    return cli.main(["status"])


def test_a_commands_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, 0) == 0
    assert _run(monkeypatch, 42) == 42
    assert _run(monkeypatch, KeyboardInterrupt()) == 130


def test_a_command_in_a_job_with_far_memory_drops_what_an_agent_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAR_VARIABLE, "600:601:/sys/fs/cgroup/x")
    assert cli.main(["--version"]) == 0
    assert FAR_VARIABLE not in os.environ


def test_an_error_is_one_paragraph_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = NoDonorError("no donor\nanswers", where="10.0.0.2:9400", mend="Start one.")
    assert _run(monkeypatch, error) == 6
    told = "infiniswap: 10.0.0.2:9400: no donor answers. Start one.\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("device start d --sise 4G", "device start: there is no option --sise. The nearest one is"),
        ("run --sise 4G --local 1G -- true", "run: there is no option --sise. The nearest one is"),
        ("run --locl 1G -- true", "run: there is no option --locl. The nearest one is --local."),
        ("status --secret_file=x", "status: there is no option --secret_file. The nearest one is"),
        ("demo --zzz", "demo: there is no option --zzz. See `infiniswap demo --help`."),
        ("status extra --zzz", "status: 'extra' is one argument too many. See `infiniswap status"),
        ("device start d --sise 2 --frontend x", "device start: there is no option --sise."),
        ("device start d --frontend x --sise 2", "device start: --frontend: 'x' is not one of aut"),
        ("device start d --frontend=ublq", "device start: --frontend: 'ublq' is not one of auto, "),
        ("device start d --priority=x --zzz", "device start: --priority: 'x' is not a whole numbe"),
        ("daemon --after x", "daemon: --after: 'x' is not a number. See `infiniswap daemon --help"),
        ("daemon --release --after inf", "--after inf is out of range. It is 0 to 86400 (seconds)"),
        ("status --donors", "status: --donors: its value is missing. See `infiniswap status --hel"),
        ("status --json=1", "status: --json: it takes no value. See `infiniswap status --help`."),
        ("run --local 1G --device d --size 1G x", "run: --size: it cannot be used together with -"),
        ("run job --local 4G", "run: --local is missing. Write --local before the command."),
        ("donor drain", "donor drain: DONOR is missing. See `infiniswap donor drain --help`"),
        ("--config f status", "there is no option --config before the command. Write options aft"),
        ("device --config f list", "device: there is no option --config before the action. Write "),
        ("stauts", "there is no command 'stauts'. The nearest one is status. See `infiniswap --he"),
        ("device lsit", "device: there is no action 'lsit'. The nearest one is list. See `infinis"),
        ("device", "device: the action is missing. There are start, list, show, stop, reload, res"),
        ("", "the command is missing. There are daemon, device, run, status, top, ui, donor, doc"),
    ],
)
def test_the_first_mistake_in_reading_order_is_told_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"infiniswap: {said}"), captured.err
    assert captured.err.count("infiniswap: ") == captured.err.count("\n") == 1


def test_what_belongs_to_the_job_is_not_looked_at() -> None:
    for line in ("run --local 1G ls --zzz", "run --local=1G -- --zzz", "run --local 1G ls -- -l"):
        args = cli.build_parser("run").parse_args(line.split())
        assert args.local == "1G"
        assert args.command_line[-1] in ("--zzz", "-l")


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)


def test_the_version() -> None:
    command = [sys.executable, "-m", "infiniswap", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"infiniswap {infiniswap.__version__}"


@pytest.mark.parametrize("kib", [90_000, 60_000, 30_000])
def test_a_shells_limit_on_memory_is_no_traceback(kib: int, tmp_path: Path) -> None:
    """Whatever fails first: a library, a thread, or the interpreter's own memory."""
    command = f"ulimit -v {kib}; exec {sys.executable} -I -m infiniswap daemon"
    done = subprocess.run(
        ["sh", "-c", command],
        env={"INFINISWAP_DAEMON_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (5, 13)
    assert done.stderr.startswith("infiniswap: ")
    assert " -v" in done.stderr
    assert len(done.stderr.splitlines()) == 1
