# SPDX-License-Identifier: Apache-2.0
"""What a demo records of itself, and which records the next one believes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infiniswap.demo import leftovers
from infiniswap.demo.leftovers import Record
from infiniswap.errors import ConflictError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


RECORD = Record("0123abcd", "/var/tmp/infiniswap-demo-0123abcd")


def test_a_record_survives(run_dir: Path, tmp_path: Path) -> None:
    assert leftovers.load(run_dir) is None
    record = leftovers.new_record(tmp_path)
    leftovers.save(record, run_dir)
    assert leftovers.load(run_dir) == record
    assert record.work.parent == tmp_path
    assert record.work.name == f"infiniswap-demo-{record.demo_id}"
    assert [path.name for path in run_dir.iterdir()] == ["record.json"]
    assert leftovers.new_record(tmp_path) != record


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "null", '"x"'),
        '{"demo_id": "0123abcd", "work_dir": "/"}',
        '{"demo_id": "0123abcd", "work_dir": "/home/somebody"}',
        '{"demo_id": "0123abcd", "work_dir": "infiniswap-demo-0123abcd"}',
        '{"demo_id": "0123abcd", "work_dir": "/var/tmp/infiniswap-demo-ffffffff"}',
        '{"demo_id": "*", "work_dir": "/var/tmp/infiniswap-demo-*"}',
        '{"demo_id": "", "work_dir": "/var/tmp/infiniswap-demo-"}',
    ],
)
def test_nothing_is_deleted_on_the_word_of_a_damaged_record(run_dir: Path, text: str) -> None:
    (run_dir / "record.json").write_text(text)
    assert leftovers.load(run_dir) is None


def test_directories_without_a_record_are_found(run_dir: Path, tmp_path: Path) -> None:
    work = tmp_path / "var"
    work.mkdir()
    (work / "infiniswap-demo-00000001").mkdir()
    (work / "infiniswap-demo-other").mkdir()
    (work / "infiniswap-demo-00000002").write_text("a file")
    (work / "infiniswap-demo-00000003").symlink_to("/")
    leftovers.save(RECORD, run_dir)
    found = {record.work_dir for record in leftovers.stale(run_dir, work)}
    assert found == {str(work / "infiniswap-demo-00000001"), RECORD.work_dir}


def test_one_demo_at_a_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with leftovers.only_one(run_dir):
        with (
            pytest.raises(ConflictError, match="another demo is running"),
            leftovers.only_one(run_dir),
        ):
            pass
        assert run_dir.exists()
    assert not run_dir.exists()
    with leftovers.only_one(run_dir):
        leftovers.save(RECORD, run_dir)
    assert leftovers.load(run_dir) == RECORD


def test_a_lock_file_removed_by_its_last_holder_does_not_count(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def slow_open(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        monkeypatch.setattr(os, "open", real)
        Path(path).unlink()  # between opening and locking the holder ends and removes it
        return descriptor

    monkeypatch.setattr(os, "open", slow_open)
    with leftovers.only_one(run_dir):
        assert (run_dir / "lock").exists()


def test_sweeping_nothing_is_quiet(run_dir: Path, tmp_path: Path) -> None:
    record = leftovers.new_record(tmp_path)
    leftovers.save(record, run_dir)
    (record.work / "data").mkdir(parents=True)
    assert leftovers.sweep(record, run_dir) == []
    assert not record.work.exists()
    assert not (run_dir / "record.json").exists()


def test_a_step_that_fails_does_not_stop_the_others(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(record: Record) -> None:
        raise ConflictError("it is in use")

    monkeypatch.setattr(leftovers, "release_volume", refuse)
    record = leftovers.new_record(tmp_path)
    leftovers.save(record, run_dir)
    record.work.mkdir()
    failures = leftovers.sweep(record, run_dir)
    assert failures == ["the volume: it is in use"]
    assert (run_dir / "record.json").exists()
