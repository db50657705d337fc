# SPDX-License-Identifier: Apache-2.0
"""The commented configuration, and on which line a key stands."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap import config as configuration
from infiniswap.config_text import keys, render, toml_value
from infiniswap.toml_lines import key_lines


def test_every_key_is_described_in_one_place() -> None:
    assert tuple(key.name for key in keys()) == configuration.known_keys()
    for key in keys():
        assert key.text.endswith("."), key
        assert "in bytes" not in key.text


def test_the_defaults_in_the_text_are_the_defaults(tmp_path: Path) -> None:
    text = render([], {}, {})
    bare = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE)
    daemon = tomllib.loads(bare)["daemon"]
    assert len(daemon.pop("slo")) == len(dataclasses.fields(configuration.SloConfig))
    assert len(daemon) == len(dataclasses.fields(configuration.DaemonConfig))
    path = tmp_path / "x.toml"
    for written in (text, bare):
        path.write_text(written)
        assert configuration.load(path, environ={}) == configuration.Config()


def test_what_is_chosen_is_in_force_and_what_is_found_stands_above_it(tmp_path: Path) -> None:
    text = render(["Head."], {"daemon.slab": '"64M"'}, {"daemon.slab": ["little memory."]})
    path = tmp_path / "x.toml"
    path.write_text(text)
    assert configuration.load(path, environ={}).daemon.slab_bytes == 64 << 20
    assert text.startswith("# Head.\n")
    assert '# Here: little memory.\nslab = "64M"\n' in text
    assert all(len(line) <= 100 for line in text.splitlines())


@given(st.text(st.characters(exclude_categories=["C"])))
def test_any_text_can_be_written(text: str) -> None:
    assert tomllib.loads(f"key = {toml_value(text, {})}")["key"] == text


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("[daemon]\n\nslab = 1\n", "daemon.slab", 3),
        ("# a\n [ daemon ] # b\n", "daemon", 2),
        ("daemon.slab = 1\n", "daemon.slab", 1),
        ('[daemon]\n"slab" = 1\n', "daemon.slab", 2),
        ('[a]\nx = """\n[daemon]\nslab = 2\n"""\n[daemon]\nslab = 1\n', "daemon.slab", 7),
        ("[a]\nx = [\n 1,\n]\ny = 2\n", "a.y", 5),
    ],
)
def test_the_line_of_a_key(text: str, key: str, line: int) -> None:
    tomllib.loads(text)
    assert key_lines(text)[key] == line
