# SPDX-License-Identifier: Apache-2.0
"""Every command in the documents is run by a test, or says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import ROOT, Block, blocks, documents, parse
from support.guides import NEEDS

HOSTS = {"consumer", "donor", "broker", "here", "cluster"}
"""Where tests/system/test_doc_commands.py runs commands."""

OWN_TEST = {
    Path("README.md"): "tests/system/test_two_machines.py",
    Path("docs/metrics.md"): "tests/integration/test_metrics.py",
    Path("docs/howto/dask.md"): "tests/system/guides/test_dask.py",
    Path("docs/howto/slurm.md"): "tests/system/guides/test_slurm.py",
    Path("docs/howto/upgrade.md"): "tests/system/test_deb.py",
    Path("docs/howto/notebooks.md"): "tests/system/guides/test_notebooks.py",
}
"""Documents whose blocks marked `on` have a test of their own."""

_COMMAND = re.compile(
    r"^\s*(?:\w+\$ |# |\$ )?(?:sudo |[A-Z_]+=\S+ )*"
    r"(?:infiniswap|make|tools/\w|systemctl|apt|pip|python3?|podman|docker|systemd-run) \S",
    re.MULTILINE,
)


_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_SHELL = re.compile(r"^(?:sudo )?(?:curl|wget|man -) ?\S|\$\(| (?:&&|\|\||[|>]) ")
"""Running text names commands; what one would copy into a shell belongs into a block."""


def copied(text: str) -> list[str]:
    """Command lines in running text, which no test would run."""
    return [code for code in _CODE.findall(_FENCED.sub("", text)) if _SHELL.search(code)]


def problem(block: Block) -> str:
    """What is wrong with its mark; empty when nothing is."""
    if block.language != "sh":
        is_shell = block.language in ("", "bash", "shell", "console")
        match = _COMMAND.search(block.body) if is_shell else None
        return f"a command in a block that is not sh: {match[0].strip()}" if match else ""
    if block.kind == "run":
        return "" if block.mark in HOSTS else f"no such place to run it: {block.mark}"
    if block.kind == "full":
        unknown = sorted(set(block.needs) - set(NEEDS))
        if unknown or block.host not in HOSTS:
            return f"nobody knows {', '.join(unknown) or block.host}"
        return ""
    if block.kind == "on":
        return "" if block.path in OWN_TEST else "no test runs the blocks of this document"
    if block.kind == "not run":
        return "" if len(block.mark) > 10 else "say why it is not run"
    return "commands without `<!-- run: HOST -->` or `<!-- not run: REASON -->` above them"


@pytest.mark.parametrize("path", documents(), ids=str)
def test_commands_are_run_by_a_test_or_say_why_not(path: Path) -> None:
    found = [f"{block.where}: {why}" for block in blocks(path) if (why := problem(block))]
    assert not found, "\n".join(found)
    assert not copied((ROOT / path).read_text(encoding="utf-8")), "put them into blocks"


def test_tests_of_documents_exist() -> None:
    for document, name in OWN_TEST.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert document.name in text
        for block in blocks(document):
            named = f"""["']on["'], ["']{block.mark}["'][)]"""
            assert block.kind != "on" or re.search(named, text), block.where


def test_the_look_for_commands_in_running_text_can_fail() -> None:
    text = "`ls`, `rm a && ls`, `curl http://x/`\n```sh\nls | wc\n```\n`a $(b)`, `man -k b`\n"
    assert copied(text) == ["rm a && ls", "curl http://x/", "a $(b)", "man -k b"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```sh\nls\n```\n", "commands without"),
        ("<!-- run: nowhere -->\n```sh\nls\n```\n", "no such place"),
        ("<!-- full: nowhere -->\n```sh\nls\n```\n", "nobody knows nowhere"),
        ("<!-- full: here, needs x jupyter -->\n```sh\nls\n```\n", "nobody knows x"),
        ("<!-- full: here, needs jupyter -->\n```sh\nls\n```\n", ""),
        ("<!-- on: donor -->\n```sh\nls\n```\n", "no test runs"),
        ("<!-- not run: no -->\n```sh\nls\n```\n", "say why"),
        ("```\nalice$ infiniswap run --local 4G ls\n```\n", "not sh"),
        ("<!-- run: here -->\n```sh\nls\n```\n", ""),
        ("```text\n$ infiniswap status\n```\n", ""),
        ("```\nmade ── .new ──▶ .free\n```\n", ""),
    ],
)
def test_the_check_can_fail(text: str, why: str) -> None:
    (block,) = parse(Path("x.md"), text)
    assert why in problem(block)
    assert bool(why) == bool(problem(block))
