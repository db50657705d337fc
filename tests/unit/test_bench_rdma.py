# SPDX-License-Identifier: Apache-2.0
"""tools/bench: what `make bench-rdma` reads and tells, its options, what it makes of figures."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from isw_bench import rdma, suite
from isw_bench.bench import SkipError
from isw_bench.rdma import cpu, donor, mapping, perftest, place
from isw_bench.results import Samples
from support.donors.rdma_end import END

from infiniswap.engine.rdma import RdmaGid, RdmaPort
from infiniswap.errors import SystemCallError, UsageError
from infiniswap.rdma_address import RdmaKey
from infiniswap.units import MIB

LATENCY = """
 local address: LID 0000 QPN 0x0011 PSN 0x6f2fc0 OUT 0x80 RKey 0x000203 VAddr 0x0055d5c5a5f000
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 4096    1000          201.50         402.00       209.25              210.75         3.50            240.00                 402.00
---------------------------------------------------------------------------------------
"""  # noqa: E501

BANDWIDTH = """
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 2499.998000 != 2449.998000
 65536      500              40.00               38.50                  0.000616
---------------------------------------------------------------------------------------
"""


def test_the_line_below_the_headings_is_what_perftest_measured() -> None:
    assert perftest.table(LATENCY) == [4096, 1000, 201.5, 402, 209.25, 210.75, 3.5, 240, 402]
    assert perftest.table(BANDWIDTH)[3] == 38.5
    assert perftest.is_measured(perftest.table(LATENCY))
    assert perftest.is_measured(perftest.table(BANDWIDTH))


@pytest.mark.parametrize(
    "row", [" 65536 625 0.00 0.00 0.000000", " 4096 1000 inf inf inf inf nan inf inf"]
)
def test_figures_of_a_clock_that_it_does_not_know_are_none(row: str) -> None:
    assert not perftest.is_measured(perftest.table(f" #bytes #iterations\n{row}\n"))


def test_a_program_without_a_table_is_an_error_with_what_it_said() -> None:
    with pytest.raises(SystemCallError, match="Couldn't connect"):
        perftest.table(" #bytes #iterations\n Couldn't connect to 10.9.0.1:18515\n")


def test_who_listens_is_seen_without_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert perftest.is_listening(port)
        assert listener.gettimeout() is None
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not perftest.is_listening(port)


def test_a_donor_answers_in_words() -> None:
    keys = [RdmaKey(4096, 7), RdmaKey(8192, 8)]
    assert donor.words([END], keys) == f"{END.gid} 2 0 4096 16 17 1 4096 7 8192 8"


def test_the_first_ipv4_address_of_a_port_that_is_up_is_taken() -> None:
    link_local = RdmaGid(0, "fe80::1", True)
    old, new = RdmaGid(1, "10.0.0.1", False), RdmaGid(2, "10.0.0.1", True)
    port = RdmaPort("mlx5_0", 1, "Ethernet", True, 4096, 100, 100, (link_local, old))
    down = replace(port, is_active=False, gids=(RdmaGid(0, "10.0.0.9", True),))
    assert place.first_address([down, replace(port, gids=(*port.gids, new))]) == "10.0.0.1"
    with pytest.raises(SkipError, match="--address"):
        place.first_address([down, port])


@pytest.mark.parametrize(
    "options",
    [
        *("--rounds 0", "--seconds 0", "--depth 257", "--donor-size 100K", "--device-size 12M"),
        *("--slab-sizes 64M,0", "--rxe --address 10.0.0.1", "latencies"),
    ],
)
def test_options_that_cannot_work_are_refused(options: str) -> None:
    with pytest.raises(UsageError):
        suite.parse(rdma.SUITE, options.split())


def test_processor_time_is_counted_per_gib() -> None:
    told = {field: 2.0 for field, _ in cpu._VALUES.values()}
    assert cpu.per_gib("read", told)["read_donor_s"] == pytest.approx(0.524288)


def test_a_donor_that_needs_no_processor_has_a_ratio_of_nothing() -> None:
    samples = Samples()
    for side, us in ((cpu.RDMA, 0.0), (cpu.TCP, 9.0)):
        for op in ("read", "write"):
            samples.add(side, **cpu.per_gib(op, {field: us for field, _ in cpu._VALUES.values()}))
    assert [figure.ratio.median for figure in cpu.figures(samples)] == [0.0] * 8


def test_a_mapping_is_both_calls_and_beside_five_milliseconds() -> None:
    samples = Samples()
    told = {"ahead": [80.0], "map": [1.0, 3.0], "key": [1.0, 5.0], "late": [90.0], "scrub": [9.0]}
    mapping.keep(samples, 64 * MIB, told)
    bound, paper, late = mapping.figures(samples, 64 * MIB, True)
    assert list(bound.ours) == [5.0]  # the median of 2 and 8
    assert bound.verdict == "pass"
    assert list(paper.theirs) == [54.0]
    assert list(late.theirs) == [90.0]
    assert "80.0 ms" in mapping.note(samples, 64 * MIB)


def test_where_nothing_is_registered_ahead_that_counts_and_is_said() -> None:
    samples = Samples()
    mapping.keep(samples, 64 * MIB, {"late": [90.0], "scrub": [9.0]})
    bound, _ = mapping.figures(samples, 64 * MIB, False)
    assert bound.verdict == "miss"
    assert "cannot move registrations" in mapping.note(samples, 64 * MIB)
