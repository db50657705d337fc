# SPDX-License-Identifier: Apache-2.0
"""What of ublk devices needs no kernel that has them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from support.machine.made_host import make_files

from infiniswap.config import DeviceConfig
from infiniswap.device.frontends import FRONT_ENDS, choice
from infiniswap.device.frontends import ublk as frontend
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.errors import UnavailableError
from infiniswap.system import block, ublk


def test_devices_are_found_by_their_char_devices(tmp_path: Path) -> None:
    assert ublk.numbers(sys=tmp_path) == ()
    for name in ("ublkc10", "ublkc2", "ublkcx", "loop0"):
        (tmp_path / "class/ublk-char" / name).mkdir(parents=True)
    assert ublk.numbers(sys=tmp_path) == (2, 10)


@pytest.mark.parametrize(("text", "limit"), [("64\n", 64), ("", None), ("many", None)])
def test_the_drivers_limit(tmp_path: Path, text: str, limit: int | None) -> None:
    assert ublk.limit(sys=tmp_path) is None
    (tmp_path / ublk.LIMIT).parent.mkdir(parents=True)
    (tmp_path / ublk.LIMIT).write_text(text)
    assert ublk.limit(sys=tmp_path) == limit


def test_of_each_queue_one_place_stays_empty(tmp_path: Path) -> None:
    before = dict.fromkeys(("scheduler", "nr_requests"), "as it was")
    queue = make_files(tmp_path / "block/ublkb987654/queue", before)
    nodes = ("/dev/ublkb987654", "/dev/ublkc987654")  # there are none
    assert ublk.tune(987654, 64, sys=tmp_path) == nodes
    assert (queue / "nr_requests").read_text() == "63"
    assert (queue / "scheduler").read_text() == "none"


def test_a_queue_that_stays_as_it_was_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path / "block/ublkb987654/queue", {"nr_requests": 4})
    monkeypatch.setattr(block, "try_write_text", lambda path, text: True)  # and ignores it
    assert "nr_requests" in ublk.tune(987654, 4, sys=tmp_path)


def paths(run: Path) -> DevicePaths:
    return DevicePaths(run.name, run, run)


def test_a_device_is_known_by_its_run_directory(tmp_path: Path) -> None:
    one, other = (frontend.identity_of(paths(tmp_path / name)) for name in ("a", "b"))
    assert one != other
    assert frontend.is_ours(one)
    assert frontend.is_ours(other)
    assert one < 1 << 64
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    assert frontend.identity_of(paths(tmp_path / "link/a")) == one
    assert not frontend.is_ours(0)
    assert not frontend.is_ours(1)


def check(name: str, have: set[str]) -> None:
    if name not in have:
        raise UnavailableError(f"nothing of {name}")


@pytest.mark.parametrize(
    ("have", "taken", "why"),
    [
        ({"ublk", "nbd", "fuse"}, "ublk", "fastest"),
        ({"nbd", "fuse"}, "nbd", "no ublk: nothing of ublk"),
        ({"fuse"}, "fuse", "no ublk: nothing of ublk; no nbd: nothing of nbd"),
        (set(), "", "nothing of fuse"),  # the last one says what is missing
    ],
)
def test_auto_takes_the_best_and_says_why(have: set[str], taken: str, why: str) -> None:
    checks = {name: functools.partial(check, name, have) for name in ("ublk", "nbd", "fuse")}
    if not taken:
        with pytest.raises(UnavailableError, match=why):
            choice.best(checks)
        return
    chosen = choice.best(checks)
    assert chosen.frontend == taken
    assert why in chosen.why


def test_the_table_has_the_names_of_the_configuration_and_of_the_documents(
    project_root: Path,
) -> None:
    (key,) = (one for one in dataclasses.fields(DeviceConfig) if one.name == "frontend")
    assert key.metadata["choices"] == ("auto", *FRONT_ENDS)
    assert " ".join(n for n, one in FRONT_ENDS.items() if one.is_block_device) == "ublk nbd fuse"
    text = (project_root / "docs/frontends.md").read_text()
    assert all(f"\n| `{name}` |" in text for name in FRONT_ENDS)
