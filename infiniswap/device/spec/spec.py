# SPDX-License-Identifier: Apache-2.0
"""What a device is: everything its process must know, checked before anything is attached."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from infiniswap.config import (
    ClusterConfig,
    Config,
    DaemonConfig,
    DeviceConfig,
    MqttConfig,
    PolicyConfig,
    key_name,
)
from infiniswap.control.messages import LeaseUse
from infiniswap.control.roles import Role
from infiniswap.control.text import clean_text
from infiniswap.errors import ConfigError, UsageError, not_utf8
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.secret import check_metrics_listen, host_key_path
from infiniswap.units import MIB, PAGE_BYTES, HostPort, counted, format_size

NAME_LENGTH_MAX: Final = 32
FAR_BLOCK_BYTES: Final = 2 * MIB
"""What far memory moves at once: far_bytes is a multiple of it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


class StartedBy(Struct, frozen=True, kw_only=True):
    """For whom a device was started.

    Attributes:
        job: name of the program of a `run`; empty: the device is no single job's.
        user, uid: who called the command, also under sudo; empty and None: not known.
    """

    job: str = ""
    user: str = ""
    uid: int | None = None


class DeviceSpec(Struct, frozen=True, kw_only=True):
    """A device as it was asked for; sizes in bytes.

    Attributes:
        device_id: UUID, the same over restarts.
        size_bytes: of the block device, which is the swap area.
        far_bytes: for far memory of the job, beside the block device; 0: it has none.
        config: with the device's own values, see with_own_values; of [daemon] only state_dir is
            used, where this host's own secret may lie.
        backup: file or block device; None is `--backup none`.
        backup_owned: the file was made by us, `remove` deletes it.
        swap: whether it is used as swap space.
        ephemeral: ends with the last `run` that uses it, contents and all.
        owner_pid: of the `run` that starts it, None otherwise.
        discard_contents: begin with zeros whatever was kept; never recorded.
        config_file: as named at the start; None: wherever the configuration is looked for.
        flags: values that override the configuration whenever it is read again, `section.key` to
            text: those of the command line, and the device's own.
        host_key_file: with which the key of a device that keeps its contents is sealed; empty: the
            record of a release without sealed pages.
        started_by: for whom.
        needs_donors: whether one must answer at the start.
    """

    name: str
    device_id: str
    size_bytes: int
    config: Config
    backup: str | None
    backup_owned: bool
    swap: bool
    ephemeral: bool
    owner_pid: int | None
    discard_contents: bool = False
    config_file: str | None = None
    flags: dict[str, str] = {}
    host_key_file: str = ""
    started_by: StartedBy = StartedBy()
    needs_donors: bool = True
    far_bytes: int = 0

    @property
    def use(self) -> LeaseUse:
        """What donors are told of it."""
        device, by = self.config.device, self.started_by
        if not device.tell_user:
            return LeaseUse(tenant=device.tenant)
        return LeaseUse(job=by.job, user=by.user, uid=by.uid, tenant=device.tenant)

    @property
    def swap_slabs(self) -> int:
        """Slabs of the block device; the last may be cut short."""
        return -(-self.size_bytes // self.config.device.slab_bytes)

    @property
    def engine_bytes(self) -> int:
        """What slabs, backup and tables cover: the block device, and behind it, from the next
        slab on, far memory."""
        if not self.far_bytes:
            return self.size_bytes
        return self.swap_slabs * self.config.device.slab_bytes + self.far_bytes

    @property
    def slab_count(self) -> int:
        """Slabs of block device and far memory; the last may be cut short."""
        return -(-self.engine_bytes // self.config.device.slab_bytes)

    @property
    def has_metrics_port(self) -> bool:
        """Whether it serves metrics at a port. A job's own device does not: two jobs at once would
        be in each other's way."""
        return self.config.device.metrics_listen is not None and not self.ephemeral


class _Record(Struct, frozen=True, kw_only=True):
    """A spec as JSON: in files, and as devices of every release read it from each other.

    Release 0.1 reads slab_bytes, frontend, transport and priority here, not in `config`, and does
    not write `seal`: its pages are plain.
    """

    name: str
    device_id: str
    size_bytes: Annotated[int, Meta(gt=0)]
    slab_bytes: Annotated[int, Meta(gt=0)]
    donors: tuple[HostPort, ...]
    frontend: str
    transport: str
    backup: str | None
    backup_owned: bool
    swap: bool
    priority: int | None
    ephemeral: bool
    owner_pid: int | None
    secret_file: Path | None
    config: DeviceConfig
    policy: PolicyConfig
    ask_s: float
    discard_contents: bool = False
    peers_file: Path | None = None
    mqtt: MqttConfig | None = None
    cluster: str = "default"
    config_file: str | None = None
    flags: dict[str, str] = {}
    metrics_token_file: Path | None = None
    second_secret_file: Path | None = None
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    seal: bool = False
    host_key_file: str = ""
    started_by: StartedBy = StartedBy()
    needs_donors: bool = True
    far_bytes: Annotated[int, Meta(ge=0)] = 0
    state_dir: Path = DaemonConfig().state_dir


_SPEC_FIELDS: Final = frozenset(DeviceSpec.__struct_fields__) - {"config"}
_CLUSTER_FIELDS: Final = (
    "secret_file",
    "second_secret_file",
    "ca_file",
    "certificate_file",
    "key_file",
    "peers_file",
    "metrics_token_file",
    "ask_s",
)
_TRUST_FIELDS: Final = ("secret_file", "ca_file", "certificate_file", "key_file")
_DONOR_FIELDS: Final = ("peers", "peers_file", "discovery", "name")
_DEVICE_FIELDS: Final = ("slab_bytes", "frontend", "transport", "priority", "seal")


def with_own_values(spec: DeviceSpec, **values: Any) -> DeviceSpec:
    """Gives a device its own values of [device], which stay whatever the configuration says later.

    Args:
        spec: the device.
        values: fields of DeviceConfig.
    """
    device = spec.config.device
    own = {
        f"device.{key_name(entry)}": values[entry.name]
        for entry in dataclasses.fields(device)
        if entry.name in values and values[entry.name] != getattr(device, entry.name)
    }
    flags = {key: _flag(value) for key, value in own.items()}
    config = dataclasses.replace(spec.config, device=dataclasses.replace(device, **values))
    return msgspec.structs.replace(spec, config=config, flags={**spec.flags, **flags})


def _flag(value: object) -> str:
    """A value as the configuration reads it."""
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_donors(config: Config) -> bool:
    """Whether the configuration says where donors are found."""
    cluster = config.cluster
    return bool(cluster.peers or cluster.peers_file or cluster.discovery == "mqtt")


def completed(config: Config, before: Config) -> Config:
    """A configuration in which donors and secret that it does not name are as they were before."""
    daemon, cluster, mqtt, old = config.daemon, config.cluster, config.mqtt, before.cluster
    unnamed: tuple[str, ...] = ()
    if cluster.trust_file is None:
        unnamed = _TRUST_FIELDS
        # The secret may be that host's own, which is known by its directory.
        daemon = dataclasses.replace(daemon, state_dir=before.daemon.state_dir)
    if not names_donors(config):
        unnamed += _DONOR_FIELDS
        mqtt = before.mqtt if old.discovery == "mqtt" else mqtt
    cluster = dataclasses.replace(cluster, **{name: getattr(old, name) for name in unnamed})
    return dataclasses.replace(config, daemon=daemon, cluster=cluster, mqtt=mqtt)


def host_key_file(config: Config) -> str:
    """See DeviceSpec."""
    return str(host_key_path(config.device.backup_dir))


def with_secret_file(config: Config) -> Config:
    """A configuration that names the secret's file also where that is this host's own, so that a
    device keeps to the secret that it was started with."""
    cluster = dataclasses.replace(config.cluster, secret_file=config.secret_file())
    return dataclasses.replace(config, cluster=cluster)


def source_fields(config_file: str | None, flags: Mapping[str, object]) -> dict[str, Any]:
    """Fields of a spec that say where a device reads its configuration again.

    Args:
        config_file: as named on the command line.
        flags: of the command line, `section.key` to value; None: not given.
    """
    return {
        "config_file": None if config_file is None else os.path.abspath(config_file),
        "flags": {
            key: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for key, value in flags.items()
            if value is not None
        },
    }


def is_name(name: str) -> bool:
    """Whether a device may have that name."""
    return len(name) <= NAME_LENGTH_MAX and bool(_NAME.match(name))


def check_name(name: str) -> str:
    """A device name: it becomes part of file names.

    Raises:
        UsageError: it cannot be one.
    """
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot be a device name",
            mend=f"Use up to {NAME_LENGTH_MAX} letters, digits, `_`, `-` and `.`, beginning with "
            "a letter or digit.",
        )
    return name


def check_size(size_bytes: int, slab_bytes: int, far_bytes: int = 0) -> None:
    """Refuses sizes that no engine could serve.

    Args:
        size_bytes: of the block device.
        slab_bytes: of a slab.
        far_bytes: for far memory.

    Raises:
        UsageError: not a multiple of a page, or more slabs than a lease may have.
    """
    if size_bytes <= 0 or size_bytes % PAGE_BYTES:
        raise UsageError(
            f"device size {size_bytes} is not a multiple of a page ({PAGE_BYTES} bytes)",
            mend="Write for example --size 4G.",
        )
    slabs = -(-size_bytes // slab_bytes) + -(-far_bytes // slab_bytes)
    if slabs > 16_384:
        beside = f" with {format_size(far_bytes)} of far memory" if far_bytes else ""
        raise UsageError(
            f"a device of {format_size(size_bytes)}{beside} has {counted(slabs, 'slab')} of "
            f"{format_size(slab_bytes)}; 16384 are possible",
            mend="Use a smaller device, or larger slabs on all hosts.",
        )


def check_backup_choice(backup: str | None, swap: bool, allow_data_loss: bool) -> None:
    """`--backup none` loses data with a donor; for swap that kills programs.

    Raises:
        UsageError: it was not confirmed.
    """
    if backup is None and swap and not allow_data_loss:
        raise UsageError(
            "--backup none with swap: when a donor is lost, so are the programs whose memory it "
            "held",
            mend="Leave --backup out (a file on the local disk is the default), or confirm with "
            "--allow-data-loss.",
        )


def named_text(spec: DeviceSpec) -> str:
    """Names its donors for people."""
    cluster = spec.config.cluster
    named = [str(place) for place in (*cluster.peers, cluster.peers_file) if place is not None]
    if cluster.discovery == "mqtt":
        named.append(f"those at broker {spec.config.mqtt.broker}")
    return ", ".join(named)


def check_files(config: Config) -> None:
    """Reads the files with secrets and certificates that a device needs.

    Raises:
        ConfigError: one cannot be used; told before anything is attached.
    """
    from infiniswap.control.access import check_credentials

    listen = config.device.metrics_listen
    check_credentials(config, Role.CONSUMER, serves=listen is not None)
    check_metrics_listen(listen, config.metrics_token(), config.cluster.ca_file)


def _encode_hook(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_hook(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(f"cannot decode {kind.__name__}")


def encode_spec(spec: DeviceSpec) -> bytes:
    """As JSON."""
    config, cluster = spec.config, spec.config.cluster
    record = _Record(
        **{name: getattr(spec, name) for name in _SPEC_FIELDS},
        **{name: getattr(cluster, name) for name in _CLUSTER_FIELDS},
        **{name: getattr(config.device, name) for name in _DEVICE_FIELDS},
        config=config.device,
        policy=config.policy,
        donors=cluster.peers,
        cluster=cluster.name,
        state_dir=config.daemon.state_dir,
        mqtt=config.mqtt if cluster.discovery == "mqtt" else None,
    )
    try:
        return msgspec.json.encode(record, enc_hook=_encode_hook)
    except UnicodeEncodeError as error:
        raise not_utf8(error.object) from None


def decode_spec(data: bytes, where: str) -> DeviceSpec:
    """Reads what encode_spec wrote, in this or an older release.

    Raises:
        ConfigError: damaged, or written by another release.
    """
    try:
        record = decode_json(data, _Record, _decode_hook)
    except NotJsonError as error:
        raise ConfigError(
            f"the record of this device cannot be read ({clean_text(str(error))})",
            where=where,
            mend="It was written by another release or is damaged; remove the file once no "
            "device of that name runs.",
        ) from error
    cluster = ClusterConfig(
        **{name: getattr(record, name) for name in _CLUSTER_FIELDS},
        peers=record.donors,
        name=record.cluster,
        discovery="static" if record.mqtt is None else "mqtt",
    )
    mqtt = record.mqtt or MqttConfig()
    config = Config(
        daemon=DaemonConfig(state_dir=record.state_dir),
        device=record.config,
        policy=record.policy,
        cluster=cluster,
        mqtt=mqtt,
    )
    spec = DeviceSpec(**{name: getattr(record, name) for name in _SPEC_FIELDS}, config=config)
    return with_own_values(spec, **{name: getattr(record, name) for name in _DEVICE_FIELDS})
