# SPDX-License-Identifier: Apache-2.0
"""Changing keys of a TOML file without touching what else stands there."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infiniswap.toml_lines import key_lines, with_keys

FILE = """\
# a comment

[daemon]
pool = "8G"  # mine

[cluster]
# Addresses.
#peers = []
name = "one"
secret_file = "/a"
"""


def test_tables_of_an_array_have_lines() -> None:
    text = "a = 1\n[[jobs]]\ncount = 1\n\n[[jobs]]  # two\ncount = 2\n[run]\ncount = 3\n"
    assert key_lines(text) == {
        "a": 1,
        "jobs": 2,
        "jobs.0": 2,
        "jobs.0.count": 3,
        "jobs.1": 5,
        "jobs.1.count": 6,
        "run": 7,
        "run.count": 8,
    }


def test_other_lines_stay() -> None:
    text = with_keys(
        FILE,
        {"cluster.peers": '["h:1"]', "cluster.name": '"two"', "cluster.secret_file": None},
    )
    assert text == FILE.replace("#peers = []\n", '#peers = []\npeers = ["h:1"]\n').replace(
        '"one"', '"two"'
    ).replace('secret_file = "/a"\n', "")


def test_a_section_that_is_not_there_is_added() -> None:
    assert with_keys("", {"mqtt.tls": '"on"', "mqtt.broker": None}) == '\n[mqtt]\ntls = "on"\n'
    assert tomllib.loads(with_keys(FILE, {"mqtt.tls": '"on"'}))["mqtt"] == {"tls": "on"}


def test_a_value_of_several_lines_goes_as_a_whole() -> None:
    text = '[cluster]\npeers = [\n  "a",\n  "b",\n]\nname = "x"\n'
    assert with_keys(text, {"cluster.peers": '["c"]'}) == '[cluster]\npeers = ["c"]\nname = "x"\n'


def test_a_value_that_stays_keeps_its_comment() -> None:
    text = '[cluster]\nname = "x"  # why\n'
    assert with_keys(text, {"cluster.name": '"x"'}) == text


@pytest.mark.parametrize(
    "text",
    [
        'cluster = { name = "x" }\n',
        '[cluster]\nname = "x"  # why\n',
        '[cluster]\nname = """\nx"""  # why\n',
    ],
)
def test_what_cannot_be_changed_line_by_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"comment beside|line by line"):
        with_keys(text, {"cluster.name": '"y"'})


def test_a_key_with_its_section_before_it_stays_where_it_is() -> None:
    text = 'cluster.name = "x"\ncluster.peers = ["a"]\n'
    wanted = 'cluster.name = "y"\n'
    assert with_keys(text, {"cluster.name": '"y"', "cluster.peers": None}) == wanted


NAMES = st.sampled_from(("a", "b", "c"))
VALUES = st.sampled_from(('"x"', "1", "[\n 1,\n 2\n]", '"""\n[a]\nb = 1\n"""', "{ z = 1 }", "'#'"))
TABLES = st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), max_size=3)
CHANGES = st.dictionaries(
    st.tuples(NAMES, NAMES).map(".".join), st.none() | st.sampled_from(('"new"', "[2]")), max_size=4
)


@given(TABLES, CHANGES)
def test_nothing_else_changes(
    table: dict[str, dict[str, str]], changes: dict[str, str | None]
) -> None:
    text = "".join(
        f"[{section}]\n" + "".join(f"{name} = {value}\n" for name, value in content.items())
        for section, content in table.items()
    )
    wanted = tomllib.loads(text)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if value is None:
            wanted.get(section, {}).pop(name, None)
        else:
            wanted.setdefault(section, {})[name] = tomllib.loads(f"v = {value}")["v"]
    found = tomllib.loads(with_keys(text, changes))
    assert {key: value for key, value in found.items() if value} == {
        key: value for key, value in wanted.items() if value
    }
