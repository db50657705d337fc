# SPDX-License-Identifier: Apache-2.0
"""A `run` beside running ones: the options that it must share with them.

Pages of every job may lie in the device of every run. A run that pages to other donors, by another
transport or without a backup would do the same to the pages of the others. Options that a run does
not set are those of the running ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from infiniswap.config import Config, DeviceConfig
from infiniswap.device.jobs.beside import FIRST_NAME, RunDevice
from infiniswap.device.spec.spec import DeviceSpec, completed, named_text, names_donors
from infiniswap.errors import ConflictError, InfiniswapError
from infiniswap.secret import read_secret
from infiniswap.units import format_size

_DEFAULT = DeviceConfig()


@dataclass(frozen=True, slots=True)
class _Difference:
    """An option whose value differs from that of the running `infiniswap run`.

    Attributes:
        theirs: value of the running one.
        mend: how to get the same value; empty: by leaving the option out.
    """

    name: str
    theirs: str
    mend: str = ""


def like(
    args: argparse.Namespace, config: Config, others: tuple[RunDevice, ...], name: str
) -> tuple[argparse.Namespace, Config]:
    """Arguments and configuration of a run whose device is called `name`, beside others.

    Raises:
        ConflictError: an option differs from theirs.
        ConfigError: its secret cannot be used.
    """
    config.keys()
    if not others:
        return args, config
    other = others[0]  # the others have that in common
    for difference in _differences(args, config, other):
        raise _conflict(other, difference)
    priority = config.device.priority
    arguments = {
        **vars(args),
        "backup": _backup(args.backup, other, name),
        "priority": other.status.swap.priority if priority is None else priority,
    }
    return argparse.Namespace(**arguments), _inherit(args, config, other.spec.config)


def recorded(spec: DeviceSpec, others: tuple[RunDevice, ...]) -> DeviceSpec:
    """The spec with the others' flags, so that a later reload finds the same values."""
    if not others:
        return spec
    theirs = others[0].spec
    flags = {key: value for key, value in theirs.flags.items() if key != "device.tenant"}
    return msgspec.structs.replace(
        spec,
        flags={**flags, **spec.flags},
        config_file=spec.config_file or theirs.config_file,
    )


def _conflict(other: RunDevice, difference: _Difference) -> ConflictError:
    name, theirs, mend = difference.name, difference.theirs, difference.mend
    return ConflictError(
        f"{name} differs from that of the `infiniswap run` that is running ({other.whose}): "
        f"{theirs}. Swap areas belong to the whole host: pages of each command would lie on the "
        "devices of both",
        where=f"device {other.paths.name}",
        mend=f"{mend or f'Leave {name} out to use the same'}, or wait until that run has ended.",
    )


def _differences(
    args: argparse.Namespace, config: Config, other: RunDevice
) -> Iterator[_Difference]:
    spec, device, cluster = other.spec, config.device, config.cluster
    its_device, its_cluster = spec.config.device, spec.config.cluster

    def differs(option: str, key: str, theirs: str, value: str | None) -> _Difference:
        if getattr(args, option.replace("-", "_")) is not None:
            return _Difference(f"--{option}", theirs)
        # The configuration is there for every command, and is not changed for one of them.
        return _Difference(key, theirs, f"Give --{option} {value} to use the same" if value else "")

    if names_donors(config) and _donors(config) != _donors(spec.config):
        is_list = its_cluster.peers_file is None and its_cluster.discovery != "mqtt"
        value = ",".join(map(str, its_cluster.peers)) if is_list else None
        yield differs("donors", "cluster.peers", named_text(spec), value)
    if _is_given(args, config, "transport") and device.transport != its_device.transport:
        theirs = its_device.transport
        yield differs("transport", "device.transport", theirs, theirs)
    if cluster.secret_file is not None and not _is_same_secret(config, its_cluster.secret_file):
        file = None if its_cluster.secret_file is None else str(its_cluster.secret_file)
        yield differs("secret-file", "cluster.secret_file", file or "no secret", file)
    frontends = (its_device.frontend, other.status.frontend)
    if _is_given(args, config, "frontend") and device.frontend not in frontends:
        theirs = other.status.frontend
        yield differs("frontend", "device.frontend", theirs, theirs)
    if _is_given(args, config, "slab") and device.slab_bytes != its_device.slab_bytes:
        theirs = format_size(its_device.slab_bytes)
        yield differs("slab", "device.slab", theirs, theirs)
    if device.seal != its_device.seal:
        yield _Difference(
            "device.seal",
            str(its_device.seal).lower(),
            f"Set seal = {str(its_device.seal).lower()} under [device] to use the same",
        )
    backup, asked = _their_backup(other), _asked_backup(args.backup)
    if asked is None and backup == "none":
        yield _Difference("--backup", "none", "Also give --backup none --allow-data-loss")
    elif asked is not None and asked != backup:
        yield _Difference("--backup", backup or f"a file in {other.paths.store}")


def _is_given(args: argparse.Namespace, config: Config, option: str) -> bool:
    field = "slab_bytes" if option == "slab" else option
    default = getattr(_DEFAULT, field)
    return getattr(args, option) is not None or getattr(config.device, field) != default


def _donors(config: Config) -> tuple[object, ...]:
    cluster = config.cluster
    by_broker = (config.mqtt.broker, cluster.name) if cluster.discovery == "mqtt" else None
    return frozenset(cluster.peers), cluster.peers_file, by_broker


def _is_same_secret(config: Config, theirs: Path | None) -> bool:
    if theirs is None:
        return False
    if theirs == config.cluster.secret_file:
        return True
    with contextlib.suppress(InfiniswapError):  # the file was moved since
        return read_secret(theirs, config.daemon.state_dir) == config.keys()
    return False


def _inherit(args: argparse.Namespace, config: Config, theirs: Config) -> Config:
    fields = {"transport": "transport", "frontend": "frontend", "slab": "slab_bytes"}
    same: dict[str, Any] = {
        field: getattr(theirs.device, field)
        for option, field in fields.items()
        if not _is_given(args, config, option)
    }
    return replace(completed(config, theirs), device=replace(config.device, **same))


# --------------------------------------------------------------------------- backup


def _asked_backup(argument: str | None) -> str | None:
    return os.path.abspath(argument) if argument not in (None, "none") else argument


def _their_backup(other: RunDevice) -> str | None:
    """The --backup of that run; None when it was left out."""
    spec, paths = other.spec, other.paths
    if spec.backup is None:
        return "none"
    if spec.backup == str(paths.backup):
        return None
    return spec.backup.removesuffix(_suffix(paths.name))


def _suffix(name: str) -> str:
    return "" if name == FIRST_NAME else f".{name}"


def _backup(argument: str | None, other: RunDevice, name: str) -> str | None:
    """--backup of a further device: a file beside that of the first."""
    theirs = _their_backup(other)
    if theirs in (None, "none"):
        return argument
    assert theirs is not None
    if Path(theirs).is_block_device():
        raise ConflictError(
            f"the backup of the `infiniswap run` that is running ({other.whose}) is a block "
            "device, and a second run needs a backup of its own",
            where=theirs,
            mend="Wait until that run has ended. For several jobs at once start one device with "
            "that backup: infiniswap device start NAME --swap ..., then run --device NAME.",
        )
    return theirs + _suffix(name)
