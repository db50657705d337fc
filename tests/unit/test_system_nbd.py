# SPDX-License-Identifier: Apache-2.0
"""nbd devices as /sys and generic netlink tell of them; tests/vm has the real ones."""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.machine.made_host import make_files

from infiniswap.errors import (
    DeadlineError,
    NotFoundError,
    NotPermittedError,
    SystemCallError,
    UnavailableError,
)
from infiniswap.system import genl, nbd
from infiniswap.system.genl import Family, GenericNetlink


@dataclass
class FakeLink:
    """A kernel that remembers what it was asked."""

    answer: bytes = b""
    error: Exception | None = None
    attribute_max: int = 10
    asked: list[tuple[int, dict[int, bytes]]] = field(default_factory=list)

    def family(self, name: str) -> Family:
        assert name == "nbd"
        if not self.attribute_max:
            raise NotFoundError("there is no generic netlink family nbd")
        return Family(31, self.attribute_max)

    def ask(self, family: Family, command: int, payload: bytes) -> tuple[bytes, ...]:
        assert family.number == 31
        self.asked.append((command, dict(genl.attributes(payload))))
        if self.error is not None:
            raise self.error
        return (self.answer,) if self.answer else ()


@pytest.fixture
def loaded(tmp_path: Path) -> Path:
    (tmp_path / "module/nbd").mkdir(parents=True)
    return tmp_path


def _device(sys: Path, index: int, *, sectors: int, identifier: str | None) -> Path:
    directory = sys / "block" / f"nbd{index}"
    (directory / "queue").mkdir(parents=True)
    served = {} if identifier is None else {"pid": 7, "backend": identifier}
    return make_files(directory, {"size": sectors, **served})


def test_attributes_are_padded_and_nested() -> None:
    assert genl.text(10, "abc") == struct.pack("=HH", 8, 10) + b"abc\0"
    assert genl.text(10, "ab") == struct.pack("=HH", 7, 10) + b"ab\0" + b"\0"
    packed = genl.nested(7, genl.nested(1, genl.u32(1, 5)), genl.nested(1, genl.u32(1, 6)))
    ((kind, items),) = genl.attributes(packed)
    assert kind == 7
    numbers = [dict(genl.attributes(item))[1] for _, item in genl.attributes(items)]
    assert [genl.number_of(number) for number in numbers] == [5, 6]
    assert genl.number_of(dict(genl.attributes(genl.u64(2, 1 << 40)))[2]) == 1 << 40


@pytest.mark.parametrize("data", [b"\x03\0\x01\0", b"\xff\0\x01\0abcd"])
def test_a_senseless_answer_is_an_error(data: bytes) -> None:
    with pytest.raises(SystemCallError, match="makes no sense"):
        list(genl.attributes(data))


def test_the_real_kernel_names_its_families() -> None:
    with GenericNetlink() as link:
        assert link.family("nlctrl").number == 16
        with pytest.raises(NotFoundError, match="no generic netlink family none-such"):
            link.family("none-such")
        with pytest.raises(SystemCallError) as caught:
            link.ask(Family(16, 0), 77, b"")
    assert caught.value.code == errno.EOPNOTSUPP
    link.close()


def test_devices_that_are_not_free(tmp_path: Path) -> None:
    _device(tmp_path, 0, sectors=0, identifier=None)
    _device(tmp_path, 10, sectors=8, identifier="")
    _device(tmp_path, 2, sectors=2048, identifier="infiniswap:4:/run/x y")
    (tmp_path / "block/nbd2p1").mkdir()
    assert nbd.devices(sys=tmp_path) == (
        nbd.NbdDevice(2, "infiniswap:4:/run/x y", 1 << 20),
        nbd.NbdDevice(10, "", 4096),
    )
    assert nbd.device(0, sys=tmp_path) is None
    assert nbd.devices(sys=tmp_path / "absent") == ()
    assert nbd.NbdDevice(10, "", 4096).path == Path("/dev/nbd10")


def test_what_the_kernel_is_told(loaded: Path) -> None:
    link = FakeLink(genl.u32(1, 3))
    identifier = "infiniswap:2:/run/a"
    index = nbd.connect(link, [8, 9], size_bytes=1 << 30, identifier=identifier, sys=loaded)
    assert index == 3
    ((command, told),) = link.asked
    assert command == 1
    assert 1 not in told  # the kernel chooses
    numbers = {kind: genl.number_of(value) for kind, value in told.items() if kind not in (7, 10)}
    assert numbers == {2: 1 << 30, 3: 4096, 4: 5, 8: 600, 5: 0b1_0110_1101, 6: 0}
    assert told[10] == b"infiniswap:2:/run/a\0"
    sockets = [dict(genl.attributes(item)) for _, item in genl.attributes(told[7])]
    assert [genl.number_of(socket[1]) for socket in sockets] == [8, 9]


def test_a_new_connection_and_the_end() -> None:
    link = FakeLink()
    nbd.reconnect(link, 3, 8, identifier="infiniswap:2:/run/a", timeout_s=10)
    nbd.disconnect(link, 3)
    (again, told), (end, last) = link.asked
    assert (again, end) == (3, 2)
    assert set(told) == {1, 4, 7, 10}  # no size: the kernel would look at it
    assert genl.number_of(told[4]) == 10
    assert set(last) == {1}


@pytest.mark.parametrize(
    ("error", "wanted", "words"),
    [
        (NotPermittedError("no"), NotPermittedError, "root of the host"),
        (SystemCallError("no", code=errno.ENOSPC), UnavailableError, "No space left.*nbd-client"),
    ],
)
def test_refusals_say_how_to_mend(
    loaded: Path, error: Exception, wanted: type[Exception], words: str
) -> None:
    with pytest.raises(wanted, match=words):
        nbd.connect(FakeLink(error=error), [8], size_bytes=4096, identifier="x", sys=loaded)
    with pytest.raises(SystemCallError, match="did not say which"):
        nbd.connect(FakeLink(), [8], size_bytes=4096, identifier="x", sys=loaded)


def test_what_a_kernel_can_lack(tmp_path: Path) -> None:
    for name in ("self", "1"):
        (tmp_path / name / "ns").mkdir(parents=True)
    own, first = tmp_path / "self/ns/net", tmp_path / "1/ns/net"
    own.symlink_to("net:[2]")
    first.symlink_to("net:[1]")

    def refused(attribute_max: int) -> str:
        with pytest.raises(UnavailableError) as caught:
            nbd.find_family(FakeLink(attribute_max=attribute_max), sys=tmp_path, proc=tmp_path)
        return str(caught.value)

    assert "modprobe nbd" in refused(10)
    _device(tmp_path, 0, sectors=0, identifier=None)  # built in: no directory of a module
    assert "network namespace" in refused(0)
    own.unlink()
    own.symlink_to("net:[1]")
    assert "too old: it has no netlink" in refused(0)
    assert "Linux 5.14" in refused(9)
    link = FakeLink()
    assert nbd.find_family(link, sys=tmp_path, proc=tmp_path) == Family(31, 10)


def test_tuning_writes_what_differs_and_names_what_was_refused(tmp_path: Path) -> None:
    queue = _device(tmp_path, 1, sectors=8, identifier="x") / "queue"
    before = {"scheduler": "[none] mq-deadline", "nr_requests": 128, "max_sectors_kb": 1280}
    make_files(queue, before)
    refused = nbd.tune(1, 32, sys=tmp_path)
    assert (queue / "scheduler").read_text() == "[none] mq-deadline\n"
    assert (queue / "nr_requests").read_text() == "32"
    assert (queue / "max_sectors_kb").read_text() == "128"
    assert set(refused) == set()  # what is not there is made: this is no real /sys
    make_files(queue, {"wbt_lat_usec": 2000})
    nbd.tune(1, 32, in_use=True, sys=tmp_path)
    assert (queue / "wbt_lat_usec").read_text() == "2000\n"
    nbd.tune(1, 32, sys=tmp_path)
    assert (queue / "wbt_lat_usec").read_text() == "0"
    assert nbd.tune(2, 32, sys=tmp_path) == (
        "wbt_lat_usec",
        "scheduler",
        "add_random",
        "rotational",
        "read_ahead_kb",
        "max_sectors_kb",
        "nr_requests",
    )


def test_waiting_for_a_device_that_somebody_has_open(tmp_path: Path) -> None:
    throttling = _device(tmp_path, 0, sectors=0, identifier=None) / "queue" / "wbt_lat_usec"
    make_files(throttling.parent, {throttling.name: 0})
    nbd.wait_free(0, sys=tmp_path)
    assert throttling.read_text() == "-1"  # the kernel's own
    _device(tmp_path, 1, sectors=8, identifier="x")
    with pytest.raises(DeadlineError, match="fuser -v /dev/nbd1"):
        nbd.wait_free(1, timeout_s=0, sys=tmp_path)


def test_a_new_device_that_cannot_be_opened_is_said() -> None:
    with pytest.raises(SystemCallError, match="/dev/nbd99999"):
        nbd.read_partitions(99999)
