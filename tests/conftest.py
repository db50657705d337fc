# SPDX-License-Identifier: Apache-2.0
"""What the whole suite shares: markers for what a test needs from the machine.

A test names its needs; where one is missing the test is skipped with that name as its reason. With
INFINISWAP_CI=1 a missing need is a failure, so that CI cannot pass by leaving tests out.

    @pytest.mark.requires_root
    @pytest.mark.requires_fuse
    @pytest.mark.requires_loop
    @pytest.mark.requires_memcg
    @pytest.mark.requires_netns
    @pytest.mark.requires_swap
    @pytest.mark.requires_ipv6         # on loopback
    @pytest.mark.requires_idle_states  # that /dev/cpu_dma_latency can rule out
    @pytest.mark.requires_tool("fio", "nbdinfo")
    @pytest.mark.requires_swtpm        # a software TPM, and systemd-creds with its libraries
    @pytest.mark.requires_pyverbs      # for Debian's own Python, which runs it apart from ours
    @pytest.mark.requires_native       # the C extension is built
    @pytest.mark.requires_unprivileged # must not be root

With INFINISWAP_TEST_FULL=1 (make test-full) everything runs as often as is ever asked for:

    @pytest.mark.full                  # only then
    def test_kills(count): ... count(5, 20)   # 5 times, then 20 times
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.machine import beside
from support.machine.elsewhere import write_reports
from support.machine.guestrun import remote
from support.machine.runmode import FULL, IN_CI, IN_GUEST

from infiniswap.own_code import CODE_OWNER

pytest_plugins = (
    "support.machine.background",
    "support.devices.cluster",
    "support.devices.holder_pair",
    "support.donors.broker",
    "support.jobs.pagejob",
    "support.jobs.runs",
)

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])

# A checkout that is not root's is meant: in a container, nobody's sudo says so.
os.environ.setdefault(CODE_OWNER, str(Path(__file__).stat().st_uid))

if not IN_GUEST:  # where no test draws anything, and importing it takes many seconds
    from hypothesis import HealthCheck, settings

    # No deadline and no look at the clock: a slow machine must not fail a test. No database: runs
    # leave nothing in the tree.
    settings.register_profile(
        "infiniswap",
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("infiniswap")


for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        # Under nohup, or in the background of a shell. Unlike being ignored, a handler is not
        # inherited by the commands under test.
        signal.signal(_number, lambda _number, _frame: None)


def _root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _unprivileged() -> str:
    return "needs a user other than root" if os.geteuid() == 0 else ""


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _fuse() -> str:
    if not _opens("/dev/fuse"):
        return "needs FUSE (/dev/fuse)"
    native = _native()
    if native:
        return native
    from infiniswap.engine.native import library_features

    return "" if "fuse" in library_features() else "needs a build with libfuse3"


def _loop() -> str:
    if _root():
        return _root()
    return "" if _opens("/dev/loop-control") else "needs loop devices (/dev/loop-control)"


def _memcg() -> str:
    """A writable memory controller: version 1 mounted by itself, or version 2."""
    if _root():
        return _root()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _source, options = tail.split(" ", 2)
        mountpoint = Path(fields.split()[4])
        has = (kind == "cgroup" and "memory" in options.split(",")) or (
            kind == "cgroup2" and "memory" in (mountpoint / "cgroup.controllers").read_text()
        )
        if has and os.access(mountpoint, os.W_OK):
            return ""
    return "needs a writable memory cgroup"


def _netns() -> str:
    if _root():
        return _root()
    if missing := _tools("ip", "unshare"):
        return missing
    done = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True)
    return "" if done.returncode == 0 else "needs network namespaces"


def _swap() -> str:
    if _root():
        return _root()
    if not Path("/proc/swaps").exists():
        return "needs a kernel with swap"
    return _tools("mkswap", "swapon", "swapoff")


def _ipv6() -> str:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"needs IPv6 ({error.strerror})"
    return ""


def _idle_states() -> str:
    if _root():
        return _root()
    from infiniswap.system.keep_awake import idle_host

    if not _opens("/dev/cpu_dma_latency"):
        return "needs /dev/cpu_dma_latency"
    return "" if idle_host().latency_us is not None else "needs a cpuidle driver"


def _native() -> str:
    try:
        import infiniswap.engine.native  # noqa: F401
    except Exception as error:
        return f"needs the C extension ({error})"
    return ""


def _pyverbs() -> str:
    done = subprocess.run(
        ["/usr/bin/python3", "-c", "import pyverbs.device"], check=False, capture_output=True
    )
    return "" if done.returncode == 0 else "needs pyverbs for /usr/bin/python3 (python3-pyverbs)"


def _swtpm() -> str:
    if missing := _tools("swtpm", "systemd-creds"):
        return missing
    try:
        for name in ("libtss2-esys.so.0", "libtss2-rc.so.0", "libtss2-mu.so.0"):
            ctypes.CDLL(name)
    except OSError as error:
        return f"needs the TPM's libraries ({error})"
    return ""


def _tools(*names: str) -> str:
    missing = [name for name in names if shutil.which(name, path=_PATH) is None]
    return f"needs {', '.join(missing)}" if missing else ""


_PROBES: dict[str, Callable[[], str]] = {
    "requires_root": _root,
    "requires_unprivileged": _unprivileged,
    "requires_fuse": _fuse,
    "requires_loop": _loop,
    "requires_memcg": _memcg,
    "requires_netns": _netns,
    "requires_swap": _swap,
    "requires_ipv6": _ipv6,
    "requires_native": _native,
    "requires_idle_states": _idle_states,
    "requires_pyverbs": _pyverbs,
    "requires_swtpm": _swtpm,
}
_NOT_IN_CI = frozenset({"requires_unprivileged", "requires_idle_states", "requires_ipv6"})
"""What CI, which runs as root, cannot have, or has only on some machines: always a skip."""


@functools.cache
def _missing(marker: str, args: tuple[str, ...]) -> str:
    return _tools(*args) if marker == "requires_tool" else _PROBES[marker]()


def pytest_configure(config: pytest.Config) -> None:
    write_reports(config)
    if beside.is_wanted(config):
        config.pluginmanager.register(beside.Beside())
    config.addinivalue_line("markers", "kernels(*names): the guest's, one test for each")
    config.addinivalue_line("markers", "machine(hosts, memory, cpus): what the guest must be")
    config.addinivalue_line("markers", "needs_debs: the host makes packages for the guest")
    config.addinivalue_line("markers", "full: only in full runs (INFINISWAP_TEST_FULL=1)")
    config.addinivalue_line("markers", "requires_tool(*names): skipped unless all are on PATH")
    for name in _PROBES:
        config.addinivalue_line("markers", f"{name}: skipped, by name, where that is missing")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("full") and not FULL:
        pytest.skip("only in full runs (make test-full)")
    for mark in item.iter_markers():
        if mark.name != "requires_tool" and mark.name not in _PROBES:
            continue
        reason = _missing(mark.name, tuple(mark.args))
        if not reason:
            continue
        if IN_CI and mark.name not in _NOT_IN_CI:
            pytest.fail(f"CI must have it: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Swap belongs to the whole host: in two test runs at once, each would find the other's pages
    in its swap areas. So tests that swap wait for those of other runs."""
    if item.get_closest_marker("requires_swap") is None:
        return (yield)
    if remote(item) or beside.is_beside(item):  # a guest has swap of its own; the other waits
        return (yield)
    if _missing("requires_swap", ()):
        return (yield)
    # One place for all of them, whatever TMPDIR says; tests that swap are root's.
    with Path("/run/infiniswap-tests-swap.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="session")
def in_ci() -> bool:
    """Whether what is missing must fail (INFINISWAP_CI=1)."""
    return IN_CI


@pytest.fixture(scope="session")
def count() -> Callable[[int, int], int]:
    """How often to do something: `count(usually, in_full_runs)`."""
    return lambda usual, full: full if FULL else usual


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """A file with the secret of the test cluster (support.donors.donor_world.SECRET)."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("5b1d0e7f9a3c4826b7f0d19e8c6a25437e40f1b2d3958c6a17f4e0bd82936c5a\n")
    return path
