# SPDX-License-Identifier: Apache-2.0
"""The agent's victims and grain on traces of jobs, its rivals there, and the recorder."""

from __future__ import annotations

import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from isw_bench.bench import build_programs
from isw_bench.far import traces, victims
from isw_bench.far.traces import DEAD, PART_SIZE, TAKEN, TOUCH, WINDOW, Record
from support.benchmarks import Runner
from support.machine.ran import ran

from infiniswap.system.userfault import far_refusal

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_tool("cmake"),
    pytest.mark.timeout(900),
]

PART_PAGES, BLOCK_PAGES = 16, 512
BLOCKS = 24
BUDGET_BLOCKS = BLOCKS // 2


# ------------------------------------------------------------------- the traces of this tree


def test_no_job_costs_more_than_twice_its_best_fixed_grain(runner: Runner) -> None:
    found = runner.results("peers", victims.KEY, "--rounds", "1")
    costs = [figure for figure in found["figures"] if figure["name"].endswith("cost")]
    assert len(costs) == len(traces.packed()) * len(victims.SHARES) >= 12
    assert [figure["name"] for figure in costs if figure["verdict"] == "miss"] == []
    rows = {side.rpartition(": ")[0] for side in found["samples"]}
    assert len(rows) == len(costs)
    for row in rows:
        pages = {
            rival: found["samples"][f"{row}: {rival}"]["pages"][0]
            for rival in (victims.AGENT, victims.LRU, victims.OPTIMUM, victims.GRAIN)
        }
        assert pages[victims.OPTIMUM] == min(pages.values()), row


# ------------------------------------------------------------------------------- rivals


@pytest.fixture(scope="module")
def replay(project_root: Path, build: Path) -> str:
    build_programs(project_root, build)
    return str(build / "bench" / "isw-bench-far-replay")


def played(
    replay: str, tmp_path: Path, records: Sequence[Record], *policies: str
) -> Mapping[str, Any]:
    traces.write(tmp_path / "a.xz", [Record(PART_SIZE, 0, PART_PAGES), *records])
    traces.unpack(tmp_path / "a.xz", tmp_path / "a")
    done = ran(replay, str(tmp_path / "a"), "50", *policies)
    assert done.returncode == 0, done.stderr
    tallies: Mapping[str, Any] = json.loads(done.stdout)
    return tallies


def part(number: int, kind: int = TOUCH) -> Record:
    return Record(kind, number * PART_PAGES, PART_PAGES)


def made_up(seed: int) -> list[Record]:
    """Every part once, so that the peak is known; then runs of parts, a few of which are freed."""
    source = random.Random(seed)
    parts = BLOCKS * BLOCK_PAGES // PART_PAGES
    records = [Record(TAKEN, 0, BLOCKS * BLOCK_PAGES), *map(part, range(parts))]
    for time in range(200):
        first, count = source.randrange(parts - 40), source.randrange(1, 40)
        kind = DEAD if source.random() < 0.1 else TOUCH
        records += [part(number, kind) for number in range(first, first + count)]
        records.append(Record(WINDOW, 0, 40 * time))
    return records


def uses(records: Sequence[Record]) -> list[tuple[int, bool]]:
    """Parts, and whether they are freed."""
    return [
        (record.first // PART_PAGES, record.kind == DEAD)
        for record in records
        if record.kind in (TOUCH, DEAD)
    ]


def next_uses(steps: Sequence[tuple[int, bool]]) -> list[float]:
    """When the part is touched next, unless it is freed before."""
    after: dict[int, float] = {}
    found: list[float] = []
    for time in range(len(steps) - 1, -1, -1):
        number, freed = steps[time]
        found.append(after.get(number, float("inf")))
        after[number] = float("inf") if freed else time
    return found[::-1]


def fetches_of_parts(records: Sequence[Record], optimum: bool) -> int:
    """Slow and plain: of the parts at home the one with the largest key leaves."""
    room = BUDGET_BLOCKS * BLOCK_PAGES // PART_PAGES
    steps = uses(records)
    home: dict[int, float] = {}
    far: set[int] = set()
    fetches = 0
    for time, ((number, freed), following) in enumerate(zip(steps, next_uses(steps), strict=True)):
        if freed:
            home.pop(number, None)
            far.discard(number)
            continue
        fetches += number in far
        far.discard(number)
        home.pop(number, None)
        if len(home) == room:
            victim = max(home, key=lambda each: home[each])
            del home[victim]
            far.add(victim)
        home[number] = following if optimum else -time
    return fetches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["lru", "optimum"])
def test_parts_leave_as_by_a_plain_policy(
    replay: str, tmp_path: Path, seed: int, policy: str
) -> None:
    records = made_up(seed)
    tally = played(replay, tmp_path, records, policy)[policy]
    assert tally["fetches"] == fetches_of_parts(records, policy == "optimum") > 0
    assert tally["pages"] == tally["fetches"] * PART_PAGES


def fetches_of_blocks(records: Sequence[Record], grain: int) -> tuple[int, int]:
    """Fetches and pages; the block that came first leaves, but not the one that is touched."""
    queue: OrderedDict[int, set[int]] = OrderedDict()  # pages at home, by block
    far: set[int] = set()
    fetches = brought = 0
    for page, freed in pages_of(records):
        block = page // BLOCK_PAGES
        if freed:
            queue.get(block, set()).discard(page)
            far.discard(page)
            continue
        if page in queue.get(block, set()):
            continue
        fetched = page in far
        first = page // grain * grain
        came = {each for each in range(first, first + grain) if each in far} if fetched else {page}
        while sum(map(len, queue.values())) + (grain if fetched else 1) > (
            BUDGET_BLOCKS * BLOCK_PAGES
        ):
            victim, pages = queue.popitem(last=False)
            if victim == block:
                queue[block] = pages
            else:
                far |= pages
        queue.setdefault(block, set()).update(came)
        far -= came
        fetches += fetched
        brought += len(came) if fetched else 0
    return fetches, brought


def pages_of(records: Sequence[Record]) -> Iterator[tuple[int, bool]]:
    for number, freed in uses(records):
        for page in range(number * PART_PAGES, (number + 1) * PART_PAGES):
            yield page, freed


@pytest.mark.parametrize("grain", [16, 512])
def test_blocks_leave_first_in_first_out(replay: str, tmp_path: Path, grain: int) -> None:
    records = made_up(7)
    tally = played(replay, tmp_path, records, f"fixed:{grain}")[f"fixed:{grain}"]
    assert (tally["fetches"], tally["pages"]) == fetches_of_blocks(records, grain)
    assert tally["fetches"] > 0


def test_the_agent_brings_back_what_was_far_and_no_zeros(replay: str, tmp_path: Path) -> None:
    """A job that writes twice as much as there is room for, and never reads it, fetches nothing;
    one that reads it once fetches at least what does not fit."""
    once = [part(number) for number in range(BLOCKS * BLOCK_PAGES // PART_PAGES)]
    taken = Record(TAKEN, 0, BLOCKS * BLOCK_PAGES)
    assert played(replay, tmp_path, [taken, *once], "agent")["agent"]["fetches"] == 0
    twice = played(replay, tmp_path, [taken, *once, *once], "agent")["agent"]
    assert twice["pages"] >= (BLOCKS - BUDGET_BLOCKS) * BLOCK_PAGES
    assert twice["fetches"] < BLOCKS * 4


def test_what_is_no_trace_is_refused(replay: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8))
    done = ran(replay, str(tmp_path / "a"), "50", "agent")
    assert (done.returncode, "does not say how large" in done.stderr) == (1, True)


# ------------------------------------------------------------------------------ recorder


@pytest.mark.requires_root
@pytest.mark.skipif(far_refusal() is not None, reason=f"needs far memory: {far_refusal()}")
@pytest.mark.parametrize("pages", [16, 4])
def test_each_part_that_a_job_touches_is_recorded(
    runner: Runner, tmp_path: Path, pages: int
) -> None:
    """The job writes 256 MiB in order, then reads them twice: up to three touches of each page. A
    window that ends late, on a busy host, holds two of them."""
    argv = [sys.executable, "-m", "isw_bench", "record", "in-order", "--size", "tiny"]
    argv += ["--pages", str(pages), "--output", str(tmp_path)]
    argv += ["--build", str(runner.build), "--work", str(runner.work)]
    done = ran(*argv, env=runner.environment, wait_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    traces.unpack(tmp_path / "in-order.trace.xz", tmp_path / "in-order.trace")
    records = list(traces.recorded(tmp_path / "in-order.trace"))
    assert records[0] == Record(PART_SIZE, 0, pages)
    touched = [record for record in records if record.kind == TOUCH]
    seen = {page for r in touched for page in range(r.first, r.first + r.pages)}
    assert len(seen) >= 256 << 8
    assert 1.5 <= sum(record.pages for record in touched) / (256 << 8) <= 3.3
