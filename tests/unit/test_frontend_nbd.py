# SPDX-License-Identifier: Apache-2.0
"""The front end nbd without a kernel that has it; tests/vm has the rest."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

import pytest

from infiniswap.device import frontends
from infiniswap.device.frontends import nbd as front
from infiniswap.device.spec.rundir import DevicePaths
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.protocol import EngineConfig, EventKind, FrontendConfig, FrontendInfo
from infiniswap.errors import EngineError, NotFoundError, UnavailableError
from infiniswap.system import nbd
from infiniswap.system.nbd import NbdDevice
from infiniswap.units import MIB

CONFIG = EngineConfig(
    size_bytes=MIB, slab_bytes=MIB, staging_pages=64, requests_max=8, no_backup=True
)
HAS_NBD = Path("/sys/module/nbd").exists() or Path("/sys/block/nbd0").exists()


@pytest.fixture
def paths(tmp_path: Path) -> DevicePaths:
    return DevicePaths("d1", tmp_path, tmp_path)


def test_one_connection_for_each_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [front.connections_for(n) for n in (1, 7, 8, 16, 128)] == [1, 1, 2, 4, 4]
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert front.connections_for(128) == 1


def test_a_device_is_known_by_its_run_directory(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    identifier = front.identifier_of(DevicePaths("d1", link, link), 4)
    assert identifier == f"infiniswap:4:{os.path.realpath(tmp_path)}"
    assert front.run_of(NbdDevice(0, identifier, 1)) == Path(os.path.realpath(tmp_path))
    for strange in ("", "infiniswap:", "infiniswap:x:/run/a", "infiniswap:0:/run/a", "x:1:/a"):
        assert front.run_of(NbdDevice(0, strange, 1)) is None


@pytest.mark.requires_native
def test_what_has_taken_its_number_is_not_disconnected(
    paths: DevicePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "GenericNetlink", contextlib.nullcontext)
    monkeypatch.setattr(nbd, "connect", lambda *_, **__: 0)
    monkeypatch.setattr(nbd, "tune", lambda *_, **__: ())
    monkeypatch.setattr(nbd, "read_partitions", lambda _: None)
    disconnected: list[int] = []
    monkeypatch.setattr(nbd, "disconnect", lambda _, index: disconnected.append(index))
    with NativeEngine(CONFIG, None) as engine:
        device = front.NbdKernel(paths)
        device.attach(engine)
        shown = [NbdDevice(0, front.identifier_of(paths, front.connections_for(8)), 1)]
        monkeypatch.setattr(nbd, "device", lambda _: shown[0])
        assert device.is_ours()
        shown[0] = NbdDevice(0, "another's", 1)
        assert not device.is_ours()
        with pytest.raises(UnavailableError, match="device restart d1"):
            device.attach_again()
        device.detach()
    assert not disconnected


@pytest.mark.requires_native
def test_throttling_is_left_alone_while_requests_are_under_way(
    paths: DevicePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = NbdDevice(0, front.identifier_of(paths, 1), CONFIG.size_bytes)
    tuned: list[dict[str, object]] = []
    monkeypatch.setattr(front, "GenericNetlink", contextlib.nullcontext)
    monkeypatch.setattr(front, "find_left", lambda _: ((left, 1),))
    monkeypatch.setattr(front.NbdKernel, "_replace_one", lambda *_: None)

    def tune(*_: object, **given: object) -> tuple[str, ...]:
        tuned.append(given)
        return ()

    monkeypatch.setattr(nbd, "tune", tune)
    with NativeEngine(CONFIG, None) as engine:
        device = front.NbdKernel(paths)
        device.prepare(engine, b"")
        device.take_over({})
    assert tuned == [{"in_use": True}]


@pytest.mark.skipif(HAS_NBD, reason="this kernel has nbd")
@pytest.mark.requires_root
@pytest.mark.requires_fuse
@pytest.mark.requires_loop
def test_auto_says_why_it_is_not_nbd() -> None:
    choice = frontends.choose("auto", True)
    assert choice.frontend == "fuse"
    assert "nbd driver is not loaded" in choice.why
    with pytest.raises(UnavailableError, match="modprobe nbd"):
        frontends.choose("nbd", True)


@pytest.mark.skipif(HAS_NBD, reason="this kernel has nbd")
@pytest.mark.requires_native
def test_a_kernel_without_nbd_is_told_of_and_nothing_is_left(paths: DevicePaths) -> None:
    with pytest.raises(UnavailableError, match=r"modprobe nbd .*--frontend fuse"):
        front.check()
    assert front.find_left(paths) == ()
    assert front.give_up(paths) == ()
    front.clear(paths)
    with NativeEngine(CONFIG, None) as engine:
        device = front.NbdKernel(paths)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(UnavailableError, match="modprobe nbd"):
            device.attach(engine)
        assert device.block_device is None
        device.repair()
        device.detach()
        device.detach()
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(NotFoundError, match="no nbd device of an earlier process"):
            device.prepare(engine, b"")


@pytest.mark.requires_native
def test_sockets_are_served_and_a_lost_one_is_reported() -> None:
    with NativeEngine(CONFIG, None) as engine:
        frontend = engine.frontend("nbd", FrontendConfig(request_bytes_max=4096))
        assert frontend.info() == FrontendInfo(MIB, 8)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frontend.serve(theirs.fileno())
            theirs.close()
            assert frontend.info().connections == 1
            ours.settimeout(60)
            request = b"\x25\x60\x95\x13" + bytes(4) + b"cookie.." + bytes(8)
            ours.sendall(request + (4096).to_bytes(4, "big"))
            answer = b""
            while len(answer) < 16 + 4096:
                answer += ours.recv(8192)
            assert answer == b"\x67\x44\x66\x98" + bytes(4) + b"cookie.." + bytes(4096)
        poll = select.poll()
        poll.register(engine.eventfd, select.POLLIN)
        assert poll.poll(60_000)
        assert [event.kind for event in engine.events()] == [EventKind.CONNECTION_LOST]
        assert frontend.info().connections == 0
        with pytest.raises(EngineError, match="socket cannot be served"):
            frontend.serve(9999)
        frontend.close()
