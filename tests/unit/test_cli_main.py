# SPDX-License-Identifier: Apache-2.0
"""`infiniswap`'s entry point: how errors and exit codes come out."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import pytest

import infiniswap
from infiniswap.cli import main as cli
from infiniswap.errors import NoDonorError


class _Fake:
    def __init__(self, outcome: BaseException | int) -> None:
        self.outcome = outcome

    def add_parser(self, subparsers: Any) -> None:
        parser = subparsers.add_parser("status", help="x")
        parser.add_argument("--count", type=int)

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, int):
            return self.outcome
        raise self.outcome


def _run(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int, *argv: str) -> int:
    monkeypatch.setattr(cli, "_load", lambda name: _Fake(outcome))
    return cli.main(["status", *argv])


def test_a_commands_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, 0) == 0
    assert _run(monkeypatch, 42) == 42


def test_an_error_is_one_paragraph_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = NoDonorError("no donor\nanswers", where="10.0.0.2:9400", mend="Start one.")
    assert _run(monkeypatch, error) == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "infiniswap: 10.0.0.2:9400: no donor answers. Start one.\n"


@pytest.mark.parametrize("argv", [["--count", "x"], ["--cuont", "1"], ["extra"]])
def test_wrong_arguments_exit_2_and_name_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert _run(monkeypatch, 0, *argv) == 2
    assert "--help" in capsys.readouterr().err


def test_control_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, KeyboardInterrupt()) == 130


def test_every_command_is_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infiniswap", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in cli.COMMANDS:
        assert command in done.stdout


def test_no_command_and_an_unknown_one_exit_2() -> None:
    for argv in ([], ["no-such-command"]):
        done = subprocess.run(
            [sys.executable, "-m", "infiniswap", *argv], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("infiniswap: ")


def test_the_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infiniswap", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"infiniswap {infiniswap.__version__}"


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys\n"
        "from infiniswap.cli import main as cli\n"
        "class C:\n"
        "    def add_parser(self, s): s.add_parser('status')\n"
        "    def run(self, args):\n"
        "        for _ in range(100000): print('x' * 100)\n"
        "        return 0\n"
        "cli._load = lambda name: C()\n"
        "sys.exit(cli.main(['status']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(60) == 0
    assert errors == b""
