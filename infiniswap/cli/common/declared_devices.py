# SPDX-License-Identifier: Apache-2.0
"""Devices that are declared for systemd: devices/NAME.env beside the configuration file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from infiniswap.config import Config
from infiniswap.device.spec import rundir
from infiniswap.device.spec.spec import check_name
from infiniswap.errors import ConfigError, InfiniswapError
from infiniswap.system import service_units
from infiniswap.system.files import read_text, try_read_text

_OPTIONS: Final = "DEVICE_OPTIONS"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One file.

    Attributes:
        path: of the file.
        options: of `infiniswap device start`.
        line: where they stand; 0: nowhere.
        variables: every variable of the file, the options included.
    """

    path: Path
    options: tuple[str, ...] = ()
    line: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The device's name."""
        return self.path.stem


def find(directory: Path) -> list[Declaration]:
    """Every declaration in a directory, by name; none where there is no such directory."""
    return [parse(path) for path in sorted(directory.glob("*.env"))]


def parse(path: Path) -> Declaration:
    """Reads a file as systemd's EnvironmentFile= does: NAME=value lines, `#` and `;` comments."""
    variables: dict[str, str] = {}
    line = 0
    for number, text in enumerate((try_read_text(path) or "").splitlines(), 1):
        name, equals, value = text.strip().partition("=")
        if not equals or name.startswith(("#", ";")):
            continue
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[name.strip()] = value
        line = number if name.strip() == _OPTIONS else line
    return Declaration(path, tuple(variables.get(_OPTIONS, "").split()), line, variables)


def problems(device: Declaration, config_path: Path) -> Iterator[InfiniswapError]:
    """Mistakes that would make its start fail, found without starting it."""
    where = f"{device.path}, line {device.line}" if device.line else str(device.path)
    errors: list[InfiniswapError] = []
    _check(device, config_path, errors)
    for error in errors:
        yield ConfigError(
            f"{error.where}: {error.what}" if error.where else error.what,
            where=where,
            mend=error.mend,
        )


def _check(device: Declaration, config_path: Path, errors: list[InfiniswapError]) -> None:
    """Adds every mistake, but none after a wrong option: the next words may be its value."""
    from infiniswap.cli.common.parser import named
    from infiniswap.cli.device.options import checked_priority, load_config, make_spec
    from infiniswap.cli.main import build_parser
    from infiniswap.units import parse_page_size

    config, size_bytes = None, 0
    with _noted(errors):
        read_text(device.path, "cannot read the declaration")
        check_name(device.name)
        words = ["device", "start", device.name, "--foreground", *device.options]
        args = build_parser("device").parse_args(words)
    if errors:
        return
    if args.config is None and os.path.exists(config_path):
        args.config = config_path
    with _noted(errors), named("--size"):
        size_bytes = 0 if args.size is None else parse_page_size(args.size)
    with _noted(errors):
        checked_priority(args.priority)
    with _noted(errors):
        config = load_config(args)
    if errors or config is None:
        return
    with _noted(errors):
        if args.size is None:
            _check_is_known(device, config)
        else:
            make_spec(args, config, name=device.name, size_bytes=size_bytes, swap=args.swap)


@contextlib.contextmanager
def _noted(errors: list[InfiniswapError]) -> Iterator[None]:
    try:
        yield
    except InfiniswapError as error:
        errors.append(error)


def _check_is_known(device: Declaration, config: Config) -> None:
    paths = rundir.paths_of(device.name, config.device.run_dir, config.device.backup_dir)
    if not paths.kept.exists() and not paths.run.exists():
        raise ConfigError(
            "--size is missing, and there is no stopped device of this name",
            mend=f"Write for example {_OPTIONS}=--size 8G --swap.",
        )


def boot_notes(devices: Sequence[Declaration], root: Path = Path("/")) -> Iterator[str]:
    """Notes on declared devices that do not start at boot although units are installed."""
    if service_units.unit_path(root, service_units.DEVICE_UNIT) is None:
        return
    enabled = {link.name for link in service_units.enabling_links(root)}
    for device in devices:
        unit = service_units.device_unit(device.name)
        if unit not in enabled:
            yield (
                f"the device {device.name} is declared in {device.path}, but does not start at "
                f"boot: systemctl enable {unit.removesuffix('.service')}"
            )
