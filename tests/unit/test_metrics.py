# SPDX-License-Identifier: Apache-2.0
"""Metrics: what is declared, against docs/metrics.md and the counters there are; their format."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manuals import metrics as tables
from support.machine.ran import ran

from infiniswap.control.exposition import page
from infiniswap.control.figures import Figures, Metric, Value, figures, histogram
from infiniswap.device.donors.counts import LinkCounts
from infiniswap.device.process import metrics as device
from infiniswap.device.slabs.counts import SlabCounts
from infiniswap.donor import metrics as donor
from infiniswap.engine.protocol import FarTold, RemoteInfo
from infiniswap.system.pressure import memory_stalls

DEVICE: tuple[Metric[Any], ...] = device.METRICS
DONOR: tuple[Metric[Any], ...] = donor.METRICS
ALL = (*DEVICE, *DONOR)
BOUNDS_NS = [(9 + bucket % 8) << (bucket // 8 + 5) for bucket in range(256)]
"""As isw_latency_bucket_ns."""

_COUNTED = r'counters\[\s*f?"([^"]+)"(?:\[:80\])?\s*\] \+='


def asked(counts: MagicMock) -> set[str]:
    """Which counts were asked for."""
    return {call.args[0] for call in counts.__getitem__.call_args_list}


def test_the_document_lists_what_is_exported(project_root: Path) -> None:
    text = (project_root / tables.PATH).read_text()
    assert tables.with_tables(text) == text, "run `make man`"
    names = {metric.name for metric in ALL}
    assert len(names) == len(ALL)
    assert names <= set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    for name in re.findall(r"infiniswap_(?:device|donor)_\w+", text):
        assert name.removesuffix("_bucket") in names, name


def test_every_count_of_a_device_is_exported(project_root: Path) -> None:
    header = (project_root / "csrc" / "include" / "isw.h").read_text()
    body = re.search(r"^struct isw_engine_stats {(.*?)^};", header, re.MULTILINE | re.DOTALL)
    assert body is not None
    source = MagicMock()
    figures(DEVICE, source)
    counts = asked(source.figures.counts)
    assert len(counts) > 30
    assert set(re.findall(r"uint64_t (\w+);", body[1])) - counts == {
        *("pages_in", "read_requests_waited")  # the sum and the count of others
    }
    assert set(re.findall(r"uint64_t (\w+)\[", body[1])) == asked(source.figures.latency)
    slabs = {entry.name for entry in dataclasses.fields(SlabCounts)}
    assert slabs == asked(source.status.slab_counts)
    told = {entry.name for entry in dataclasses.fields(FarTold)}
    assert told == asked(source.status.far.counts)


def test_every_counter_of_the_daemon_is_exported(project_root: Path) -> None:
    counted: set[str] = set()
    for part in ("donor", "control", "ui", "system/clock.py"):
        path = project_root / "infiniswap" / part
        for file in [path] if path.is_file() else path.rglob("*.py"):
            counted |= set(re.findall(_COUNTED, file.read_text()))
    source = MagicMock()
    figures(DONOR, source)
    exported = asked(source.service) | asked(source.harvest) | asked(source.server)
    by_label = {name.partition("{")[0] for name in counted if "{" in name}
    assert by_label == {"requests_", "requests_refused_", "sessions_ended_", "handshakes_ended_"}
    plain = {name for name in exported if not name.startswith(tuple(by_label))}
    assert plain == {name for name in counted if "{" not in name}


@pytest.mark.requires_tool("promtool")
@pytest.mark.parametrize("metrics", [DEVICE, DONOR], ids=["device", "donor"])
def test_promtool_finds_no_fault(metrics: tuple[Metric[Any], ...]) -> None:
    done = ran("promtool", "check", "metrics", says=page(_full(metrics)).decode())
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _full(metrics: tuple[Metric[Any], ...]) -> Figures:
    """Every metric with two values, where it has labels."""
    some = histogram([1] * 256, BOUNDS_NS)
    values: dict[str, dict[tuple[str, ...], Value]] = {
        metric.name: {
            (f'{text}"\\\n',) * len(metric.labels): some if metric.kind == "histogram" else 1
            for text in ("ab" if metric.labels else "a")
        }
        for metric in metrics
    }
    return Figures(metrics, values, {"device": "d"})


def test_a_metric_without_a_value_is_named_all_the_same() -> None:
    metric: Metric[None] = Metric("infiniswap_x_total", "counter", "Of x.", lambda _: {}, ("kind",))
    text = page(figures([metric], None)).decode()
    assert text == "# HELP infiniswap_x_total Of x.\n# TYPE infiniswap_x_total counter\n"


@given(st.lists(st.integers(300, 8_000_000_000), max_size=50))
def test_a_histogram_has_every_duration_once_and_their_sum_nearly(durations: list[int]) -> None:
    counts = [0] * len(BOUNDS_NS)
    for took_ns in durations:
        counts[next(i for i, bound in enumerate(BOUNDS_NS) if took_ns < bound)] += 1
    made = histogram(counts, BOUNDS_NS)
    for bound, count in made.buckets[:-1]:
        assert count == sum(took_ns < float(bound) * 1e9 for took_ns in durations)
    assert made.buckets[-1] == ("+Inf", len(durations))
    # The middle of a bucket is 1/16 above its lower border; the rest is for rounding.
    assert made.sum_s == pytest.approx(sum(durations) / 1e9, rel=1 / 16 + 1e-9)


@given(st.lists(st.sampled_from(["pages", "give up", "connect", "late"]), max_size=30))
def test_what_a_donor_moved_never_becomes_less(steps: list[str]) -> None:
    def remote(totals: Counter[str]) -> RemoteInfo:
        return RemoteInfo(3, "up", 2, totals, 0)

    counts = LinkCounts()
    totals, seen = Counter(read_pages=0), counts.totals(None)
    for step in steps:
        if step == "pages" and not counts._has_ended:
            totals = totals + Counter(read_pages=5, rdma_read_pages=2)
        elif step == "give up":
            counts.end(remote(totals))
            counts.end(remote(totals))  # tried again
        elif step == "connect" and counts._has_ended:
            totals = Counter()
            counts.begin()
        elif step == "late" and counts._has_ended:
            # Its number is another donor's already, and the link has not heard of it yet.
            assert counts.totals(remote(Counter(read_pages=10**6))) == seen
        now = counts.totals(remote(totals))
        assert now["read_pages"] >= seen["read_pages"]
        assert now["rdma_read_pages"] * 5 == now["read_pages"] * 2
        seen = now


def test_stalls_are_those_of_the_kernel(tmp_path: Path) -> None:
    assert memory_stalls(proc=tmp_path) == {}
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text(
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0.00 total=7\njunk\n"
    )
    assert memory_stalls(proc=tmp_path) == {"some": 2.5, "full": 7e-6}
