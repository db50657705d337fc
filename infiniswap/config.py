# SPDX-License-Identifier: Apache-2.0
"""Configuration: the only module that reads configuration files and the environment.

Three layers, the later wins: the file (TOML, `/etc/infiniswap/infiniswap.toml` by default), then
`INFINISWAP_SECTION_KEY` environment variables, then command line flags. Keys are the field names
below, where sizes lose their `_bytes` (`slab_bytes` is written `slab = "1G"`). Everything is
checked here, before anything is attached: an unknown key or a value that cannot work raises
ConfigError, which names the key, its origin and the remedy.

Sizes may be written `512M`; lists of addresses are TOML arrays, or comma-separated in the
environment and in flags. In fields that allow it, "auto" is None here.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from infiniswap.config_values import convert, nearest
from infiniswap.errors import ConfigError, UsageError
from infiniswap.fields import LABEL_LENGTH_MAX, is_label
from infiniswap.keys import Keys
from infiniswap.own_code import CODE_OWNER, FAR_VARIABLE, changeable_by, trusted_users
from infiniswap.peers import read_peers
from infiniswap.rights import refused_reading
from infiniswap.secret import (
    CertificateFiles,
    host_keys,
    host_secret_path,
    read_metrics_token,
    read_secret,
)
from infiniswap.toml_lines import key_lines
from infiniswap.units import (
    CONTROL_PORT,
    DATA_PORT,
    GIB,
    METRICS_PORT,
    MIB,
    PAGE_BYTES,
    SIZE_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX,
    HostPort,
    counted,
    format_size,
)

DEFAULT_PATH: Final = Path("/etc/infiniswap/infiniswap.toml")

_ENV_PREFIX = "INFINISWAP_"
_ENV_NOT_KEYS = frozenset({"INFINISWAP_CONFIG", "INFINISWAP_CI", CODE_OWNER, FAR_VARIABLE})
_ENV_OTHERS_PREFIXES = ("INFINISWAP_TEST_", "INFINISWAP_VM")
_CONFIG_FILE_BYTES_MAX = MIB


TRANSPORT_NAMES: Final = ("rdma", "tcp")
"""Best first; each is a class in infiniswap.device.donors.transports."""


def _key(default: Any, kind: str, marks: Mapping[str, str], **meta: object) -> Any:
    """A field that is a key.

    Args:
        default: its value where nothing is configured.
        kind: how it is written: see config_values.
        marks: `live`: the process ("daemon", "device" or "both") that takes a new value over while
            it runs. `only`: the one process that uses the key, in a section that both read.
        meta: what the kind needs.
    """
    return field(default=default, metadata={"kind": kind, **meta, **marks})


def _size(
    default: int | None,
    *,
    low: int = PAGE_BYTES,
    high: int = SIZE_BYTES_MAX,
    multiple: int = PAGE_BYTES,
    auto: bool = False,
    **marks: str,
) -> Any:
    return _key(default, "size", marks, low=low, high=high, multiple=multiple, auto=auto)


def _int(default: int | None, *, low: int, high: int, auto: bool = False, **marks: str) -> Any:
    return _key(default, "int", marks, low=low, high=high, auto=auto)


def _float(default: float, *, low: float, high: float, above: bool = False, **marks: str) -> Any:
    """`above`: low itself is not allowed."""
    return _key(default, "float", marks, low=low, high=high, above=above)


def _choice(default: str, *choices: str, **marks: str) -> Any:
    return _key(default, "choice", marks, choices=choices)


def _bool(default: bool, **marks: str) -> Any:
    return _key(default, "bool", marks)


def _path(default: Path | None, **marks: str) -> Any:
    return _key(default, "path", marks)


def _text(default: str, source: str = "", **marks: str) -> Any:
    """`source`: "file" where neither the environment nor a flag may give it."""
    return _key(default, "text", marks, source=source)


def _address(default: HostPort | None, default_port: int) -> Any:
    """Without a default it may be empty."""
    return _key(default, "address", {}, port=default_port, optional=default is None)


def _addresses(default_port: int, **marks: str) -> Any:
    return _key((), "addresses", marks, port=default_port)


DEVICE_SOCKET: Final = "control.sock"
"""Name of a device's control socket, below device.run_dir/NAME; no other socket's is longer."""
LOCAL_DIR: Final = "local"
"""Directory of daemons' Unix sockets below daemon.run_dir. Where root prepares the run directory
for a daemon that is another user's, this part of it is that user's."""


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """[daemon]: a donor."""

    listen: HostPort = _address(HostPort("127.0.0.1", CONTROL_PORT), CONTROL_PORT)
    """Address of the control API. One that other hosts can reach needs [cluster] secret_file."""
    data_port: int = _int(DATA_PORT, low=0, high=65_535)
    """Port for pages, on the host of `listen`; 0: any free port, told by the control API."""
    pool_bytes: int | None = _size(None, auto=True, live="daemon")
    """Most memory that is lent, in bytes; auto: everything above the headroom."""
    headroom_bytes: int | None = _size(None, low=0, auto=True, live="daemon")
    """Memory kept free for this host's own use, in bytes; auto: policy.headroom_fraction of all."""
    slab_bytes: int = _size(GIB, low=MIB, high=64 * GIB)
    """Unit of lending, in bytes. All hosts of a cluster need the same value."""
    preallocate_slabs: int = _int(2, low=0, high=1024, live="daemon")
    """Free slabs kept ready, which hides the time to allocate and zero a slab."""
    leases_max: int = _int(256, low=1, high=65_536)
    """Most devices served at once; one consumer may have at most half of them."""
    connections_max: int = _int(1024, low=1, high=65_536)
    """Most data connections at once."""
    connections_per_lease_max: int = _int(32, low=1, high=1024)
    """Most data connections of one device."""
    connections_per_host_max: int = _int(128, low=1, high=65_536)
    """Most connections of an address or /64 network, at each of two ports; half as many leases."""
    evict_deadline_s: float = _float(1.0, low=0.01, high=60.0, live="daemon")
    """Seconds that a consumer has to give up an evicted slab; then the donor takes it anyway."""
    evict_move_s: float = _float(3.0, low=0.0, high=600.0, live="daemon")
    """Seconds to move a slab away before evict_deadline_s begins, unless memory is short."""
    drain_move_s: float = _float(60.0, low=0.0, high=3600.0, live="daemon")
    """Seconds that a consumer gets to move a slab to another donor while this donor is drained."""
    consumer_share_max: float = _float(0.5, low=0.0, high=1.0, above=True, live="daemon")
    """Share of the pool that one consumer may keep while another consumer needs memory. A consumer
    is a host: that of its certificate, or else its address. Its tenants divide what it has."""
    lease_grace_s: float = _float(10.0, low=0.0, high=3600.0)
    """Seconds that a lease without session and connections waits for its device."""
    state_dir: Path = _path(Path("/var/lib/infiniswapd"))
    """Directory that records whether this donor is drained, and keeps its certificate and the
    secret of a host that has no other; also the key that seals the keys of stopped devices. Users
    other than root who cannot write there have $XDG_STATE_HOME/infiniswap
    (~/.local/state/infiniswap) instead."""
    run_dir: Path | None = _path(Path("/run/infiniswapd"))
    """Directory of the slabs, where a restarted daemon finds them; empty: they end with it."""
    name: str = _text("")
    """Name of this donor in tables; empty: the host's name."""
    keep_awake: str = _choice("off", "auto", "off", live="daemon")
    """auto: processors stay awake while consumers read; consumers gain, and this host pays."""
    rdma: str = _choice("auto", "auto", "off", live="daemon")
    """auto: consumers that can use RDMA reach the slabs by it; off: every consumer uses TCP."""


@dataclass(frozen=True, slots=True)
class SloConfig:
    """[daemon.slo]: a service of the donor's host that lending must not slow down."""

    command: str = _text("", only="daemon", source="file")
    """Program and arguments, without a shell. It prints the latency of the service, a number, and
    runs as the daemon's user. Only a file that nobody else can change may name it."""
    query: str = _text("", only="daemon")
    """Expression that a Prometheus server evaluates to the latency, in place of `command`."""
    prometheus: str = _text("http://127.0.0.1:9090", only="daemon")
    """Address of that server, http:// or https://."""
    pressure: str = _choice("off", "off", "cpu", "io", "memory", only="daemon")
    """Resource whose pressure (PSI, some avg10) takes the place of a latency, in percent."""
    bound: float = _float(0.0, low=0.0, high=1e12, only="daemon")
    """Bound of the latency, in its unit. Nothing more is lent while the latency is in danger, and
    slabs go back while it is above the bound. 0: no bound is set."""
    settle_s: float = _float(10.0, low=0.1, high=3600.0, only="daemon")
    """Seconds that a change of the lent slabs takes to show in the latency. Raise it above the time
    that a query averages over. A measurement may take half as long."""

    @property
    def is_set(self) -> bool:
        """Whether there is a latency to go by."""
        return bool(self.command or self.query or self.pressure != "off")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """[device]: a consumer's devices."""

    frontend: str = _choice("auto", "auto", "ublk", "nbd", "fuse", "nbd-socket")
    """How the kernel sees a device; auto: the first of ublk, nbd and fuse that this host has."""
    transport: str = _choice("auto", "auto", *TRANSPORT_NAMES)
    """How pages travel to donors; auto: by RDMA where both ends can, else by TCP."""
    backup_dir: Path = _path(Path("/var/lib/infiniswap"))
    """Directory of the NAME.backup files."""
    run_dir: Path = _path(Path("/run/infiniswap"))
    """Directory that records running devices."""
    slab_bytes: int = _size(GIB, low=MIB, high=64 * GIB)
    """Unit of mapping, in bytes. It has to equal daemon.slab of the donors."""
    staging_bytes: int = _size(64 * MIB, low=MIB, high=64 * GIB)
    """Buffers for pages on their way, in bytes."""
    request_bytes: int = _size(MIB, low=PAGE_BYTES, high=32 * MIB)
    """Largest request, in bytes."""
    requests_max: int = _int(128, low=1, high=4096)
    """Most requests in flight."""
    backup_write_bytes: int = _size(MIB, low=PAGE_BYTES, high=MIB)
    """Largest merged backup write, in bytes."""
    backup_writers: int = _int(2, low=1, high=8)
    """Threads that write the backup."""
    backup_readers: int = _int(4, low=1, high=8)
    """Threads that read the backup."""
    queues: int = _int(2, low=1, high=16)
    """Connections to each donor."""
    refill_pages_per_s: float = _float(262_144.0, low=0.0, high=1e9, live="device")
    """Highest rate of copies from the backup to a slab's new donor, in the background; 0: none."""
    connect_ms: int = _int(3_000, low=10, high=60_000, live="device")
    """Time to connect to a donor's data port, in milliseconds."""
    request_ms: int = _int(2_000, low=10, high=60_000, live="device")
    """Milliseconds that a donor has to answer for a page; then it counts as unreachable."""
    hedge_ms: int = _int(10, low=0, high=60_000)
    """After this delay, in milliseconds, and at least four times the donor's recent delay, a page
    is also read from the backup. 0 turns that off."""
    priority: int | None = _int(None, low=0, high=32_767, auto=True)
    """Priority of the swap area; auto: above every active area."""
    keep_awake: str = _choice("auto", "auto", "off", live="device")
    """auto: processors stay awake while pages come in (infiniswap.system.keep_awake)."""
    group: str = _text("infiniswap")
    """Group whose members may run jobs on a declared device without root; empty: nobody may."""
    seal: bool = _bool(True)
    """true: pages are sealed (AES-256-GCM) before they leave the device's process, so that donors,
    the network and the backup have nothing to read, and a page that was changed is noticed."""
    tenant: str = _text("")
    """Account of this host's devices at donors. The tenants of a host divide its share equally.
    Empty: devices without a tenant are one together."""
    tell_user: bool = _bool(True)
    """true: donors are told the name of a job's program and who has started the device."""
    standby: str = _choice("on", "on", "off")
    """on: a second process is ready, locked in memory, and takes over when the device's dies."""
    metrics_listen: HostPort | None = _address(None, METRICS_PORT)
    """Address at which a device that is not one job's own serves /metrics over TLS; empty: only on
    its Unix socket. It needs [cluster] metrics_token_file or ca_file."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """[cluster]: who belongs together."""

    peers: tuple[HostPort, ...] = _addresses(CONTROL_PORT, live="device", only="device")
    """Control addresses of the donors."""
    peers_file: Path | None = _path(None, only="device")
    """File with more addresses of donors, one a line. Devices read it again when it changes."""
    discovery: str = _choice("static", "static", "mqtt")
    """mqtt: donors announce themselves on a broker, and devices find them there as well."""
    name: str = _text("default")
    """Name that tells apart the clusters on one broker."""
    secret_file: Path | None = _path(None, live="both")
    """File of mode 0600 that `infiniswap init --secret` made, the same on every host."""
    second_secret_file: Path | None = _path(None, live="both")
    """Another such file, whose secret is accepted as well while a cluster changes its secret."""
    ca_file: Path | None = _path(None)
    """File with the certificates of the authorities that sign those of this cluster's hosts. With
    it both ends of a session show certificates, and there is no cluster secret."""
    certificate_file: Path | None = _path(None)
    """File of this host's certificate, followed by those between it and the authority, if any."""
    key_file: Path | None = _path(None)
    """File of mode 0600 with the key of this host's certificate."""
    metrics_token_file: Path | None = _path(None)
    """File of mode 0600 with a token of 16 bytes or more that opens metrics and nothing else."""
    ask_s: float = _float(2.0, low=0.05, high=60.0, only="device")
    """Seconds that a donor has to answer a question."""
    heartbeat_s: float = _float(1.0, low=0.05, high=60.0, only="daemon")
    """Time between heartbeats on a control session, in seconds; the donor's value counts."""
    heartbeats_missed_max: int = _int(5, low=1, high=100, only="daemon")
    """Missed heartbeats that end a control session."""

    @property
    def trust_file(self) -> Path | None:
        """What decides who belongs to the cluster; None: it is this host alone."""
        return self.secret_file or self.ca_file


@dataclass(frozen=True, slots=True)
class MqttConfig:
    """[mqtt]: the broker, where cluster.discovery = "mqtt"."""

    broker: HostPort | None = _address(None, 0)
    """Address of the broker. Port 0 means 1883, or 8883 with TLS."""
    protocol: str = _choice("auto", "auto", "5", "3.1.1")
    """auto: 5, and 3.1.1 with a broker that refuses 5."""
    username: str = _text("")
    """User name at the broker; empty: none."""
    password_file: Path | None = _path(None)
    """File of mode 0600 with the password."""
    tls: str = _choice("off", "on", "off")
    """on: the broker must have a valid certificate."""
    ca_file: Path | None = _path(None)
    """File of the authorities whose certificates are valid; empty: those that the system trusts."""
    cert_file: Path | None = _path(None)
    """File of this host's certificate, for a broker that asks for one."""
    key_file: Path | None = _path(None)
    """File of the key of this host's certificate."""
    keepalive_s: int = _int(15, low=2, high=3600)
    """Seconds; the broker withdraws a host that is silent for one and a half times as long."""
    announce_s: float = _float(60.0, low=1.0, high=3600.0)
    """Time after which a donor repeats its announcement, in seconds."""
    telemetry_s: float = _float(10.0, low=0.0, high=3600.0)
    """Time between publications of a donor's memory figures, in seconds; 0: none."""
    advertise: tuple[HostPort, ...] = _addresses(CONTROL_PORT)
    """Addresses at which others reach this donor; empty: daemon.listen, or for a wildcard the
    address that leads to the broker."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """[policy]: the paper's parameters."""

    period_s: float = _float(1.0, low=0.01, high=60.0, live="device")
    """Period of every moving average and of the control loops, in seconds."""
    activity_alpha: float = _float(0.2, low=0.0, high=1.0, above=True, live="device", only="device")
    """Weight of the newest period in a slab's activity."""
    memory_beta: float = _float(0.2, low=0.0, high=1.0, above=True, only="daemon")
    """Weight of the newest period in a donor's memory use."""
    hot_pages_per_s: float = _float(20.0, low=0.0, high=1e9, live="device", only="device")
    """Page I/O per second above which an unmapped slab is mapped."""
    choices: int = _int(2, low=1, high=16, live="device", only="device")
    """Donors asked per placement."""
    headroom_fraction: float = _float(0.125, low=0.0, high=0.9, live="daemon", only="daemon")
    """Share of all memory that is kept free where daemon.headroom is auto (8 GiB of 64)."""
    evict_slabs_max: int = _int(16, low=1, high=1024, live="daemon", only="daemon")
    """Most mapped slabs that one batch evicts (E). The missing memory decides how many are evicted
    in all."""
    evict_extra_slabs: int | None = _int(
        None, low=0, high=1024, auto=True, live="daemon", only="daemon"
    )
    """Slabs beyond E that are asked for their activity (E′, at most E); auto: as many as E."""
    suspend_s: float = _float(2.0, low=0.0, high=600.0, live="device", only="device")
    """Seconds that an unreachable donor has to come back before its slabs are given up."""


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration. Made by load()."""

    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    mqtt: MqttConfig = field(default_factory=MqttConfig)

    def section(self, name: str) -> Any:
        """The section of that name: `daemon.slo` is the attribute `slo`."""
        return getattr(self, attribute(name))

    def keys(self) -> Keys | None:
        """The keys of the cluster secret; where none is configured, of this host's own, if there is
        one and this user may read it. None where certificates take their place.

        Raises:
            ConfigError: see read_secret.
        """
        if self.cluster.ca_file is not None:
            return None
        path, state_dir = self.cluster.secret_file, self.daemon.state_dir
        return host_keys(state_dir) if path is None else read_secret(path, state_dir)

    def second_keys(self) -> Keys | None:
        """The keys of the second secret; None where none is configured.

        Raises:
            ConfigError: see read_secret.
        """
        path = self.cluster.second_secret_file
        return None if path is None else read_secret(path)

    def certificates(self) -> CertificateFiles | None:
        """The files of this host's certificate; None: the cluster has a secret in place of it."""
        cluster = self.cluster
        if cluster.ca_file is None or cluster.certificate_file is None or cluster.key_file is None:
            return None
        return CertificateFiles(cluster.ca_file, cluster.certificate_file, cluster.key_file)

    def secret_file(self) -> Path | None:
        """The file whose keys `keys` returns."""
        if self.cluster.ca_file is not None:
            return None
        path = host_secret_path(self.daemon.state_dir)
        return self.cluster.secret_file or (path if os.path.exists(path) else None)

    def peers(self) -> tuple[HostPort, ...]:
        """The donors that are named: by `cluster.peers`, and by the file as it is now.

        Raises:
            ConfigError: see read_peers.
        """
        path = self.cluster.peers_file
        found = () if path is None else read_peers(path)
        return tuple(dict.fromkeys((*self.cluster.peers, *found)))

    def metrics_token(self) -> bytes | None:
        """The token that a Prometheus server shows, None where none is configured.

        Raises:
            ConfigError: see read_secret.
        """
        return read_metrics_token(self.cluster.metrics_token_file)


SECTIONS: Final[Mapping[str, type[Any]]] = {
    "daemon": DaemonConfig,
    "daemon.slo": SloConfig,
    "device": DeviceConfig,
    "cluster": ClusterConfig,
    "policy": PolicyConfig,
    "mqtt": MqttConfig,
}
"""The sections of the file, and the class of each."""


def attribute(section: str) -> str:
    """The attribute of Config that has a section."""
    return section.rpartition(".")[2]


def key_name(entry: dataclasses.Field[Any]) -> str:
    """How a field is called in the file."""
    return entry.name.removesuffix("_bytes") if entry.metadata["kind"] == "size" else entry.name


def entries() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """Every key as `section.key`, its section and its field, in the order of the classes."""
    for section, kind in SECTIONS.items():
        for entry in dataclasses.fields(kind):
            yield f"{section}.{key_name(entry)}", section, entry


def known_keys() -> tuple[str, ...]:
    """Every key as `section.key`, in the order of the classes."""
    return tuple(key for key, _, _ in entries())


def env_name(key: str) -> str:
    """The environment variable of `section.key`."""
    return _ENV_PREFIX + key.replace(".", "_").upper()


Refuse = Callable[[ConfigError], None]
"""Gets each mistake: raises it, or keeps it and lets the reading go on."""


def _raise(error: ConfigError) -> NoReturn:
    raise error


def load(
    path: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Reads and checks the configuration.

    Args:
        path: the file; None: INFINISWAP_CONFIG, else DEFAULT_PATH if that exists.
        overrides: from flags, `section.key` to a value or its text. None values are left out.
        environ: None: the process's own.

    Raises:
        ConfigError: unreadable file, unknown key, value that cannot work.
    """
    values = _gather(path, overrides, environ, _raise)
    config = _make(values)
    for error in check_together(config):
        raise error
    return config


def check(
    path: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Config | None, list[ConfigError]]:
    """Reads the configuration as load does, and finds every mistake, not only the first.

    Returns:
        The configuration and the mistakes. Where a value is wrong there is no configuration, and
        whether values go together is not checked.
    """
    errors: list[ConfigError] = []
    values = _gather(path, None, environ, errors.append)
    if errors:
        return None, errors
    config = _make(values)
    return config, list(check_together(config))


def file_path(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """The file that load would read, there or not."""
    env = os.environ if environ is None else environ
    return path or Path(env.get("INFINISWAP_CONFIG") or DEFAULT_PATH)


def _gather(
    path: Path | None,
    overrides: Mapping[str, object] | None,
    environ: Mapping[str, str] | None,
    refuse: Refuse,
) -> dict[str, Any]:
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    _add_file(values, path, env, refuse)
    _add_environment(values, env, refuse)
    for key, value in (overrides or {}).items():
        if value is not None:
            _add(values, key, value, "command line", refuse)
    if (own := _own_state_dir(env)) is not None:
        values.setdefault("daemon.state_dir", own)
    return values


def _own_state_dir(env: Mapping[str, str]) -> Path | None:
    """Where a daemon of an ordinary user keeps its state; None: in the default directory. See the
    XDG Base Directory Specification, version 0.8."""
    if os.geteuid() == 0 or os.access(DaemonConfig().state_dir, os.W_OK):
        return None
    home = env.get("HOME", "")
    base = env.get("XDG_STATE_HOME") or os.path.join(home, ".local/state")
    return Path(base, "infiniswap") if os.path.isabs(base) else None


def _make(values: Mapping[str, Any]) -> Config:
    fields: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, section, entry in entries():
        if key in values:
            fields[section][entry.name] = values[key]
    made = {attribute(section): kind(**fields[section]) for section, kind in SECTIONS.items()}
    return Config(**made)


def _add_file(
    values: dict[str, Any], path: Path | None, env: Mapping[str, str], refuse: Refuse
) -> None:
    required = path is not None or bool(env.get("INFINISWAP_CONFIG"))
    path = file_path(path, env)
    try:
        text = _read(path, required=required)
        table = tomllib.loads(text)
    except ConfigError as error:
        refuse(error)
        return
    except tomllib.TOMLDecodeError as error:
        refuse(_not_toml(path, error))
        return
    lines = key_lines(text)

    def where(key: str) -> str:
        return f"{path}, line {lines[key]}" if key in lines else str(path)

    for section, content in _sections(table):
        if section not in SECTIONS:
            what = (
                f"unknown section [{section}]"
                if isinstance(content, dict)
                else f"unknown key {section!r} outside of any section"
            )
            mend = nearest(section, tuple(SECTIONS), "section")
            refuse(ConfigError(what, where=where(section), mend=mend))
        elif not isinstance(content, dict):
            what, mend = f"{section!r} is a section, not a key", f"Write [{section}] on a line"
            refuse(ConfigError(what, where=where(section), mend=f"{mend} of its own."))
        else:
            for key, value in content.items():
                name = f"{section}.{key}"
                _add(values, name, value, where(name if name in lines else section), refuse)
    for key, _, entry in entries():
        if not values.get(key) or entry.metadata.get("source") != "file":
            continue
        if why := changeable_by(path.absolute(), {os.geteuid()} | trusted_users(env)):
            refuse(_not_trusted(key, why, where(key)))


def _sections(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tables of a file. One inside of another, like [daemon.slo], is one of its own."""
    for section, content in table.items():
        if not isinstance(content, dict):
            yield section, content
            continue
        inner = [key for key in content if f"{section}.{key}" in SECTIONS]
        yield section, {key: value for key, value in content.items() if key not in inner}
        yield from ((f"{section}.{key}", content[key]) for key in inner)


def _not_trusted(key: str, why: str, where: str) -> ConfigError:
    return ConfigError(
        f"{key} names a program, and others can change this file: {why}",
        where=where,
        mend="Let the file and the directories that lead to it belong to root, writable by root "
        "alone.",
    )


def _read(path: Path, *, required: bool) -> str:
    """The text of a file; nothing where there is none and none is required."""
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if not required:
            return ""
        raise ConfigError(
            "no such configuration file", where=str(path), mend="Check the path given."
        ) from None
    except PermissionError as error:
        what, mend = refused_reading(path, "the configuration")
        raise ConfigError(what, where=str(path), mend=mend) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration: {error.strerror}",
            where=str(path),
            mend="Name a file that can be read.",
        ) from error
    if len(raw) > _CONFIG_FILE_BYTES_MAX:
        raise ConfigError("larger than 1 MiB: not a configuration file", where=str(path))
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        why = f"not text (byte {error.start} is no UTF-8)"
        raise _not_toml(path, why) from None


def _not_toml(path: Path, why: object) -> ConfigError:
    return ConfigError(f"not valid TOML: {why}", where=str(path), mend="Correct that line.")


def _add_environment(values: dict[str, Any], env: Mapping[str, str], refuse: Refuse) -> None:
    names = {env_name(key): key for key in known_keys()}
    only_in_file = {key for key, _, entry in entries() if entry.metadata.get("source") == "file"}
    for name, value in sorted(env.items()):
        if not name.startswith(_ENV_PREFIX) or name in _ENV_NOT_KEYS:
            continue
        if name.startswith(_ENV_OTHERS_PREFIXES):
            continue
        if names.get(name) in only_in_file:
            mend = f"Write {names[name]} into {DEFAULT_PATH}."
            refuse(ConfigError(f"{name} cannot name a program", where="environment", mend=mend))
        elif name in names:
            _add(values, names[name], value, f"environment variable {name}", refuse)
        else:
            mend = nearest(name, tuple(names), "variable")
            refuse(ConfigError(f"unknown variable {name}", where="environment", mend=mend))


def _add(values: dict[str, Any], key: str, value: object, origin: str, refuse: Refuse) -> None:
    section, _, name = key.rpartition(".")
    kind = SECTIONS.get(section)
    entries = {key_name(entry): entry for entry in dataclasses.fields(kind)} if kind else {}
    if name not in entries:
        known = tuple(f"{section}.{entry}" for entry in entries) or known_keys()
        mend = nearest(key, known, "key")
        refuse(ConfigError(f"unknown key {key}", where=origin, mend=mend))
        return
    try:
        values[key] = convert(value, entries[name].metadata)
    except UsageError as error:
        refuse(ConfigError(f"{key}: {error.what}", where=origin, mend=error.mend))


def check_together(config: Config) -> Iterator[ConfigError]:
    """Finds mistakes that no single key shows."""
    daemon, device = config.daemon, config.device
    if daemon.pool_bytes is not None and daemon.pool_bytes < daemon.slab_bytes:
        yield ConfigError(
            f"daemon.pool ({format_size(daemon.pool_bytes)}) is smaller than one slab "
            f"({format_size(daemon.slab_bytes)})",
            mend="Lend at least one slab, or make the slab smaller.",
        )
    if daemon.connections_per_lease_max > daemon.connections_max:
        yield ConfigError(
            "daemon.connections_per_lease_max is above daemon.connections_max",
            mend="Lower the first or raise the second.",
        )
    for key, value in (
        ("request", device.request_bytes),
        ("backup_write", device.backup_write_bytes),
    ):
        if value > device.staging_bytes // 2:
            yield ConfigError(
                f"device.{key} ({format_size(value)}) is more than half of device.staging "
                f"({format_size(device.staging_bytes)})",
                mend=f"Raise device.staging to {format_size(2 * value)} or more.",
            )
    yield from _check_ports(config)
    yield from _check_socket_paths(device.run_dir)
    for section, key in (("device", "backup_dir"), ("device", "run_dir"), ("daemon", "state_dir")):
        if getattr(getattr(config, section), key) is None:
            yield ConfigError(f"{section}.{key} is empty", mend="Give an absolute path.")
    if not is_label(device.tenant):
        yield ConfigError(
            f"device.tenant: {device.tenant!a} cannot be the name of a tenant",
            mend=f"Use up to {LABEL_LENGTH_MAX} printable characters, with no space at an end.",
        )
    yield from _check_slo(config.slo)
    yield from _check_trust(config.cluster)
    yield from _check_mqtt(config)


def _check_ports(config: Config) -> Iterator[ConfigError]:
    """Two services of this host cannot have one port on one address."""
    daemon, metrics = config.daemon, config.device.metrics_listen
    if daemon.data_port and daemon.data_port == daemon.listen.port:
        yield ConfigError(
            f"daemon.data_port is {daemon.data_port}, which is the port of daemon.listen too",
            mend=f"Give pages another port, for example {daemon.listen.port % 65_535 + 1}.",
        )
    if metrics is None or not (
        metrics.host == daemon.listen.host or metrics.is_wildcard or daemon.listen.is_wildcard
    ):
        return
    for key, port in (("listen", daemon.listen.port), ("data_port", daemon.data_port)):
        if metrics.port and metrics.port == port:
            yield ConfigError(
                f"device.metrics_listen ({metrics}) has the port of daemon.{key}",
                mend=f"Give it another port, for example {METRICS_PORT}.",
            )


def _check_socket_paths(run_dir: Path) -> Iterator[ConfigError]:
    """Longer names of devices may still be too long: see device.spec.rundir."""
    over = len(os.fsencode(f"{run_dir}/n/{DEVICE_SOCKET}")) - SOCKET_PATH_BYTES_MAX
    if over > 0:
        yield ConfigError(
            f"device.run_dir is {counted(over, 'byte')} too long: with the name of a device and "
            f"its socket, its path may have {SOCKET_PATH_BYTES_MAX} bytes",
            where=str(run_dir),
            mend="Name a directory with a shorter path, such as /run/infiniswap.",
        )


def _check_slo(slo: SloConfig) -> Iterator[ConfigError]:
    named = [key for key in ("command", "query") if getattr(slo, key)]
    named += ["pressure"] if slo.pressure != "off" else []
    if len(named) > 1:
        yield ConfigError(
            f"daemon.slo.{named[0]} and daemon.slo.{named[1]} exclude each other",
            mend="Keep the one that shows the latency of the service.",
        )
    if bool(named) != (slo.bound > 0.0):
        which, other = (f"daemon.slo.{named[0]}", "bound") if named else ("daemon.slo.bound", "")
        yield ConfigError(
            f"{which} needs {'`bound`' if other else 'a latency'} under [daemon.slo]",
            mend=f"Set {'it' if other else '`command`, `query` or `pressure` there'}.",
        )
    try:
        words = shlex.split(slo.command)
    except ValueError as error:
        yield ConfigError(f"daemon.slo.command: {error}", mend="Close the quotation marks.")
        words = []
    if words and not words[0].startswith("/"):
        yield ConfigError(
            f"daemon.slo.command: {words[0]!a} is not an absolute path",
            mend="Write the program's whole path; it gets no shell.",
        )
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", slo.prometheus):
        yield ConfigError(
            f"daemon.slo.prometheus: {slo.prometheus!a} is not the address of a server",
            mend='Write for example "http://127.0.0.1:9090".',
        )


def _check_trust(cluster: ClusterConfig) -> Iterator[ConfigError]:
    names = ("ca_file", "certificate_file", "key_file")
    absent = [name for name in names if getattr(cluster, name) is None]
    if absent == list(names):
        return
    if absent:
        yield ConfigError(
            f"cluster.{absent[0]} is not set, and ca_file, certificate_file and key_file belong "
            "together",
            mend="Set all three under [cluster], or none of them.",
        )
    for name in ("secret_file", "second_secret_file"):
        if getattr(cluster, name) is not None:
            yield ConfigError(
                f"cluster.{name} and cluster.ca_file exclude each other: a cluster has a secret or "
                "certificates",
                mend="Remove one of them, the same one on every host.",
            )


def _check_mqtt(config: Config) -> Iterator[ConfigError]:
    mqtt = config.mqtt
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", config.cluster.name):
        yield ConfigError(
            f"cluster.name: {config.cluster.name!a} cannot be part of a topic",
            mend="Use up to 64 letters, digits, `_`, `-` and `.`.",
        )
    for key, needed, is_there in (
        ("broker", 'cluster.discovery = "mqtt"', config.cluster.discovery != "mqtt" or mqtt.broker),
        ("username", "mqtt.password_file", not mqtt.password_file or mqtt.username),
        ("key_file", "mqtt.cert_file", not mqtt.cert_file or mqtt.key_file),
        ("cert_file", "mqtt.key_file", not mqtt.key_file or mqtt.cert_file),
        ('tls = "on"', "mqtt.ca_file", not mqtt.ca_file or mqtt.tls == "on"),
        ('tls = "on"', "mqtt.cert_file", not mqtt.cert_file or mqtt.tls == "on"),
    ):
        if not is_there:
            yield ConfigError(f"{needed} needs `{key}` under [mqtt]", mend="Set it.")
