# SPDX-License-Identifier: Apache-2.0
"""What a device is: everything its process must know, checked before anything is attached."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from infiniswap.config import Config, DeviceConfig, MqttConfig, PolicyConfig, check_metrics_listen
from infiniswap.control.text import clean_text
from infiniswap.errors import ConfigError, UsageError
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.units import PAGE_BYTES, HostPort, format_size

NAME_LENGTH_MAX: Final = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")

Positive = Annotated[int, Meta(gt=0)]


class DeviceSpec(Struct, frozen=True, kw_only=True):
    """A device as it was asked for; sizes in bytes.

    Attributes:
        device_id: UUID, the same over restarts.
        donors: control addresses.
        backup: file or block device; None is `--backup none`.
        backup_owned: the file was made by us, `remove` deletes it.
        swap: is to be used as swap space.
        priority: of the swap area; None: above every active one.
        ephemeral: ends with the last `run` that uses it, contents and all.
        owner_pid: of the `run` that starts it, None otherwise.
        secret_file: None without one.
        metrics_token_file: the same.
        discard_contents: begin with zeros whatever was kept; never recorded.
        peers_file: of more control addresses, read again when it changes.
        mqtt: the broker on which donors announce themselves; None: there is none.
        cluster: name of ours on that broker.
        config_file: as named at the start; None: wherever the configuration is looked for.
        flags: what came from the command line, `section.key` to text: read again, the
            configuration gives way to it.
    """

    name: str
    device_id: str
    size_bytes: Positive
    slab_bytes: Positive
    donors: tuple[HostPort, ...]
    frontend: str
    transport: str
    backup: str | None
    backup_owned: bool
    swap: bool
    priority: int | None
    ephemeral: bool
    owner_pid: int | None
    secret_file: str | None
    config: DeviceConfig
    policy: PolicyConfig
    ask_s: float
    discard_contents: bool = False
    peers_file: str | None = None
    mqtt: MqttConfig | None = None
    cluster: str = "default"
    config_file: str | None = None
    flags: dict[str, str] = {}
    metrics_token_file: str | None = None

    @property
    def slab_count(self) -> int:
        """Slabs of the device; the last may be cut short."""
        return -(-self.size_bytes // self.slab_bytes)


def source_fields(config_file: str | None, flags: Mapping[str, object]) -> dict[str, Any]:
    """Where the configuration comes from, for a device that reads it again: fields of a spec.

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


def check_size(size_bytes: int, slab_bytes: int) -> None:
    """Refuses sizes that no engine could serve.

    Raises:
        UsageError: not a multiple of a page, or more slabs than a lease may have.
    """
    if size_bytes <= 0 or size_bytes % PAGE_BYTES:
        raise UsageError(
            f"device size {size_bytes} is not a multiple of a page ({PAGE_BYTES} bytes)",
            mend="Write for example --size 4G.",
        )
    slabs = -(-size_bytes // slab_bytes)
    if slabs > 16_384:
        raise UsageError(
            f"a device of {format_size(size_bytes)} has {slabs} slabs of "
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
    """Where its donors are named, for people."""
    named = [*map(str, spec.donors), *filter(None, [spec.peers_file])]
    if spec.mqtt is not None:
        named.append(f"those at broker {spec.mqtt.broker}")
    return ", ".join(named)


def metrics_token_file(config: Config) -> str | None:
    """Where a device shall find the token.

    Raises:
        ConfigError: metrics could not be served; told before anything is attached.
    """
    check_metrics_listen(config.device.metrics_listen, config.metrics_token())
    path = config.cluster.metrics_token_file
    return None if path is None else str(path)


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
    return msgspec.json.encode(spec, enc_hook=_encode_hook)


def decode_spec(data: bytes, where: str) -> DeviceSpec:
    """Reads what encode_spec wrote.

    Raises:
        ConfigError: damaged, or written by another release.
    """
    try:
        return decode_json(data, DeviceSpec, _decode_hook)
    except NotJsonError as error:
        raise ConfigError(
            f"the record of this device cannot be read ({clean_text(str(error))})",
            where=where,
            mend="It was written by another release or is damaged; remove the file once no "
            "device of that name runs.",
        ) from error
