# SPDX-License-Identifier: Apache-2.0
"""Log lines: the journal's protocol, what does not wait, rates, and the table of events."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from infiniswap import events, logs

ROOT = Path(__file__).resolve().parent.parent.parent


def record(
    text: str,
    *args: object,
    level: int = logging.WARNING,
    extra: Mapping[str, object] | None = None,
) -> logging.LogRecord:
    return logging.getLogger("isw.test").makeRecord(
        "isw.test", level, "x.py", 1, text, args, None, extra=extra
    )


Journal = tuple[socket.socket, logs.JournalHandler]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """What the journal reads from, and the handler that writes to it."""
    handler = logs.JournalHandler("infiniswap-test", tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "socket"))
        sock.setblocking(False)
        yield sock, handler
    handler.close()


def decode(data: bytes) -> dict[str, str]:
    """As the journal reads a datagram."""
    found = {}
    while data:
        name, mark, rest = re.split(rb"([=\n])", data, maxsplit=1)
        if mark == b"=":
            value, _, data = rest.partition(b"\n")
        else:
            (length,) = struct.unpack_from("<Q", rest)
            value, data = rest[8 : 8 + length], rest[9 + length :]
        found[name.decode()] = value.decode()
    return found


def test_a_record_is_one_datagram_with_its_fields(journal: Journal) -> None:
    sock, handler = journal
    handler.fields["INFINISWAP_DEVICE"] = "swap0"
    extra = events.about(events.DONOR_GIVEN_UP, donor="10.0.0.2:9400")
    handler.emit(record("donor %s:\ngiven up", "d", extra=extra))
    assert decode(sock.recv(65536)) == {
        "MESSAGE": "donor d:\ngiven up",
        "PRIORITY": "4",
        "LOGGER": "isw.test",
        "SYSLOG_IDENTIFIER": "infiniswap-test",
        "INFINISWAP_DEVICE": "swap0",
        "INFINISWAP_EVENT": "donor-given-up",
        "MESSAGE_ID": events.DONOR_GIVEN_UP.message_id,
        "INFINISWAP_DONOR": "10.0.0.2:9400",
    }
    handler.emit(record("x" * 1_000_000, level=logging.ERROR))
    assert decode(sock.recv(65536))["PRIORITY"] == "3"


def test_a_full_journal_is_not_waited_for_and_hears_what_it_missed(journal: Journal) -> None:
    sock, handler = journal
    sent = 0
    while not handler.lost:  # its queue is bounded; blocking would never end here
        handler.emit(record("line %d", sent))
        sent += 1
    handler.emit(record("lost, too"))
    assert handler.lost == 2
    for number in range(sent - 1):
        assert decode(sock.recv(65536))["MESSAGE"] == f"line {number}"
    handler.emit(record("again"))
    told = decode(sock.recv(65536))
    assert told["MESSAGE"].startswith("2 log lines were lost")
    assert told["INFINISWAP_EVENT"] == events.LINES_LOST.name
    assert decode(sock.recv(65536))["MESSAGE"] == "again"
    assert handler.lost == 0
    sock.close()
    handler.emit(record("nobody hears"))
    assert handler.lost == 1


def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as file:
        status = os.fstat(file.fileno())
        name = f"{status.st_dev}:{status.st_ino}"
        assert logs.is_journal({"JOURNAL_STREAM": name}, file.fileno())
        assert not logs.is_journal({"JOURNAL_STREAM": name}, 1)
        for wrong in ("", "1:2", "x", f"{name}0"):
            assert not logs.is_journal({"JOURNAL_STREAM": wrong}, file.fileno())
        assert not logs.is_journal({}, file.fileno())


def test_a_plain_line_ends_with_the_event() -> None:
    formatter = logs.PlainFormatter("%(levelname)s %(message)s")
    assert formatter.format(record("a %d", 1)) == "WARNING a 1"
    text = formatter.format(record("a\nb", extra=events.about(events.TAKE_OVER)))
    assert text == "WARNING a [take-over]\nb"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """To read from, to write to."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may get no turn for long."""
    monkeypatch.setattr(logs, "_PATIENCE_S", 10.0)


@pytest.fixture
def aside(pipe: tuple[int, int]) -> Iterator[logs.AsideHandler]:
    found = logs.AsideHandler(pipe[1])
    yield found
    found.close()


def read_lines(fd: int, last: str) -> list[str]:
    """Until that one has come."""
    data = b""
    while not data.endswith(f"{last}\n".encode()):
        data += os.read(fd, 65536)
    return data.decode().splitlines()


def test_a_plain_line_is_written_when_it_has_been_logged(
    pipe: tuple[int, int], aside: logs.AsideHandler
) -> None:
    os.set_blocking(pipe[0], False)
    for number in range(100):
        aside.emit(record("line %d", number))
        assert os.read(pipe[0], 65536) == f"line {number}\n".encode()


def test_nobody_waits_for_a_log_that_takes_nothing(
    pipe: tuple[int, int], aside: logs.AsideHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_PATIENCE_S", 0.0)
    room = fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ)
    os.write(pipe[1], b"x" * (room - 1) + b"\n")
    total = 1200
    for number in range(total):  # waiting for one of them would never end here
        aside.emit(record("line %d", number))
        while number == 0 and aside._lines:
            time.sleep(0.001)  # until the thread has that one
    first = read_lines(pipe[0], "line 1000")
    assert first[1:] == [f"line {number}" for number in range(1001)]  # one of them in the thread
    aside.emit(record("again"))
    told, again = read_lines(pipe[0], "again")
    lost = f"{total - 1001} log lines were lost"
    assert told == f"{lost}, as the log did not take them [log-lines-lost]"
    assert again == "again"


def test_what_a_full_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, (tmp_path / "log").open("wb") as good:
        handler = logs.AsideHandler(full.fileno())
        for number in range(50):
            handler.emit(record("line %d", number))
        os.dup2(good.fileno(), full.fileno())
        handler.emit(record("again"))
        handler.close()
    told, again = (tmp_path / "log").read_text().splitlines()
    assert told.startswith("50 log lines were lost")
    assert again == "again"


def test_lines_that_are_held_come_later_or_from_somebody_else(
    pipe: tuple[int, int], aside: logs.AsideHandler
) -> None:
    os.set_blocking(pipe[0], False)
    aside.hold_back(b"a predecessor's\n")
    aside.emit(record("mine"))
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 100)
    aside.go_on()
    assert os.read(pipe[0], 100) == b"a predecessor's\nmine\n"
    assert aside.take() == b""
    aside.hold_back()
    aside.emit(record("unsaid"))
    assert aside.take() == b"unsaid\n"
    aside.go_on()
    aside.emit(record("said"))
    assert os.read(pipe[0], 100) == b"said\n"
    aside.hold_back()
    aside.emit(record("last words"))
    aside.close()
    assert os.read(pipe[0], 100) == b"last words\n"


def test_the_last_page_of_a_log_stays_mapped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb+", buffering=0) as file:
        handler = logs.AsideHandler(file.fileno())
        for size in (10, 9000):
            handler.emit(record("x" * size))
            offset = (path.stat().st_size - 1) // 4096 * 4096
            maps = Path("/proc/self/maps").read_text().splitlines()
            (found,) = (line for line in maps if str(path) in line)
            assert int(found.split()[2], 16) == offset
        handler.close()
    assert path.stat().st_size == 11 + 9001


def test_lines_of_one_kind_are_limited_and_counted() -> None:
    limit = logs.LogRateLimit(burst=3, window_s=30.0)

    def said(second: float, text: str = "a %s", extra: Mapping[str, object] | None = None) -> str:
        made = record(text, "x", extra=extra)
        made.created = second
        return made.getMessage() if limit.filter(made) else ""

    assert [said(n) for n in range(5)] == ["a x"] * 3 + [""] * 2
    assert said(5, "b %s")
    assert said(31) == "a x (2 more like it were left out)"
    assert said(62) == "a x"
    event = events.about(events.TAKE_OVER)
    assert [said(n, f"{n} %s", event) for n in range(4)] == ["0 x", "1 x", "2 x", ""]
    assert said(-100, extra=event), "a clock that was set back silences nothing"


# ------------------------------------------------------------------------------ table


def test_the_table_is_that_of_the_code() -> None:
    text = (ROOT / "docs/logs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert rows == [(event.name, event.meaning, event.mend) for event in events.ALL]
    assert len({event.name for event in events.ALL}) == len(events.ALL)


def test_every_event_is_told_by_some_line() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "infiniswap").rglob("*.py")
        if path.name != "events.py"
    )
    names = {name for name, value in vars(events).items() if isinstance(value, events.Event)}
    assert names == set(re.findall(r"\bevents\.([A-Z_]+)\b", sources)) & names
