# SPDX-License-Identifier: Apache-2.0
"""A device without the kernel: real NBD clients on the nbd-socket front end, pages on donors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.devices.cluster import Cluster, Device, run, until
from support.devices.nbd_client import fio_verifies, nbdinfo
from support.machine.ran import ran

from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

SIZE = 64 * MIB


@pytest.fixture
def device(shared_cluster: Cluster) -> Iterator[Device]:
    device = shared_cluster.start("--frontend", "nbd-socket", size="64M")
    yield device
    assert "Traceback" not in device.log


def pages_on_donors(device: Device) -> int:
    return sum(row["write_pages"] for row in device.status["donors"])


@pytest.mark.requires_tool("nbdinfo")
def test_nbdinfo_describes_it(device: Device) -> None:
    assert nbdinfo(device.uri)["export-size"] == SIZE


@pytest.mark.requires_tool("nbd-client")
def test_nbd_client_which_asks_for_no_block_sizes_is_let_in(device: Device, tmp_path: Path) -> None:
    no_device = tmp_path / "file"  # in place of /dev/nbd0: it goes as far as the handshake
    no_device.touch()
    done = ran("nbd-client", "-nonetlink", "-b", "4096", "-unix", device.socket, no_device)
    assert f"size = {SIZE // MIB}MB" in done.stdout, done.stderr


@pytest.mark.requires_tool("nbdcopy")
def test_nbdcopy_brings_back_what_it_has_copied_in(device: Device, tmp_path: Path) -> None:
    original, back = tmp_path / "in", tmp_path / "out"
    original.write_bytes(os.urandom(SIZE // 2) + bytes(SIZE // 4) + os.urandom(SIZE // 4))
    run("nbdcopy", "--flush", original, device.uri)
    # By then slabs have been mapped while pages were on their way; both copies must be right.
    run("nbdcopy", device.uri, back)
    assert back.read_bytes() == original.read_bytes()
    run("nbdcopy", original, device.uri)
    until(lambda: pages_on_donors(device), "pages on donors")
    run("nbdcopy", device.uri, back)
    assert back.read_bytes() == original.read_bytes()
    assert device.status["stats"]["requests_failed"] == 0


@pytest.mark.requires_tool("nbdcopy")
def test_status_shows_what_lies_on_donors(device: Device, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(os.urandom(SIZE))

    def agrees() -> bool:  # pages may still be on their way
        run("nbdcopy", data, device.uri)
        (row,) = json.loads(device.cluster.ok("status", "--json"))["devices"]
        pages = int(device.status["pages_on_donors"])
        return int(row["on_donors_bytes"]) == pages * 4096 > 0

    until(agrees, "the same figure in `status` and `device show`")


@pytest.mark.requires_tool("nbdsh")
def test_nbdsh_trims_zeroes_and_meets_its_limits(device: Device) -> None:
    run("nbdsh", "-u", device.uri, "-c", NBDSH)


NBDSH = f"""
size = {SIZE}
assert h.get_size() == size
assert not any(h.pread(1 << 20, 0)), "a new device reads zeros"
h.pwrite(b"a" * 16384, 4096)
h.pwrite(b"b" * 4096, 8192)
h.pwrite(b"e" * 4096, size - 4096)
assert h.pread(16384, 4096) == b"a" * 4096 + b"b" * 4096 + b"a" * 8192
h.trim(4096, 4096)
assert h.pread(8192, 4096) == bytes(4096) + b"b" * 4096
h.zero(4096, 8192)
assert h.pread(8192, 8192) == bytes(4096) + b"a" * 4096
h.flush()
assert h.pread(4096, size - 4096) == b"e" * 4096
def refused(call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errno in ("EINVAL", "ENOSPC", "ERANGE"), (call, args, error.errno)
    else:
        raise AssertionError((call, args))
h.set_strict_mode(0)
refused(h.pread, 4096, size)
refused(h.pread, 8192, size - 4096)
refused(h.pwrite, b"x" * 4096, size)
refused(h.pwrite, b"x" * 8192, size - 4096)
refused(h.trim, 8192, size - 4096)
assert h.pread(4096, size - 4096) == b"e" * 4096
"""


@pytest.mark.requires_tool("qemu-io")
def test_qemu_io_verifies_patterns(device: Device) -> None:
    commands = []
    # Unaligned ends, a slab border in the middle, then zeros over part of it.
    for pattern, offset, length in ((1, 0, MIB), (2, 8 * MIB - 65536, 131072), (3, 40 * MIB, 4096)):
        commands += [
            f"write -P {pattern} {offset} {length}",
            f"read -P {pattern} {offset} {length}",
        ]
    commands += [f"write -z {8 * MIB - 4096} 8192", f"read -P 0 {8 * MIB - 4096} 8192"]
    commands += [f"read -P 2 {8 * MIB - 65536} 61440", f"read -P 2 {8 * MIB + 4096} 61440"]
    commands += [f"discard 0 {MIB}", f"read -P 0 0 {MIB}", "flush"]
    arguments = [argument for command in commands for argument in ("-c", command)]
    output = run("qemu-io", "-f", "raw", *arguments, device.uri)
    # qemu-io tells a wrong pattern in words and then still ends with 0.
    assert "failed" not in output.lower(), output


@pytest.mark.requires_tool("fio")
def test_fio_verifies_what_it_wrote(device: Device, tmp_path: Path) -> None:
    options = ("--bssplit=4k/60:64k/30:256k/10", "--iodepth=16", "--size=32m", "--io_size=96m")
    fio_verifies(device.uri, tmp_path, *options, "--randrepeat=0")
    stats = device.status["stats"]
    assert stats["requests_failed"] == 0
    assert stats["crc_errors_remote"] == stats["crc_errors_backup"] == 0


@pytest.mark.requires_tool("nbdsh")
def test_it_needs_no_root(cluster: Cluster) -> None:
    # Another user may have no access to the interpreter of the tests; in a user namespace all
    # that is ours stays ours, but we are not root.
    command = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    if ran(*command, "true").returncode:
        pytest.skip("needs user namespaces")
    cluster.donor()
    device = Device(cluster, cluster.name())
    command += [sys.executable, "-m", "infiniswap", "device"]
    common = ["--frontend", "nbd-socket", "--donors", cluster.addresses]
    run(*command, "start", device.name, "--size", "16M", *common, **cluster.env)
    script = "h.pwrite(b'x' * 4096, 0); assert h.pread(4096, 0) == b'x' * 4096"
    run("nbdsh", "-u", device.uri, "-c", script)
    run(*command, "remove", device.name, **cluster.env)
