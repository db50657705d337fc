# SPDX-License-Identifier: Apache-2.0
"""Page faults for which somebody waits for a device, of every process of this host: who, and at
which address."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from infiniswap.system import perf_ring
from infiniswap.system.perf_ring import PerfEvent, PerfRing
from infiniswap.units import KIB

_MAJOR_FAULTS: Final = 6  # PERF_COUNT_SW_PAGE_FAULTS_MAJ
_WAKES: Final = 16
"""A few faults are soon told; a reader that is woken for each would slow down who makes them."""
_RING_BYTES: Final = 64 * KIB
"""Room for 2730 faults. What comes while it is full is left out."""
_SAMPLE: Final = struct.Struct("<IIQ")


class Fault(NamedTuple):
    """One that is over.

    Attributes:
        pid: of the process.
        address: which it had touched.
    """

    pid: int
    address: int


class MajorFaults:
    """Of the processors that are online now; first stopped.

    Raises:
        UnavailableError: this processor is unknown.
        NotPermittedError, SystemCallError: the kernel's refusal. It takes CAP_PERFMON.
    """

    def __init__(self) -> None:
        tells = perf_ring.TELLS_THREAD | perf_ring.TELLS_ADDRESS
        event = PerfEvent(
            "cannot watch page faults", perf_ring.SOFTWARE, _MAJOR_FAULTS, tells, _WAKES
        )
        self.rings = perf_ring.open_rings(lambda number: PerfRing(event, number, _RING_BYTES))

    def start(self) -> None:
        """Faults are told from now on."""
        for ring in self.rings:
            ring.start()

    def stop(self) -> None:
        """No others are told; they cost nothing then."""
        for ring in self.rings:
            ring.stop()

    def take(self) -> Iterator[Fault]:
        """Those since the last time; of each processor in order."""
        for ring in self.rings:
            for record in ring.take():
                if perf_ring.HEADER.unpack_from(record)[0] == perf_ring.SAMPLE:
                    pid, _, address = _SAMPLE.unpack_from(record, perf_ring.HEADER.size)
                    yield Fault(pid, address)

    def close(self) -> None:
        """Ends it."""
        for ring in self.rings:
            ring.close()
