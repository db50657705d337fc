# SPDX-License-Identifier: Apache-2.0
"""Reads a scenario file. A mistake names the file, the line and the remedy."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from infiniswap import config as configuration
from infiniswap.config import Config, check_together, key_name
from infiniswap.config_values import convert, nearest
from infiniswap.donor.memory import MemoryFigures
from infiniswap.donor.pool_limits import pool_limits
from infiniswap.errors import ConfigError, NotFoundError, UsageError, from_oserror
from infiniswap.simulation.scenario import CONFIG_KEYS, LISTS, SECTIONS, Points, Scenario
from infiniswap.toml_lines import key_lines
from infiniswap.units import MIB

_FILE_BYTES_MAX = MIB
_POINTS_MAX: Final = 100_000
_SHIPPED: Final = Path(__file__).with_name("scenarios")


def shipped() -> dict[str, Path]:
    """The scenarios that come with the program, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.toml"))}


def find(name: str) -> Path:
    """The file of that name, or else the shipped scenario.

    Raises:
        NotFoundError: neither exists.
    """
    path = Path(name)
    if path.exists():
        return path
    known = shipped()
    if name in known:
        return known[name]
    if path.suffix or path.parent != Path():
        mend = "Check the path."
    else:
        mend = nearest(name, tuple(known), "scenario") + " `infiniswap simulate --list` lists them."
    raise NotFoundError("no such scenario", where=name, mend=mend)


def read(path: Path) -> Scenario:
    """Reads a scenario and checks all of it.

    Raises:
        ConfigError: a mistake in the file.
        InfiniswapError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        mend = "Name a scenario file that you may read."
        what = "cannot read the scenario"
        raise from_oserror(what, error, where=str(path), mend=mend) from error
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigError("larger than 1 MiB: not a scenario", where=str(path))
    try:
        text = raw.decode()
        table = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        mend = "Correct that line."
        raise ConfigError(f"not valid TOML: {error}", where=str(path), mend=mend) from None
    return _Reader(path, key_lines(text)).scenario(table)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Of one file.

    Attributes:
        path: the file.
        lines: by key.
    """

    path: Path
    lines: Mapping[str, int]

    def scenario(self, table: dict[str, Any]) -> Scenario:
        """The whole file."""
        known = ("title", *SECTIONS, *LISTS, *CONFIG_KEYS)
        for name, content in table.items():
            if name not in known:
                self._fail(f"unknown table or key {name!r}", name, nearest(name, known, "table"))
            expected = str if name == "title" else list if name in LISTS else dict
            if not isinstance(content, expected):
                form = 'title = "..."' if name == "title" else f"[[{name}]]"
                form = form if name == "title" or name in LISTS else f"[{name}]"
                self._fail(f"{name!r} is not written like this", name, f"Write {form}.")
        parts: dict[str, Any] = {
            name: self._table(kind, name, table[name])
            for name, kind in SECTIONS.items()
            if name in table
        }
        for name, kind in LISTS.items():
            parts[name] = tuple(
                self._table(kind, f"{name}.{number}", content)
                for number, content in enumerate(table.get(name, ()))
            )
        found = Scenario(
            str(self.path),
            title=table.get("title", self.path.stem),
            config=self._config(table),
            **parts,
        )
        return self._checked(found)

    def _table(self, kind: type[Any], name: str, content: object) -> Any:
        if not isinstance(content, dict):
            self._fail(f"{name} is not a table", name, "Write its keys on lines of their own.")
        entries = {key_name(entry): entry for entry in dataclasses.fields(kind)}
        values = {}
        for key, value in content.items():
            if key not in entries:
                near = nearest(key, tuple(entries), "key")
                self._fail(f"unknown key {key!r}", f"{name}.{key}", near)
            values[entries[key].name] = self._value(f"{name}.{key}", value, entries[key].metadata)
        return kind(**values)

    def _value(self, key: str, value: object, meta: Mapping[str, Any]) -> object:
        try:
            if meta["kind"] == "points":
                return _points(value, meta)
            if meta["kind"] == "list":
                if not isinstance(value, list) or not value:
                    raise UsageError("it is not a list", mend="Write for example [1, 2].")
                return tuple(convert(item, meta["item"]) for item in value)
            if isinstance(value, str) and meta["kind"] in ("int", "float"):
                raise UsageError(f"{value!r} is not a number", mend="Write it without quotes.")
            return convert(value, meta)
        except UsageError as error:
            shown = ".".join(part for part in key.split(".") if not part.isdecimal())
            self._fail(f"{shown}: {error.what}", key, error.mend)

    def _config(self, table: Mapping[str, Any]) -> Config:
        config = Config()
        for section, known in CONFIG_KEYS.items():
            content = table.get(section, {})
            kind = configuration.SECTIONS[section]
            entries = {key_name(entry): entry for entry in dataclasses.fields(kind)}
            values = {}
            for key, value in content.items():
                name = f"{section}.{key}"
                if key not in known:
                    what = f"unknown key {key!r}"
                    if key in entries:
                        what = f"{name} has no effect in a simulation"
                    self._fail(what, name, nearest(key, known, "key that has one"))
                values[entries[key].name] = self._value(name, value, entries[key].metadata)
            own = replace(getattr(config, section), **values)
            config = replace(config, **{section: own})
        return config

    def _checked(self, found: Scenario) -> Scenario:
        """Mistakes that no single key shows."""
        for error in check_together(found.config):
            raise ConfigError(error.what, where=str(self.path), mend=error.mend)
        cluster, load, run = found.cluster, found.load, found.run
        try:
            pool_limits(found.config, MemoryFigures(cluster.memory_bytes, cluster.memory_bytes))
        except ConfigError as error:
            what = f"{error.where}: {error.what}"
            raise ConfigError(what, where=str(self.path), mend=error.mend) from None
        if cluster.system_bytes >= cluster.memory_bytes:
            self._fail("system is not below memory", "cluster.system", "Lower cluster.system.")
        if cluster.donors >= cluster.hosts:
            mend = "Leave hosts for jobs, or write 0: every host lends and has jobs."
            self._fail("every host is a donor alone", "cluster.donors", mend)
        if load.quantiles and load.quantiles[-1][0] > 1.0:
            mend = "The first numbers are shares of the hosts, from 0 to 1."
            self._fail("load.quantiles goes beyond 1", "load.quantiles", mend)
        if load.quantiles and load.trace:
            mend = "Remove one of them."
            self._fail("load.quantiles and load.trace exclude each other", "load.trace", mend)
        if run.period_s > run.duration_s:
            mend = "Make run.duration_s longer or run.period_s shorter."
            self._fail("run.period_s is longer than the whole run", "run", mend)
        if found.eviction is not None and max(found.eviction.extra) > found.eviction.evict:
            mend = "The policy asks for at most E slabs more: lower eviction.extra."
            self._fail("eviction.extra is above eviction.evict", "eviction.extra", mend)
        if found.eviction is not None and found.eviction.evict > found.eviction.slabs:
            mend = "Lower eviction.evict."
            self._fail("more slabs are evicted than there are", "eviction.evict", mend)
        if not load.trace:
            return found
        return replace(found, trace_path=str(self.path.absolute().parent / load.trace))

    def _fail(self, what: str, key: str, mend: str) -> NoReturn:
        """Raises ConfigError with the line of the key, or of its table."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        where = f"{self.path}, line {self.lines[key]}" if key else str(self.path)
        raise ConfigError(what, where=where, mend=mend)


def _points(value: object, meta: Mapping[str, Any]) -> Points:
    wrong = UsageError("it is not a list of pairs", mend="Write for example [[0, 0.5], [60, 1]].")
    if not isinstance(value, list) or not 1 <= len(value) <= _POINTS_MAX:
        raise wrong
    found: list[tuple[float, float]] = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise wrong
        first = convert(pair[0], {"kind": "float", "low": 0.0, "high": 1e9})
        second = convert(pair[1], {"kind": "float", "low": meta["low"], "high": meta["high"]})
        assert isinstance(first, float)
        assert isinstance(second, float)
        if found and first <= found[-1][0]:
            raise UsageError(f"{first:g} comes after {found[-1][0]:g}", mend="Sort the pairs.")
        if found and meta["rising"] and second < found[-1][1]:
            raise UsageError(f"{second:g} is below {found[-1][1]:g}", mend="It may not fall.")
        found.append((first, second))
    return tuple(found)
