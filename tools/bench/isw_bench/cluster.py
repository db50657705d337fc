# SPDX-License-Identifier: Apache-2.0
"""Donors and a device of the product itself, on loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from infiniswap.device.control import client
from infiniswap.device.spec import rundir
from infiniswap.errors import InfiniswapError
from infiniswap.secret import new_secret, write_secret
from infiniswap.system.files import PROC
from infiniswap.units import format_size
from isw_bench.bench import START_S, Bench
from isw_bench.children import Child

NAME = "bench"
"""Of the device where there is only one."""
_END_S = 60.0


def environment(bench: Bench) -> dict[str, str]:
    """Of the run's daemons and devices; slabs are mapped at the first page."""
    return {
        **places(bench),
        "PYTHONPATH": str(bench.root / "tools" / "bench"),
        "INFINISWAP_POLICY_HOT_PAGES_PER_S": "1",
    }


def places(bench: Bench) -> dict[str, str]:
    """Everything of this run in its own directory, with one secret: each daemon has a state
    directory of its own, as hosts do."""
    secret_file = bench.work / "secret"
    if not secret_file.exists():
        write_secret(secret_file, new_secret())
    return {
        "INFINISWAP_CLUSTER_SECRET_FILE": str(secret_file),
        "INFINISWAP_DEVICE_RUN_DIR": str(bench.work / "run"),
        "INFINISWAP_DAEMON_STATE_DIR": str(bench.work / "state"),
        "INFINISWAP_DAEMON_RUN_DIR": str(bench.work / "donors"),
    }


def daemon_argv(
    ready: Path,
    slab_bytes: int,
    *options: str,
    listen: str = "127.0.0.1:0",
    module: str = "infiniswap",
) -> list[str]:
    """A daemon on loopback; `module` is run with the arguments of `infiniswap`."""
    argv = [sys.executable, "-m", module, "daemon", "--listen", listen, "--data-port", "0"]
    return [*argv, "--ready-file", str(ready), "--slab", format_size(slab_bytes), *options]


@contextlib.contextmanager
def donors(
    bench: Bench,
    count: int,
    slab_bytes: int,
    pool_bytes: int,
    *options: str,
    host: str = "127.0.0.1",
    changes: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Child]]:
    """Daemons on that address, by control address; `changes` to their environment."""
    found: dict[str, Child] = {}
    with contextlib.ExitStack() as stack:
        for number in range(1, count + 1):
            ready = bench.work / f"daemon{number}.ready"
            pool = ("--pool", format_size(pool_bytes), "--headroom", "64M")
            argv = daemon_argv(ready, slab_bytes, *pool, *options, listen=f"{host}:0")
            own = {**environment(bench), **(changes or {})}
            child = stack.enter_context(bench.running(f"daemon {number}", argv, changes=own))
            port = bench.until(partial(control_port, child, ready), "a daemon to serve")
            found[f"{host}:{port}"] = child
        yield found


def control_port(child: Child, ready: Path) -> Any:
    """Of a daemon, None until it serves. Raises SystemCallError when it has ended."""
    if not child.is_running:
        raise child.failed("ended")
    return json.loads(ready.read_text())["control_port"] if ready.exists() else None


@dataclass(frozen=True, slots=True)
class Device:
    """A running device process."""

    path: Path
    pid: int
    size_bytes: int
    slab_bytes: int
    paths: rundir.DevicePaths

    def status(self) -> dict[str, Any]:
        """What `device show --json` shows."""
        shown: dict[str, Any] = to_builtins(client.status(self.paths))
        return shown


@contextlib.contextmanager
def device(
    bench: Bench,
    addresses: Mapping[str, Child] | Sequence[str],
    size_bytes: int,
    slab_bytes: int,
    *options: str,
    module: str = "infiniswap",
    changes: Mapping[str, str] | None = None,
    name: str = NAME,
) -> Iterator[Device]:
    """A device on these donors; `options` go to `device start`, `module` is run with them, with
    `changes` to its environment."""
    backup = bench.work / f"backup-{name}"
    backup.mkdir(exist_ok=True)
    paths = rundir.paths_of(name, bench.work / "run", backup)
    argv = [sys.executable, "-m", module, "device", "start", name, "--foreground"]
    argv += ["--size", format_size(size_bytes)]
    argv += ["--slab", format_size(slab_bytes), "--donors", ",".join(addresses), *options]
    pid = 0
    try:
        own = {**environment(bench), "INFINISWAP_DEVICE_BACKUP_DIR": str(backup)}
        with bench.running(f"device {name}", argv, changes={**own, **(changes or {})}) as child:

            def serving() -> Any:
                if not child.is_running:
                    raise child.failed("ended")
                try:
                    return client.status(paths)
                except InfiniswapError:
                    return None

            status = bench.until(serving, "the device to serve", START_S)
            pid = status.pid
            yield Device(Path(status.path).resolve(), pid, size_bytes, slab_bytes, paths)
    finally:
        # Its starter may have lost patience; what lies below must not go before it has.
        bench.until(lambda: not (pid and (PROC / str(pid)).exists()), "the device to end", _END_S)
        # A device that was stopped keeps its size and contents; the next one here is another.
        shutil.rmtree(backup)
