# SPDX-License-Identifier: Apache-2.0
"""tools/vm: its arguments, QEMU's command line, the cache and what is read of packages."""

from __future__ import annotations

import dataclasses
import lzma
import os
import sys
from pathlib import Path
from typing import ClassVar, cast

import pytest
from qemu_vm import accel, cache, commands, initrd, kernels, machine, plan, qemu, rxe
from qemu_vm.cli import main, split
from qemu_vm.kernels import Kernel
from qemu_vm.plan import Plan, check, environment
from support.machine import elsewhere, guestrun
from support.machine.guestrun import (
    GUEST_TESTS,
    Kind,
    kernels_of,
    parameters_of,
    put_together,
    remote,
)
from support.machine.ran import ran

from infiniswap.errors import NotFoundError, SystemCallError, UnavailableError, UsageError
from infiniswap.units import GIB, MIB

KERNEL = Kernel("6.12", "6.12.1-amd64", Path("/c/vmlinux"), Path("/c"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINISWAP_VM_CACHE", str(tmp_path / "cache"))


# -------------------------------------------------------------------------- arguments


def test_the_command_starts_after_the_first_two_dashes() -> None:
    assert split(["--hosts", "2", "--", "sh", "--", "x"]) == (["--hosts", "2"], ["sh", "--", "x"])
    assert split(["shell"]) == (["shell"], [])


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "no command"),
        (["uname"], "after --"),
        (["shell", "--", "uname"], "after --"),
        (["--kernel", "5.0", "--", "true"], "invalid choice"),
        (["--hosts", "9", "--", "true"], "1 to 8"),
        (["--memory", "1M", "--", "true"], "256M"),
        (["--share", "/no/such/place", "--", "true"], "no such directory"),
        (["--hosts", "2", "shell"], "one machine"),
        (["--env", "NO_SUCH_VARIABLE", "--", "true"], "no such variable"),
        (["demo"], "--hosts 3 --rxe demo"),
        (["--hosts", "3", "demo"], "--hosts 3 --rxe demo"),
        (["--rxe", "demo"], "needs a network"),
        (["--rxe", "--", "true"], "needs a network"),
        (["--rxe", "--hosts", "2", "shell"], "one machine"),
    ],
)
def test_wrong_arguments_are_told(
    argv: list[str],
    word: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rxe, "missing", list)
    assert main(argv) == UsageError.exit_code
    assert word in capsys.readouterr().err


def test_few_variables_reach_the_guest() -> None:
    environ = {"PATH": "/bin", "SECRET": "x", "INFINISWAP_CI": "1", "A": "b"}
    environ["INFINISWAP_VM_CACHE"] = "/c"
    found = environment(["A", "B=c=d"], environ)
    assert found.pop("INFINISWAP_CODE_OWNER") == str(Path(__file__).stat().st_uid)
    assert found == {"PATH": "/bin", "INFINISWAP_CI": "1", "A": "b", "B": "c=d"}


def test_the_accelerator_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(accel.VARIABLE, "tcg")
    assert accel.wanted("") == "tcg"
    assert accel.wanted("kvm") == "kvm"
    monkeypatch.setenv(accel.VARIABLE, "fast")
    with pytest.raises(UsageError, match="fast"):
        accel.wanted("")


# ----------------------------------------------------------------------- command line


def _line(plan: Plan, name: str = "h1", links: tuple[int, ...] = ()) -> list[str]:
    channels = qemu.Channels(10, 11, 12, 13, links)
    return qemu.command_line(plan, name, KERNEL, Path("/c/initrd"), Path("/r,un"), channels)


def test_the_host_s_root_is_shared_read_only() -> None:
    line = " ".join(_line(Plan(("true",), "6.12", accel="tcg")))
    assert "path=/,mount_tag=root,security_model=none,multidevs=remap,readonly=on" in line
    assert "path=/r,,un,mount_tag=host,security_model=none,multidevs=remap -virtfs" in line
    assert "-accel tcg,thread=single -icount shift=2,sleep=on,align=off" in line
    assert "netdev" not in line
    assert "file=/proc/self/fd/13," in line


@pytest.mark.parametrize(
    ("kernel", "accelerator", "cpus"),
    [("6.12", "tcg", "2"), ("6.1", "tcg", "1"), ("6.1", "kvm", "2")],
)
def test_a_kernel_that_waits_for_a_second_processor_has_one(
    kernel: str, accelerator: str, cpus: str
) -> None:
    old = dataclasses.replace(KERNEL, name=kernel)
    plan = Plan(("true",), kernel, accel=accelerator)
    line = qemu.command_line(plan, "h1", old, Path("/i"), Path("/r"), qemu.Channels(1, 2, 3, 4, ()))
    assert line[line.index("-smp") + 1] == cpus


def test_machines_are_on_a_hub_in_the_first_one() -> None:
    three = Plan(("true",), "6.12", hosts=3)
    first = _line(three, "h1", (20, 21))
    assert [word for word in first if "addr.str" in word] == [
        "stream,id=link0,addr.type=fd,addr.str=20",
        "stream,id=link1,addr.type=fd,addr.str=21",
    ]
    third = _line(three, "h3", (22,))
    assert "stream,id=card,addr.type=fd,addr.str=22" in third
    assert "virtio-net-pci,netdev=card,mac=52:54:00:88:00:03" in third
    assert qemu.settings(three, "h3")["hosts"] == "h1=10.88.0.1 h2=10.88.0.2 h3=10.88.0.3"


def test_a_plan_of_usual_size_is_good() -> None:
    check(Plan(("true",), "6.12", hosts=8, memory_bytes=GIB, disk_bytes=64 * MIB))


def test_a_directory_that_guests_cannot_see_is_told() -> None:
    with pytest.raises(UsageError, match="/var/tmp/checkout: a guest has a /var/tmp of its own"):
        check(Plan(("true",), "6.12", directory=Path("/var/tmp/checkout")))


# ------------------------------------------------------------------------------ cache


def test_an_entry_is_made_once_and_again_for_another_key() -> None:
    made: list[Path] = []

    def make(inner: Path) -> None:
        made.append(inner)
        (inner / "x").write_text(str(len(made)))

    first = cache.entry("thing", cache.key("a"), make)
    assert cache.entry("thing", cache.key("a"), make) == first
    other = cache.entry("thing", cache.key("b"), make)
    assert (first / "x").read_text() == "1"
    assert (other / "x").read_text() == "2"
    assert cache.clean() > 0
    assert not first.exists()


def test_an_entry_that_cannot_be_made_leaves_nothing() -> None:
    def make(inner: Path) -> None:
        (inner / "x").touch()
        raise SystemCallError("no")

    with pytest.raises(SystemCallError):
        cache.entry("thing", "k", make)
    assert [path.name for path in cache.directory().iterdir()] == [".thing.lock"]


def test_an_entry_unused_for_long_goes() -> None:
    old = cache.entry("thing", "a", lambda inner: None)
    os.utime(old, (0, 0))
    cache.entry("thing", "b", lambda inner: None)
    assert not old.exists()


def test_keys_tell_parts_apart() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc")


def test_a_killed_run_s_directory_is_removed() -> None:
    left = cache.directory() / "runs" / "left"
    left.mkdir(parents=True)
    with machine._directory() as mine:
        assert not left.exists()
        machine.sweep()
        assert mine.is_dir()
    assert not mine.exists()


def test_a_damaged_kernel_is_told() -> None:
    digest = cache.key(kernels._RECIPE, "6.12", kernels.SUITES["6.12"])
    cache.entry("kernel-6.12", digest, lambda inner: None)
    with pytest.raises(NotFoundError, match=r"damaged.*tools/vm clean"):
        kernels.get("6.12")


# --------------------------------------------------------------------------- packages


def test_the_package_of_the_asked_version_is_taken() -> None:
    listed = "linux-image-amd64\n  Depends: linux-image-6.12.9+deb12-amd64\n"
    assert kernels.current("6.12", listed) == "linux-image-6.12.9+deb12-amd64"
    with pytest.raises(NotFoundError, match=r"6\.12\.9"):
        kernels.current("6.1", listed)
    with pytest.raises(NotFoundError, match="no kernel"):
        kernels.current("6.12", "")


def _bzimage(payload: bytes) -> bytes:
    image = bytearray(3 * 512)
    image[0x1F1] = 2
    image[0x202:0x206] = b"HdrS"
    image[0x248:0x24C] = (16).to_bytes(4, "little")
    image[0x24C:0x250] = len(payload).to_bytes(4, "little")
    return bytes(image) + bytes(16) + payload + b"rest"


def test_the_kernel_in_a_boot_image_is_found() -> None:
    plain = b"\x7fELF" + bytes(1000)
    assert kernels.uncompressed(_bzimage(lzma.compress(plain) + b"size")) == plain
    assert kernels.uncompressed(_bzimage(lzma.compress(b"other"))) is None
    assert kernels.uncompressed(_bzimage(b"\xfd7zXZ broken")) is None
    assert kernels.uncompressed(b"\x7fELF" + bytes(1000)) is None


@pytest.mark.requires_tool("apt-config")
def test_apt_works_on_files_of_its_own(tmp_path: Path) -> None:
    config = kernels.configuration(tmp_path, "file:///debian", "bookworm")
    dump = ran("apt-config", "dump", env={**os.environ, "APT_CONFIG": str(config)}).stdout
    assert f'Dir::State::lists "{tmp_path}/lists";' in dump
    assert f'Dir::Cache "{tmp_path}/cache";' in dump
    assert 'Dir::Etc::sourceparts "/dev/null";' in dump
    assert "Post-Invoke" not in dump


@pytest.mark.requires_tool("apt-get")
def test_an_unreachable_mirror_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFINISWAP_VM_MIRROR", f"file://{tmp_path}/none")
    with pytest.raises(SystemCallError, match=r"cannot fetch kernel 6\.12.*INFINISWAP_VM_MIRROR"):
        kernels.get("6.12")


def test_a_program_that_is_missing_is_told_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "_PATH", "/nowhere")
    with pytest.raises(UnavailableError, match="apt-get install qemu-system-x86"):
        commands.find("qemu-system-x86_64")


# ------------------------------------------------------------------------------ tests


def test_other_kernels_are_for_full_runs() -> None:
    marker = pytest.mark.kernels("6.12", "6.1").mark
    assert kernels_of(marker, full=False) == ["6.12"]
    assert kernels_of(marker, full=True) == ["6.12", "6.1"]
    assert kernels_of(None, full=True) == ["6.12"]
    with pytest.raises(ValueError, match=r"5\.0"):
        kernels_of(pytest.mark.kernels("5.0").mark, full=False)


def test_what_is_for_another_kernel_only_is_skipped_by_name() -> None:
    marker = pytest.mark.kernels("6.1").mark
    assert parameters_of(marker, full=False) == [pytest.param("6.1", marks=pytest.mark.full)]
    assert parameters_of(marker, full=True) == ["6.1"]
    assert parameters_of(None, full=False) == ["6.12"]


class _Item:
    """What of a test decides where it runs."""

    def __init__(
        self, name: str, hosts: int = 1, *, place: Path = GUEST_TESTS, full: bool = False
    ) -> None:
        self.name = name
        self.nodeid = f"tests/vm/guest/test_x.py::{name}"
        self.path = place / "test_x.py"
        self._marks = {"machine": pytest.mark.machine(hosts=hosts).mark}
        if full:
            self._marks["full"] = pytest.mark.full.mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


NO_CONFIG = cast(pytest.Config, None)


def items_of(*items: _Item) -> list[pytest.Item]:
    return cast(list[pytest.Item], [*items])


def test_tests_of_one_kind_follow_each_other_in_the_places_of_guests_tests() -> None:
    here = Path(__file__).parent
    items = items_of(
        *(_Item("a", place=here), _Item("b"), _Item("c", 2)),
        *(_Item("d", place=here), _Item("e"), _Item("f", 2)),
    )
    put_together(items)
    assert [item.name for item in items] == ["a", "b", "e", "d", "c", "f"]


def test_most_tests_begin_first_and_none_that_is_skipped_boots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = items_of(_Item("a", 3, full=True), _Item("b", 2), _Item("c"), _Item("d"))
    for full, begun in ((False, "cdb"), (True, "cdab")):
        monkeypatch.setattr(guestrun, "FULL", full)
        put_together(items)
        assert "".join(item.name for item in items if remote(item)) == begun


@pytest.mark.parametrize(
    ("in_ci", "full", "outcome"),
    [(False, False, "skipped"), (True, False, "failed"), (False, True, "failed")],
)
def test_without_machines_tests_fail_in_ci_and_in_full_runs(
    in_ci: bool, full: bool, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise UnavailableError("no QEMU here")

    monkeypatch.setattr(plan, "check_host", none)
    monkeypatch.setattr(guestrun, "IN_CI", in_ci)
    monkeypatch.setattr(guestrun, "FULL", full)
    items = items_of(_Item("a"))
    (report,) = guestrun.GuestRuns(NO_CONFIG, items).reports(items[0])
    assert report.outcome == outcome
    assert "needs virtual machines: no QEMU here" in str(report.longrepr)


class _Guest:
    """Instead of machines: `ended` and `dies` are for the test to say."""

    begun: ClassVar[list[_Guest]]

    def __init__(self, kind: Kind, nodeids: list[str], _config: None, *, low: bool) -> None:
        self.kind, self.nodeids, self.low = kind, nodeids, low
        self.ended = self.dies = self.is_lost = self.is_closed = False
        self.begun.append(self)

    def hurry(self) -> None:
        """A double needs no processor."""

    def is_done(self) -> bool:
        return self.ended and not self.dies

    def reports(self, nodeid: str) -> list[pytest.TestReport]:
        assert nodeid in self.nodeids
        self.is_lost = self.dies
        return [elsewhere.report_of(nodeid, "failed" if self.is_lost else "passed", "")]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> list[_Guest]:
    """Those that have begun."""
    _Guest.begun = []
    monkeypatch.setattr(guestrun, "Guest", _Guest)
    monkeypatch.setattr(plan, "check_host", lambda: None)
    monkeypatch.setattr(kernels, "get", lambda _name: None)
    return _Guest.begun


def test_the_next_machines_boot_when_those_before_have_ended(guests: list[_Guest]) -> None:
    here = Path(__file__).parent
    items = items_of(_Item("a", place=here), _Item("b"), _Item("c", 2), _Item("d", 3))
    runs = guestrun.GuestRuns(NO_CONFIG, items)
    runs.go_on()
    assert [guest.kind.hosts for guest in guests] == [1]  # one at a time
    guests[0].ended = True
    runs.go_on()
    runs.go_on()
    assert [(guest.kind.hosts, guest.low) for guest in guests] == [(1, True), (2, True)]
    # What the first ones have left to say is still there, and nobody boots again for it.
    assert [runs.reports(item)[0].outcome for item in items[1:3]] == ["passed", "passed"]
    assert len(guests) == 2
    guests[1].ended = True
    assert runs.reports(items[3])[0].outcome == "passed"
    assert [guest.kind.hosts for guest in guests] == [1, 2, 3]
    assert not guests[2].low  # it is waited for
    runs.close()
    assert all(guest.is_closed for guest in guests)


def test_machines_that_died_boot_again_for_what_is_left(guests: list[_Guest]) -> None:
    items = items_of(_Item("a"), _Item("b"), _Item("c", 2))
    runs = guestrun.GuestRuns(NO_CONFIG, items)
    guests[0].ended = guests[0].dies = True
    runs.go_on()
    assert len(guests) == 1
    assert runs.reports(items[0])[0].outcome == "failed"
    assert runs.reports(items[1])[0].outcome == "passed"
    assert guests[0].is_closed
    assert guests[1].nodeids == [items[1].nodeid]
    assert runs.reports(items[2])[0].outcome == "passed"
    assert guests[1].is_closed  # it had not ended, and another kind is wanted


def test_lines_of_several_machines_are_told_apart(tmp_path: Path) -> None:
    one = machine.Machine("h2", tmp_path)
    assert one.lines(b"a\nb", 1) == b"h2: a\n"
    assert one.lines(b"c\n", 1) == b"h2: bc\n"
    assert one.lines(b"end", 1) == b""
    assert one.lines(b"", 1) == b"h2: end"


def test_a_message_starts_where_it_went_wrong(tmp_path: Path) -> None:
    one = machine.Machine("h1", tmp_path)
    one.keep(b"fine\r\n" * 100 + b"Kernel panic - not syncing\r\n" + b"x\r\n" * 100)
    assert one.told().startswith("Kernel panic - not syncing\nx\n")


@pytest.mark.requires_tool("mkfs.ext4", "setpriv")
def test_a_panic_at_boot_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    boots = []

    def panics(*arguments: object) -> list[str]:
        channels = arguments[-1]
        assert isinstance(channels, qemu.Channels)
        boots.append(channels)
        script = f"import os; os.write({channels.console}, b'Kernel panic - not syncing')"
        return [sys.executable, "-c", script]

    monkeypatch.setattr(machine, "check_host", lambda: None)
    monkeypatch.setattr(kernels, "get", lambda _: KERNEL)
    monkeypatch.setattr(initrd, "get", lambda _: Path("/initrd"))
    monkeypatch.setattr(qemu, "command_line", panics)
    for chosen, times in (("tcg", 3), ("kvm", 1)):
        monkeypatch.setattr(accel, "choose", lambda *_, chosen=chosen: chosen)
        with pytest.raises(SystemCallError, match="the kernel of machine h1 panicked"):
            machine.run(Plan(("true",), "6.12"))
        assert len(boots) == times
        assert capfd.readouterr().err.count("booted once more") == times - 1
        boots.clear()


def test_help_names_every_option() -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "vm"
    text = ran(sys.executable, tool, "--help").stdout
    for word in ("shell", "build", "clean", "--hosts", "--kernel", "--share"):
        assert word in text
