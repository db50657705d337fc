# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: one paragraph that names the thing and the remedy, the documented exit
code, and nothing left attached."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.devices.cluster import WAIT_S, Cluster, Device, run, until, wait_ended

from infiniswap.secret import new_secret
from infiniswap.system.programs import find
from infiniswap.units import MIB

pytestmark = [
    pytest.mark.requires_native,
    pytest.mark.requires_root,
    pytest.mark.requires_fuse,
    pytest.mark.requires_loop,
]

Refused = Callable[..., str]


def kept_files(cluster: Cluster) -> set[Path]:
    """Of devices; the host's key, made by the first start that may need it, is of none."""
    return set(cluster.backup_dir.glob("*")) - {cluster.backup_dir / "host-key"}


@pytest.fixture
def refused(shared_cluster: Cluster) -> Refused:
    """Runs a `device` command that must fail in the documented way."""

    def check(code: int, texts: tuple[str, ...], *args: str, **changes: str) -> str:
        kept = kept_files(shared_cluster)
        done = shared_cluster.cli("device", *args, **changes)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("infiniswap: ")
        assert done.stderr.count("\n") == 1, done.stderr
        for text in texts:
            assert text in done.stderr, (text, done.stderr)
        assert shared_cluster.leftovers() == []
        assert kept_files(shared_cluster) == kept
        return done.stderr

    return check


def new(cluster: Cluster, *args: str, size: str = "16M", donors: str = "") -> list[str]:
    """`device start` of a new device; later options win."""
    command = ["start", cluster.name(), "--donors", donors or cluster.addresses]
    return [*command, "--size", size, *args]


def launch(
    cluster: Cluster, *args: str, prefix: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """A `device start` under way, by a command that executes it in the end; the device's name."""
    command = new(cluster, *args)
    process = subprocess.Popen(
        [*prefix, *cluster.program, "device", *command],
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, command[1]


# ------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("code", "texts", "args"),
    [
        (2, ("lots",), ["--size", "lots"]),
        (2, ("-5",), ["--size=-5"]),
        (2, ("multiple", "4096"), ["--size", "4097"]),
        (2, ("0",), ["--size", "0"]),
        (2, ("slabs", "smaller"), ["--size", "8P"]),
        (3, ("slab", "lots"), ["--slab", "lots"]),
        (3, ("slab", "4097"), ["--slab", "4097"]),
        (2, ("99999", "32767"), ["--swap", "--priority", "99999"]),
        (5, ("RDMA", "--transport auto"), ["--transport", "rdma"]),
        (2, ("--backup none", "--allow-data-loss"), ["--swap", "--backup", "none"]),
        (5, ("ublk", "fuse"), ["--frontend", "ublk"]),
        (5, ("nbd", "fuse"), ["--frontend", "nbd"]),
        (2, ("nbd-socket", "--swap"), ["--frontend", "nbd-socket", "--swap"]),
        (2, ("--colour",), ["--colour", "red"]),
        (6, ("no-such-host.invalid",), ["--donors", "no-such-host.invalid"]),
        (2, ("127.0.0.1:99999",), ["--donors", "127.0.0.1:99999"]),
        (7, ("4M", "8M", "slab"), ["--slab", "4M"]),
        (8, ("memory", "--backup"), ["--backup", "/dev/shm/backup"]),
        (8, ("does not exist", "--backup"), ["--backup", "/no/such/directory/backup"]),
        (8, ("regular file", "--backup"), ["--backup", "/tmp"]),
        (8, ("regular file", "--backup"), ["--backup", "/dev/null"]),
        (8, ("proc", "--backup"), ["--backup", "/proc/self/mem"]),
        (3, ("/no/such/secret",), ["--secret-file", "/no/such/secret"]),
        (3, ("/no/such/file",), ["--config", "/no/such/file"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(
    shared_cluster: Cluster, refused: Refused, code: int, texts: tuple[str, ...], args: list[str]
) -> None:
    refused(code, texts, *new(shared_cluster, *args))
    assert not Path("/dev/shm/backup").exists()


def test_a_bad_name(shared_cluster: Cluster, refused: Refused) -> None:
    command = ["start", "--size", "16M", "--donors", shared_cluster.addresses, "--", "a/b"]
    refused(2, ("cannot be a device name", "letters"), *command)


def test_a_run_directory_that_is_a_file(shared_cluster: Cluster, refused: Refused) -> None:
    file = shared_cluster.root / "file"
    file.touch()
    refused(10, (str(file),), *new(shared_cluster), INFINISWAP_DEVICE_RUN_DIR=str(file))


def test_unknown_keys(shared_cluster: Cluster, refused: Refused) -> None:
    file = shared_cluster.root / "bad.toml"
    file.write_text('[device]\nslap = "8M"\n')
    command = new(shared_cluster, "--config", str(file))
    refused(3, ("slap", "slab", str(file)), *command)
    command = new(shared_cluster)
    refused(3, ("INFINISWAP_DEVICE_SLAP",), *command, INFINISWAP_DEVICE_SLAP="8M")


def test_unknown_devices(shared_cluster: Cluster, refused: Refused) -> None:
    for action in ("show", "stop", "restart", "remove"):
        refused(11, ("nothere", "device list"), action, "nothere")
    refused(2, ("--size",), "start", "nothere", "--donors", shared_cluster.addresses)


def test_it_says_who_may(shared_cluster: Cluster) -> None:
    """Not root: a user namespace, as another user may not run the tests' interpreter."""
    command = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    process, _ = launch(shared_cluster, prefix=command)
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 4, stderr
    for text in ("root", "sudo", "nbd-socket"):
        assert text in stderr
    assert shared_cluster.leftovers() == []


def test_no_fuse(shared_cluster: Cluster) -> None:
    # In a mount namespace whose /dev has what a Python program needs, and nothing else.
    script = (
        "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && "
        'mknod -m 666 /dev/urandom c 1 9 && exec "$0" "$@"'
    )
    process, _ = launch(shared_cluster, prefix=["unshare", "--mount", "sh", "-c", script])
    _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 5, stderr
    assert "/dev/fuse" in stderr
    assert "modprobe" in stderr
    assert shared_cluster.leftovers() == []


# ----------------------------------------------------------------------------------- donors


@pytest.fixture
def closed_ports() -> Iterator[tuple[str, str]]:
    with socket.socket() as one, socket.socket() as other:
        addresses = []
        for unused in (one, other):
            unused.bind(("127.0.0.1", 0))  # bound, not listening: refused
            addresses.append(f"127.0.0.1:{unused.getsockname()[1]}")
        yield addresses[0], addresses[1]


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[str]:
    """A server of another kind: sends `answer` to whoever connects; None: accepts and is silent."""
    listener = socket.create_server(("127.0.0.1", 0))
    peers: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peers.append(peer)
                if answer is not None:
                    peer.sendall(answer)
                    peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for peer in peers:
            peer.close()


def test_no_donors(shared_cluster: Cluster, refused: Refused) -> None:
    refused(6, ("no donor is named", "--donors"), "start", shared_cluster.name(), "--size", "16M")


def test_donors_that_cannot_be_reached(
    shared_cluster: Cluster, refused: Refused, closed_ports: tuple[str, str]
) -> None:
    refused(6, (closed_ports[0], "daemon"), *new(shared_cluster, donors=closed_ports[0]))
    refused(6, closed_ports, *new(shared_cluster, donors=",".join(closed_ports)))


def test_one_donor_of_two_is_enough_and_the_other_is_named(
    shared_cluster: Cluster, closed_ports: tuple[str, str]
) -> None:
    donors = f"{closed_ports[0]},{shared_cluster.donors[0].address}"
    done = shared_cluster.cli("device", *new(shared_cluster, donors=donors))
    assert done.returncode == 0, done.stderr
    assert closed_ports[0] in done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"NBDMAGICIHAVEOPT\0\3",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
    ids=["http", "websocket", "nbd", "ssh", "closes"],
)
def test_another_protocol_on_the_port(
    shared_cluster: Cluster, refused: Refused, answer: bytes
) -> None:
    with stranger(answer) as address:
        refused(7, (address, "control port"), *new(shared_cluster, donors=address))


def test_a_port_that_never_answers(shared_cluster: Cluster, refused: Refused) -> None:
    with stranger(None) as address:
        command = new(shared_cluster, donors=address)
        refused(6, (address,), *command, INFINISWAP_CLUSTER_ASK_S="0.5")


def test_the_data_port_instead_of_the_control_port(
    shared_cluster: Cluster, refused: Refused
) -> None:
    address = f"127.0.0.1:{shared_cluster.donors[0].data}"
    refused(7, (address,), *new(shared_cluster, donors=address))


def test_secrets(shared_cluster: Cluster, refused: Refused) -> None:
    files = []
    for name in ("right", "wrong"):
        file = shared_cluster.root / name
        file.touch(0o600)
        file.write_text(new_secret())
        files.append(str(file))
    donor = shared_cluster.donor("--secret-file", files[0])
    try:
        for flags in ([], ["--secret-file", files[1]]):
            command = new(shared_cluster, *flags, donors=donor.address)
            refused(7, (donor.address, "secret"), *command)
        os.chmod(files[1], 0o644)
        command = new(shared_cluster, "--secret-file", files[1], donors=donor.address)
        refused(3, (files[1], "chmod 600"), *command)
        command = new(shared_cluster, "--secret-file", files[0], donors=donor.address)
        shared_cluster.ok("device", *command)
    finally:
        shared_cluster._remove_devices()
        assert donor.end() == 0
        shared_cluster.donors.remove(donor)


def test_donors_that_cannot_hold_a_device_without_backup(
    shared_cluster: Cluster, refused: Refused
) -> None:
    command = new(shared_cluster, "--backup", "none", size="1G")
    refused(13, ("slabs", "backup"), *command)
    for donor in shared_cluster.donors:
        assert "Traceback" not in donor.log


# ---------------------------------------------------------------------------------- backups


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 100 MiB."""
    image, point = tmp_path / "image", tmp_path / "small"
    with image.open("wb") as file:
        file.truncate(100 * MIB)
    point.mkdir()
    run("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", image)
    with image.open("r+b") as file:  # now, as mkfs makes holes where zeros are
        os.posix_fallocate(file.fileno(), 0, 100 * MIB)
    run("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        run("umount", point)


@pytest.mark.requires_tool("mkfs.ext4")
def test_backups_on_a_full_or_read_only_disk(
    shared_cluster: Cluster, refused: Refused, small_disk: Path
) -> None:
    backup = small_disk / "backup"
    command = new(shared_cluster, "--backup", str(backup), size="128M")
    refused(8, (str(backup), "free", "--backup"), *command)
    assert not backup.exists()
    run("mount", "-o", "remount,ro", small_disk)
    command = new(shared_cluster, "--backup", str(backup), size="8M")
    refused(8, (str(backup), "read-only", "--backup"), *command)


def test_a_file_of_the_user_is_not_overwritten(shared_cluster: Cluster, refused: Refused) -> None:
    file = shared_cluster.root / "photo"
    file.write_bytes(b"precious" * 1000)
    refused(8, (str(file), "overwritten"), *new(shared_cluster, "--backup", str(file)))
    assert file.read_bytes() == b"precious" * 1000
    # Nor is it the remedy to delete what the user may need.
    passwd = Path("/etc/passwd").read_bytes()
    for path in (file, Path("/etc/passwd")):
        said = shared_cluster.cli("device", *new(shared_cluster, "--backup", str(path))).stderr
        for word in ("elete", "chmod", " rm "):
            assert word not in said
    assert Path("/etc/passwd").read_bytes() == passwd
    # A new file is ours, and goes with the device.
    backup = shared_cluster.root / "mine"
    command = new(shared_cluster, "--backup", str(backup))
    shared_cluster.ok("device", *command)
    device = Device(shared_cluster, command[1])
    assert backup.stat().st_size == 16 * MIB
    refused_again = shared_cluster.cli("device", *new(shared_cluster, "--backup", str(backup)))
    assert refused_again.returncode == 8
    device.stop()
    assert backup.exists()
    shared_cluster.ok("device", "start", device.name)
    device.remove()
    assert not backup.exists()


def test_what_another_user_may_write_is_no_backup(
    shared_cluster: Cluster, refused: Refused
) -> None:
    """tests/unit/test_system_backup.py has all that another user could prepare."""
    trap = shared_cluster.root / "trap"
    trap.touch()
    trap.chmod(0o666)
    refused(8, (str(trap), "0666"), *new(shared_cluster, "--backup", str(trap)))
    assert trap.stat().st_size == 0


# -------------------------------------------------------------------------- lost and damaged


def test_damaged_tables_are_refused_and_can_be_given_up(
    shared_cluster: Cluster, refused: Refused
) -> None:
    device = shared_cluster.start(size="16M")
    device.path.write_bytes(b"contents" * 512)
    device.stop()
    tables = shared_cluster.backup_dir / f"{device.name}.tables"
    whole = tables.read_bytes()
    for damage, word in (
        (whole[:100], "damaged"),
        (whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], "altered"),
    ):
        tables.write_bytes(damage)
        refused(8, (str(tables), word, "--discard-contents"), "start", device.name)
        assert tables.read_bytes() == damage
    tables.write_bytes(whole)
    shared_cluster.ok("device", "start", device.name)
    with device.path.open("rb") as file:
        assert file.read(4096) == b"contents" * 512
    device.stop()
    tables.write_bytes(b"rubbish")
    shared_cluster.ok("device", "start", device.name, "--discard-contents")


def test_a_damaged_record(shared_cluster: Cluster, refused: Refused) -> None:
    device = shared_cluster.start(size="16M")
    device.stop()
    record = shared_cluster.backup_dir / f"{device.name}.device"
    whole = record.read_bytes()
    for damage in (b"", b"{}", b"\xff" * 64):
        record.write_bytes(damage)
        for action in ("start", "remove"):
            refused(3, (str(record),), action, device.name)
        assert device.name in shared_cluster.ok("device", "list")
    record.write_bytes(whole)
    device.remove()


def test_a_backup_that_has_gone(shared_cluster: Cluster, refused: Refused) -> None:
    device = shared_cluster.start(size="16M")
    device.stop()
    device.backup.rename(device.backup.with_suffix(".away"))
    refused(8, (str(device.backup), "--discard-contents"), "start", device.name)
    device.backup.with_suffix(".away").rename(device.backup)
    shared_cluster.ok("device", "start", device.name)


def test_lost_contents_are_never_presented_as_zeros(shared_cluster: Cluster) -> None:
    device = shared_cluster.start(size="32M")
    device.path.write_bytes(b"contents" * 512)
    device.kill()
    # The kernel still has the mount, the loop device and the link of the dead process.
    assert shared_cluster.leftovers()
    listed = shared_cluster.ok("device", "list")
    assert device.name in listed
    assert "died" in listed
    for args in (["start", device.name], ["start", device.name, "--size", "32M"]):
        done = shared_cluster.cli("device", *args)
        assert done.returncode == 8, done.stderr
        for text in (device.name, "lost", "--discard-contents", "remove"):
            assert text in done.stderr, done.stderr
    assert "contents lost" in shared_cluster.ok("device", "list")
    shared_cluster.ok("device", "start", device.name, "--discard-contents")
    with device.path.open("rb") as file:
        assert not any(file.read(MIB))
    # One loop device and one mount: those of the dead process are gone.
    assert len(shared_cluster.loops()) == 1
    device.path.write_bytes(b"contents" * 512)
    device.stop()
    shared_cluster.ok("device", "start", device.name)
    with device.path.open("rb") as file:
        assert file.read(4096) == b"contents" * 512


def test_remove_takes_away_what_a_dead_process_left(shared_cluster: Cluster) -> None:
    device = shared_cluster.start(size="16M")
    device.kill()
    device.remove()
    assert shared_cluster.leftovers() == []
    assert not device.backup.exists()


@pytest.mark.requires_tool("mkfs.ext4")
def test_a_dead_device_that_is_still_mounted(shared_cluster: Cluster) -> None:
    device = shared_cluster.start(size="32M")
    point = shared_cluster.root / "dead"
    point.mkdir()
    run("mkfs.ext4", "-q", "-F", device.path)
    run("mount", device.path, point)
    try:
        device.kill()
        done = device.command("remove")
        assert done.returncode == 9
        assert str(point) in done.stderr
        assert "umount" in done.stderr
    finally:
        run("umount", point)
    device.remove()


# ------------------------------------------------------------------------ interrupted starts


def only_daemons(cluster: Cluster) -> None:
    until(lambda: not cluster.processes(), "the device process to undo its start")
    assert cluster.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_start_that_is_interrupted_leaves_nothing(
    shared_cluster: Cluster, number: signal.Signals
) -> None:
    before = kept_files(shared_cluster)
    with stranger(None) as address:
        # Waits for a donor that does not answer.
        process, name = launch(shared_cluster, "--donors", address)
        until(lambda: len(shared_cluster.processes()) > 1, "a device process")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert "Traceback" not in stderr
    only_daemons(shared_cluster)
    assert kept_files(shared_cluster) == before
    assert name not in shared_cluster.ok("device", "list")


@pytest.mark.requires_swap
def test_a_starter_killed_while_its_device_is_attached_leaves_nothing(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    before = kept_files(shared_cluster)
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    # The last step but one waits until it may go on; the loop device and the mount are there. Its
    # program is looked for where no environment leads: so it is another one, for this device alone.
    real, mkswap = find("mkswap"), tmp_path / "mkswap"
    assert real is not None
    shutil.copy(real, tmp_path / "real")
    mkswap.write_text(
        f'#!/bin/sh\nfor device; do :; done; echo "$device" >{begun}\n'
        f'while ! [ -e {go_on} ]; do sleep 0.05; done\nexec {tmp_path}/real "$@"\n'
    )
    mkswap.chmod(0o755)
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, str(mkswap), os.path.realpath(real))
    process, name = launch(shared_cluster, "--swap", prefix=prefix)
    try:
        device = until(lambda: begun.exists() and begun.read_text(), "the swap area's turn")
        shared_cluster.saw_loop(Path(device.strip()))
        assert shared_cluster.loops()
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)
        go_on.touch()
    only_daemons(shared_cluster)
    assert kept_files(shared_cluster) == before
    assert name not in shared_cluster.ok("device", "list")


def test_a_device_process_killed_while_it_starts(shared_cluster: Cluster) -> None:
    process, name = launch(shared_cluster)
    backup = shared_cluster.backup_dir / f"{name}.backup"
    until(backup.exists, "a backup")
    for pid, command in shared_cluster.processes().items():
        if "infiniswap.device" in command:
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
    _, stderr = process.communicate(timeout=WAIT_S)
    if process.returncode == 0:  # it was faster, and was killed when it served
        assert shared_cluster.ok("device", "remove", name)
        return
    assert process.returncode == 14, stderr
    assert name in stderr
    # Whatever it had attached goes with a remove, or with the next start.
    if shared_cluster.cli("device", "remove", name).returncode:
        backup.unlink(missing_ok=True)
        shared_cluster.take_leftovers()
