# SPDX-License-Identifier: Apache-2.0
"""How long a device waits for a slab, over RDMA and over TCP: the product's own processes."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from infiniswap.control.tls import client_context
from infiniswap.errors import DeadlineError
from infiniswap.secret import new_secret, write_secret
from isw_bench import areas, paper
from isw_bench.bench import START_S, Bench, require_root
from isw_bench.cluster import device, donors
from isw_bench.faults.times import mapped_in
from isw_bench.rdma.place import Place, place
from isw_bench.results import Comparison, Figure, Samples, at_most
from isw_bench.stats import quantile
from isw_bench.timed_device import VARIABLE

KEY = "device-map"
TITLE = "RDMA: a slab mapped, from the wish to its use"

SLABS = 8
_POOL_SLABS = 2 * SLABS
RDMA, TCP, PAPER = "RDMA", "TCP", "paper"
_MODULE = "isw_bench.timed_device"
_AHEAD = "infiniswap_donor_rdma_ahead"
_AHEAD_S = 180.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A donor's, and what opens its metrics."""

    address: str
    token: str

    def ahead(self) -> int:
        """How many of its slabs are registered for nobody yet."""
        request = urllib.request.Request(
            f"https://{self.address}/metrics", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=START_S, context=client_context()) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[1])) for line in lines if line.startswith(f"{_AHEAD} "))


@contextlib.contextmanager
def daemon(bench: Bench, at: Place) -> Iterator[Daemon]:
    """One, with room for two devices: none waits for the other's slabs to be zeroed."""
    token_file = bench.work / "metrics-token"
    write_secret(token_file, new_secret())
    slab_bytes = bench.settings.swap_device_bytes // SLABS
    changes = {
        "INFINISWAP_CLUSTER_METRICS_TOKEN_FILE": str(token_file),
        "INFINISWAP_DAEMON_PREALLOCATE_SLABS": str(_POOL_SLABS),
    }
    with donors(
        bench, 1, slab_bytes, _POOL_SLABS * slab_bytes, host=at.address, changes=changes
    ) as found:
        yield Daemon(next(iter(found)), token_file.read_text().strip())


def run(bench: Bench) -> Comparison:
    """Measures it; each round is two new devices on the same donor.

    Raises:
        SkipError: not root, or there is no RDMA.
    """
    require_root("a device")
    samples, ahead = Samples(), True
    with place(bench) as at, daemon(bench, at) as donor:
        for number in bench.rounds(KEY):
            for side in (RDMA, TCP):
                # By then the slabs of the former device are zeroed and registered again.
                ahead = ahead and registered(bench, donor)
                bench.await_quiet()
                one(bench, donor, samples, side, number)
            samples.add(PAPER, ms=paper.MAP_MS)
    notes = [*_NOTES, *([] if ahead else [_LATE])]
    return Comparison(KEY, TITLE, figures(samples), samples.values, notes=notes)


def registered(bench: Bench, donor: Daemon) -> bool:
    """Waits until all of the donor's slabs are registered ahead; False: that does not come."""
    try:
        bench.until(lambda: donor.ahead() >= _POOL_SLABS, "slabs registered ahead", _AHEAD_S)
    except DeadlineError:
        return False
    return True


def one(bench: Bench, donor: Daemon, samples: Samples, side: str, number: int) -> None:
    """A device whose slabs are all mapped."""
    size_bytes = bench.settings.swap_device_bytes
    file = bench.work / f"map-{side}-{number}.json"
    with device(
        bench, [donor.address], size_bytes, size_bytes // SLABS,
        "--transport", side.lower(), module=_MODULE, changes={VARIABLE: str(file)},
    ) as own:  # fmt: skip
        areas.map_all(bench, own)
    told = mapped_in(file)
    samples.add(
        side,
        first_ms=quantile([line["map_ms"] for line in told if line["is_first"]], 0.5),
        later_ms=quantile([line["map_ms"] for line in told if not line["is_first"]], 0.5),
    )


_LATE = (
    "Not all slabs were registered ahead within minutes: perhaps this device or kernel cannot move "
    "registrations (see `map`)."
)
_NOTES = (
    "From the wish for a donor to the slab being in use, in the device's own process, on one donor "
    "on this host: it is asked for its memory and for the slab, by its control session. The first "
    "slab also makes the lease and its connections. The donor's pool is there before.",
    "The paper's time is of its own machines.",
)


def figures(samples: Samples) -> list[Figure]:
    """The table."""
    rdma, tcp, theirs = samples.values[RDMA], samples.values[TCP], samples.of(PAPER, "ms")
    return [
        Figure(
            "map a slab, median", "ms", rdma["later_ms"], theirs, PAPER, target=at_most(1.0),
            our_name=RDMA,
        ),
        Figure("map a slab, median", "ms", rdma["later_ms"], tcp["later_ms"], TCP, our_name=RDMA),
        Figure(
            "map the first slab of a donor", "ms", rdma["first_ms"], tcp["first_ms"], TCP,
            our_name=RDMA,
        ),
    ]  # fmt: skip
