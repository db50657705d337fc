# SPDX-License-Identifier: Apache-2.0
"""`make bench-frontends` with little of everything, as far as this host has the front ends. No
figure is judged."""

from __future__ import annotations

import pytest
from support.benchmarks import Runner

pytestmark = [
    pytest.mark.full,
    pytest.mark.requires_root,
    pytest.mark.requires_native,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
    pytest.mark.requires_tool("cmake", "fio", "nbdkit", "nbdfuse"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("name", ["speed", "pause"])
def test_comparison(runner: Runner, name: str) -> None:
    found = runner.results("frontends", name, "--rounds", "2", "--seconds", "1")
    assert all(len(found["samples"]["fuse"][key]) == 2 for key in found["samples"]["fuse"])
    if name == "speed":
        assert {figure["theirs"]["name"] for figure in found["figures"]} >= {"nbdkit, nbdfuse"}
    else:
        assert any("2 × reads fail for good" in note for note in found["notes"])
