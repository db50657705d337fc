# SPDX-License-Identifier: Apache-2.0
"""The command line in clumsy hands: without rights, with closed or full outputs, with files that
cannot be read. One sentence that says what to do, the documented exit code, and never a traceback.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster import WAIT_S, environment

COMMAND = (sys.executable, "-m", "infiniswap")


def infiniswap(
    *arguments: str, by: Sequence[str] = (), **changes: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Args:
        arguments: of `infiniswap`.
        by: the program that starts it, with its own arguments.
        changes: to the environment.
    """
    done = subprocess.run(
        [*by, *COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=environment(changes),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration whose directories are the test's."""
    path = tmp_path / "infiniswap.toml"
    path.write_text(f'[device]\nrun_dir = "{tmp_path}/run"\nbackup_dir = "{tmp_path}/kept"\n')
    return str(path)


# ----------------------------------------------------------------------------------- rights


def without(capability: str) -> list[str]:
    """Starts a program of root's that lacks a capability."""
    return ["setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}"]


@pytest.mark.requires_native
@pytest.mark.requires_root
@pytest.mark.requires_memcg
@pytest.mark.requires_tool("setpriv")
@pytest.mark.parametrize("command", ["device start d", "device start d --swap", "run --local 32M"])
def test_root_without_a_capability_is_told_its_name_once(config: str, command: str) -> None:
    options = ("--config", config, "--size", "16M", "--donors", "127.0.0.1:1")
    job = ("--", "true") if command.startswith("run") else ()
    done = infiniswap(*command.split(), *options, *job, by=without("sys_admin"))
    assert done.returncode == 4
    assert done.stderr.count("\n") == done.stderr.count("CAP_SYS_ADMIN") == 1, done.stderr
    assert "as root" not in done.stderr
    # It is no block device, so nothing could swap on it.
    assert ("nbd-socket" in done.stderr) == (command == "device start d")
    assert not Path(config).with_name("run").exists() or not any(
        Path(config).with_name("run").iterdir()
    )


@pytest.mark.requires_native
@pytest.mark.requires_tool("unshare")
def test_root_of_a_user_namespace_is_told_so(config: str) -> None:
    by = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*by, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    options = ("--config", config, "--size", "16M", "--donors", "127.0.0.1:1", "--swap")
    done = infiniswap("device", "start", "d", *options, by=by)
    assert done.returncode == 4
    assert "root of the host" in done.stderr
    assert "user namespace" in done.stderr
