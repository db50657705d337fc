# SPDX-License-Identifier: Apache-2.0
"""What is simulated: the tables and keys of a scenario file, with their defaults.

The metadata of a field says how its key is written (infiniswap.config_values); sizes lose their
`_bytes`, as in the configuration. infiniswap.simulation.reading makes these objects of a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from infiniswap.config import Config
from infiniswap.units import GIB, MIB, SIZE_BYTES_MAX

Points: TypeAlias = tuple[tuple[float, float], ...]
"""A curve: pairs with rising first numbers; straight lines between them."""

RULES: Final = ("product", "random", "four", "global")
"""How a slab gets its donor. product: as [policy] says, two choices by default; random: the first
donor with room; four: four choices; global: the least used donor of all, which no host can know."""

WAYS: Final = ("host", "tenant", "attained")
"""Who has to give slabs back (infiniswap.simulation.sharing)."""

HOSTS_MAX: Final = 1_000_000


def _size(default: int, low: int = 0) -> Any:
    meta = {"kind": "size", "low": low, "high": SIZE_BYTES_MAX, "multiple": 1}
    return field(default=default, metadata=meta)


def _int(default: int, low: int, high: int) -> Any:
    return field(default=default, metadata={"kind": "int", "low": low, "high": high})


def _float(default: float, low: float, high: float, *, above: bool = False) -> Any:
    meta = {"kind": "float", "low": low, "high": high, "above": above}
    return field(default=default, metadata=meta)


def _text(default: str = "") -> Any:
    return field(default=default, metadata={"kind": "text"})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"kind": "choice", "choices": choices})


def _points(default: Points, low: float, high: float, rising: bool = False) -> Any:
    """`rising`: the second numbers may not fall."""
    meta = {"kind": "points", "low": low, "high": high, "rising": rising}
    return field(default=default, metadata=meta)


def _ints(default: tuple[int, ...], low: int, high: int) -> Any:
    item = {"kind": "int", "low": low, "high": high}
    return field(default=default, metadata={"kind": "list", "item": item})


def _words(default: tuple[str, ...], *choices: str) -> Any:
    item = {"kind": "choice", "choices": choices}
    return field(default=default, metadata={"kind": "list", "item": item})


@dataclass(frozen=True, slots=True)
class Cluster:
    """[cluster]: the hosts."""

    hosts: int = _int(32, 2, HOSTS_MAX)
    donors: int = _int(0, 0, HOSTS_MAX)
    """The first so many hosts lend, and jobs run on the others; 0: every host does both."""
    memory_bytes: int = _size(64 * GIB, 64 * MIB)
    """Of each host."""
    system_bytes: int = _size(GIB)
    """Of each host, what is in use beside jobs and load."""


@dataclass(frozen=True, slots=True)
class Run:
    """[run]: how long, how exactly, and by which rule."""

    duration_s: float = _float(120.0, 0.0, 1e9, above=True)
    period_s: float = _float(1.0, 0.01, 3600.0)
    """Distance of looks at hosts and devices."""
    sample_s: float = _float(10.0, 0.01, 1e9)
    """Distance of rows in the time line."""
    rule: str = _choice("product", *RULES)
    disk_pages_per_s: float = _float(32_000.0, 0.0, 1e9)
    """How fast a consumer reads its backup: 125 MB/s by default, a cloud volume."""
    map_s: float = _float(0.05, 0.001, 1e3)
    """How long a device takes to map a slab (the paper, section 7.3.1: 54 ms over RDMA). It maps
    one after another."""
    move_pages_per_s: float = _float(262_144.0, 1.0, 1e9)
    """How fast a slab is copied from one donor to another: 1 GiB/s by default."""
    slowdown_donors: float = _float(4.8, 1.0, 1e6)
    """Time of a job with `work_s` whose page I/O donors serve, against one with all its memory."""
    slowdown_disk: float = _float(10.6, 1.0, 1e6)
    """Of one whose page I/O the backup serves. Both defaults: docs/when-to-use.md, the pandas join
    with half of its memory, backup and swap on a cloud volume."""


@dataclass(frozen=True, slots=True)
class Load:
    """[load]: memory that hosts use for themselves, as a share, beside `[[jobs]]`."""

    quantiles: Points = _points((), 0.0, 1.0, rising=True)
    """Pairs of a share of the hosts and the memory that this share uses less than."""
    containers: int = _int(1, 1, 1_000)
    """With more than one, `quantiles` and `change_p99` are those of containers and their limits: so
    many equal ones divide a host among them."""
    daily_share: float = _float(0.0, 0.0, 1.0)
    """The use rises and falls by so much of itself in a day."""
    daily_spread_h: float = _float(0.0, 0.0, 24.0)
    """Hours between the first and the last daily peak."""
    change_p99: float = _float(0.0, 0.0, 0.5)
    """99 of 100 changes from one minute to the next are smaller, as a share of the memory."""
    trace: str = _text()
    """CSV file beside the scenario, in place of `quantiles`: time_s, host and used_share."""
    trace_gaps: str = _choice("refuse", "refuse", "hold")
    """hold: a host without a row keeps its last value."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """[[jobs]]: jobs of one kind, each on a random host with room for what it may keep there."""

    name: str = _text("job")
    tenant: str = _text()
    """On whose account, as `infiniswap run --tenant`; empty: the host's."""
    count: int = _int(1, 1, HOSTS_MAX)
    working_set_bytes: int = _size(8 * GIB)
    local: float = _float(0.5, 0.0, 1.0)
    """Share of the working set that the job may keep on its host."""
    kept_copies: float = _float(0.0, 0.0, 1.0)
    """Share of what it keeps on its host that is on the device as well: the kernel keeps the copy
    of a page that it has read and not changed, until half of all swap is in use."""
    curve: Points = _points(((0.0, 1.0),), 0.0, 1.0)
    """Pairs of a time since the job's start and the share of its working set that it uses then."""
    pages_per_s: float = _float(2_000.0, 0.0, 1e9)
    """Page-ins and page-outs of a job whose memory does not fit."""
    skew: float = _float(0.0, 0.0, 10.0)
    """0: all its slabs are equally active; s: the nth one is n to the power of s less active."""
    start_s: float = _float(0.0, 0.0, 1e9)
    start_spread_s: float = _float(0.0, 0.0, 1e9)
    """The jobs start at random moments of this time after `start_s`."""
    duration_s: float = _float(0.0, 0.0, 1e9)
    """Mean of an exponential distribution; 0: until the end."""
    work_s: float = _float(0.0, 0.0, 1e9)
    """Likewise, of the seconds that a job takes with all of its memory. It ends when it is done,
    later if it pages; 0: it has no end of its own."""


@dataclass(frozen=True, slots=True)
class Failure:
    """[[failures]]: random hosts fail. After a failure that is longer than policy.suspend_s the
    host has lost its slabs and its jobs; a shorter one only interrupts its connections."""

    at_s: float = _float(0.0, 0.0, 1e9)
    every_s: float = _float(0.0, 0.0, 1e9)
    """Mean time to the next failure, again and again; 0: there is one."""
    hosts: int = _int(1, 1, HOSTS_MAX)
    for_s: float = _float(0.0, 0.0, 1e9)
    """0: for good."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """[eviction]: how often batch eviction spares every busy slab, beside its closed form."""

    slabs: int = _int(24, 2, 100_000)
    """N: mapped on the donor."""
    busy_share: float = _float(0.25, 0.0, 1.0)
    evict: int = _int(10, 1, 1024)
    """E: slabs that the donor takes back."""
    extra: tuple[int, ...] = _ints((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 0, 1024)
    """E': slabs beyond these whose owners are asked; a row for each."""
    batches: int = _int(20_000, 1, 100_000_000)


@dataclass(frozen=True, slots=True)
class Choices:
    """[choices]: as many slabs as donors, each of a device of its own, beside theory."""

    donors: tuple[int, ...] = _ints((1_000, 10_000, 100_000), 2, 10_000_000)
    """A row for each."""


@dataclass(frozen=True, slots=True)
class Compare:
    """[compare]: the same cluster with several rules and sizes; jobs grow with the hosts."""

    rules: tuple[str, ...] = _words(RULES, *RULES)
    hosts: tuple[int, ...] = _ints((100,), 2, HOSTS_MAX)


@dataclass(frozen=True, slots=True)
class Sharing:
    """[sharing]: the same jobs with several ways to share donors that are full."""

    ways: tuple[str, ...] = _words(WAYS, *WAYS)


@dataclass(frozen=True, slots=True)
class Optimum:
    """[optimum]: the best possible placement of the same slabs, by an integer program."""

    limit_s: float = _float(60.0, 0.1, 86_400.0)
    """Seconds of the solver."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole file.

    Attributes:
        origin: the file, for messages.
        config: [daemon] and [policy], with the keys of the configuration.
        trace_path: absolute, or empty.
    """

    origin: str
    title: str = ""
    cluster: Cluster = Cluster()
    run: Run = Run()
    load: Load = Load()
    jobs: tuple[Jobs, ...] = ()
    failures: tuple[Failure, ...] = ()
    config: Config = field(default_factory=Config)
    eviction: Eviction | None = None
    choices: Choices | None = None
    compare: Compare | None = None
    sharing: Sharing | None = None
    optimum: Optimum | None = None
    trace_path: str = ""


SECTIONS: Final[dict[str, type[Any]]] = {
    "cluster": Cluster,
    "run": Run,
    "load": Load,
    "eviction": Eviction,
    "choices": Choices,
    "compare": Compare,
    "sharing": Sharing,
    "optimum": Optimum,
}
"""Tables that a file has at most once."""

LISTS: Final[dict[str, type[Any]]] = {"jobs": Jobs, "failures": Failure}
"""Tables that a file has any number of times."""

CONFIG_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "daemon": (
        *("pool", "headroom", "slab", "preallocate_slabs", "consumer_share_max"),
        *("evict_deadline_s", "evict_move_s"),
    ),
    "policy": (
        *("activity_alpha", "memory_beta", "hot_pages_per_s", "choices", "headroom_fraction"),
        *("evict_slabs_max", "evict_extra_slabs", "suspend_s"),
    ),
}
"""Keys of the configuration that a simulation uses."""
