# SPDX-License-Identifier: Apache-2.0
"""Inputs from which each fuzzer starts: good sessions, and each rule of the protocol broken once.
Made when the fuzzers are built (fuzzers.py), not kept."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from infiniswap.control import messages as m

TICKET: Final = b"0123456789abcdef0123456789abcdef"
"""Of the export in fuzz_nbd_server.c."""

OPTION_MAGIC: Final = 0x49484156454F5054
REPLY_MAGIC: Final = 0x3E889045565A9
REQUEST_MAGIC: Final = 0x25609513
EXPORT_NAME, ABORT, LIST, STARTTLS, INFO, GO, STRUCTURED = 1, 2, 3, 5, 6, 7, 8
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES = 0, 1, 2, 3, 4, 5, 6
ASYNC, PREFIX, NAME, NO_ZEROES = 1, 2, 4, 8
"""Of the first byte of fuzz_nbd_server.c."""


def _option(number: int, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">QII", OPTION_MAGIC, number, size) + payload


def _go(name: bytes, number: int = GO, infos: tuple[int, ...] = ()) -> bytes:
    body = struct.pack(">I", len(name)) + name + struct.pack(f">H{len(infos)}H", len(infos), *infos)
    return _option(number, body)


def _request(command: int, offset: int = 0, length: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">IHHQQI", REQUEST_MAGIC, flags, command, 7, offset, length)


def nbd_server() -> Iterator[bytes]:
    """A byte of choices, a seed of sizes, what the client says."""
    flags = struct.pack(">I", 3)
    for choices, name in ((0, TICKET), (ASYNC, b"")):
        for said in (
            b"",
            flags,
            flags + _option(LIST) + _option(STRUCTURED) + _option(STARTTLS) + _option(ABORT),
            flags + _go(name, INFO, (3,)) + _go(name, GO, (1, 3)) + _request(READ, 0, 4096),
            flags + _option(EXPORT_NAME, name) + _request(READ, 512, 512) + _request(DISC),
            flags + _go(b"x" * 32) + _go(name * 200) + _go(name) + _request(FLUSH),
            flags + _option(LIST) * 63 + _go(name) + _request(FLUSH),
            flags + _option(LIST) * 65,
            flags + _option(99, b"x" * 8192) + _option(99, length=8193),
            struct.pack(">I", 0xFFFFFFFF),
        ):
            yield bytes([choices, 0]) + said
        good = (
            _request(WRITE, 4096, 4096)
            + b"w" * 4096
            + _request(READ, 4096, 4096)
            + _request(WRITE, 0, 512, 1)
            + b"f" * 512
            + _request(TRIM, 0, 8192)
            + _request(ZEROES, 8192, 4096, 2)
            + _request(FLUSH)
            + _request(READ, 0, 8192) * 3
        )
        wrong = (
            _request(READ, 2**64 - 4096, 8192)
            + _request(READ, 16384, 8192)
            + _request(READ, 24576, 4096)
            + _request(READ, 4096, 8192)
            + _request(CACHE, 0, 512)
            + _request(READ, 0, 0)
            + _request(READ, 0, 0xFFFFFFFF)
            + _request(WRITE, 65536, 512)
            + b"p" * 512
            + _request(READ, 0, 512, 0xFFFF)
        )
        for how in range(0, 256, 16):
            for kind in (PREFIX, PREFIX | NAME, PREFIX | NO_ZEROES):
                yield bytes([choices | how | kind, how]) + (good if kind == PREFIX else wrong)
        yield bytes([choices | PREFIX, 0]) + good + wrong + _request(DISC)
        yield bytes([choices | PREFIX, 0]) + _request(WRITE, 0, 0xFFFFFFFF) + b"x" * 100
        yield bytes([choices | PREFIX, 0]) + _request(READ, 0, 512) * 130


def _reply(kind: int, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">QIII", REPLY_MAGIC, GO, kind, size) + payload


def nbd_client() -> Iterator[bytes]:
    """A byte of choices, what the other end says."""
    greeting = struct.pack(">8sQH", b"NBDMAGIC", OPTION_MAGIC, 3)
    export = _reply(3, struct.pack(">HQH", 0, 1 << 20, 0x16D))
    blocks = _reply(3, struct.pack(">HIII", 3, 1, 4096, 1 << 25))
    ack = _reply(1)
    for how in (0, 1, 3, 5, 9, 16, 36, 63):
        yield bytes([how]) + greeting + export + blocks + ack
    for said in (
        struct.pack(">8sQ", b"NBDMAGIC", 0x420281861253),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        greeting + _reply(0x80000006, b"unknown"),
        greeting + _reply(0x80000002),
        greeting + blocks + ack,
        greeting + _reply(3, struct.pack(">HQH", 0, 4096, 0x16D)) + ack,
        greeting + _reply(3, struct.pack(">HQH", 0, 1 << 20, 2)) + ack,
        greeting + _reply(3, struct.pack(">HQH", 0, 1 << 20, 1)[:5]) + ack,
        greeting + _reply(3, struct.pack(">HIII", 3, 8192, 8192, 512)) + export + ack,
        greeting + _reply(1, length=0xFFFFFFFF),
        greeting + _reply(3, b"\0\1name") * 70,
    ):
        yield bytes([0]) + said


def nbd_reply() -> Iterator[bytes]:
    """Steps of two bytes: see fuzz_nbd_reply.c."""
    submit, raw, header, payload, finish = range(5)
    for reads in (0x00, 0x20, 0x40):
        yield bytes([submit, reads, header, 0, payload, 255, payload, 255])
    yield bytes([submit, 0x10, header, 0, submit, 0x11, header + 5, 1])
    yield bytes([submit, 0x90, header, 0, finish, 0, submit, 0x01, header + 5, 0x04])
    yield bytes([submit, 0, submit, 1, header + 5, 0, header, 0, payload, 255])
    yield bytes([submit, 0, raw, 16, *struct.pack(">IIQ", 0x67446698, 0, 1)])


def control() -> Iterator[bytes]:
    """A target of fuzz_control.py, its bytes."""
    uuid = "00000000-0000-0000-0000-00000000000a"
    to_donor: tuple[m.Message, ...] = (
        m.Hello(
            versions=[2], device_id=uuid, device_name="swap0", host_name="host", nonce="0" * 64
        ),
        m.Auth(proof="0" * 64),
        m.Ping(id=1),
        m.LeaseRequest(id=1, slots_max=4),
        m.LeaseRequest(id=1, slots_max=0, tickets=1),
        m.LeaseRequest(id=1, slots_max=4, use=m.LeaseUse(job="a", user="b", uid=1, tenant="c")),
        m.MapRequest(id=2, lease=1, slab=0),
        m.MapRequest(id=2, lease=1, slab=1, ahead=True),
        m.KeepRequest(id=2, lease=1, slot=0, generation=1),
        m.RenewRequest(id=3, lease=1, reclaim="0" * 32, epoch=1),
        m.ActivityAnswer(
            id=4,
            slots=[m.SlotActivity(slot=0, pages_per_s=1.5)],
            device=m.DeviceFigures(uptime_s=1.5, size_bytes=1 << 30, slabs=1, page_in_us_p50=40.0),
        ),
        m.Goodbye(reason="done", detail="x"),
    )
    to_consumer: tuple[m.Message, ...] = (
        m.Challenge(version=2, versions=[2], nonce="0" * 64),
        m.RenewAnswer(id=1, epoch=2, slots=[m.SlotInfo(0, 1, 2)]),
        m.RefusedAnswer(id=1, reason="quota", detail="x"),
        m.EvictRequest(id=1, lease=1, slot=0, generation=1, deadline_ms=1000),
        m.DrainNotice(draining=True),
    )
    yield from (b"\0" + m.encode(message) for message in to_donor)
    yield from (b"\1" + m.encode(message) for message in to_consumer)
    for target in (2, 3, 4):
        for kind in range(24):
            yield bytes([target, 0, kind]) + bytes(range(80))
    yield b"\4\0\1\0\1" + m.encode(m.NonceInfo(nonce="0" * 64))
    yield b"\5Infiniswap " + b"0" * 64 + b":" + b"f" * 64
    yield b"\5!" + b"a" * 64 + b"b" * 64
    for kind in range(3):
        yield bytes([6, 0, kind, 0, 1]) + b'{"pid": 17, "remove": true}'


SEEDS: Final[dict[str, Callable[[], Iterable[bytes]]]] = {
    "nbd_server": nbd_server,
    "nbd_client": nbd_client,
    "nbd_reply": nbd_reply,
    "control": control,
}


def write(name: str, directory: Path) -> int:
    """Writes a fuzzer's seeds; returns how many."""
    directory.mkdir(parents=True, exist_ok=True)
    count = 0
    for count, seed in enumerate(SEEDS[name](), 1):
        (directory / f"seed-{count:03}").write_bytes(seed)
    return count
