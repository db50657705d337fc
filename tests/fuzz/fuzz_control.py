#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fuzzer of what Python decodes from others: control messages, HTTP bodies and headers of the
control API, bodies of a device's Unix socket.

    python tests/fuzz/fuzz_control.py CORPUS -max_total_time=60   # atheris: libFuzzer's flags
    python tests/fuzz/fuzz_control.py --seconds 60                # without it: hypothesis

Checked of every input: it gives a message or the one exception that callers expect, the
exception's text fits a log line and quotes nothing of the input, and a message that was accepted
comes back the same from its own encoding, within all bounds.

Input: a byte that chooses one of TARGETS, then its bytes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import re
import sys
import time
import unicodedata
from collections.abc import Callable
from typing import Any, Final

HAVE_ATHERIS: Final = importlib.util.find_spec("atheris") is not None

if HAVE_ATHERIS and __name__ == "__main__":
    atheris = importlib.import_module("atheris")
    _instrumented: Any = atheris.instrument_imports(include=["infiniswap"])
else:
    _instrumented = contextlib.nullcontext()

with _instrumented:
    import msgspec

    from infiniswap.control import auth
    from infiniswap.control import messages as m
    from infiniswap.device import api
    from infiniswap.device.process import control_socket
    from infiniswap.errors import InfiniswapError, ProtocolMismatchError, UsageError

HTTP_BODIES: Final = (m.Status, m.VersionInfo, m.NonceInfo, m.HttpError)
DEVICE_BODIES: Final = (api.JoinRequest, api.LeaveRequest, api.StopRequest)
FORGING: Final = frozenset(
    ("Cc", "Zl", "Zp", "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
)
TO_DONOR: Final = m.TO_DONOR
TO_CONSUMER: Final = m.TO_CONSUMER
KEY: Final = b"a key of the fuzzer"
REQUEST: Final = auth.HttpRequest(b"a digest", "GET", "/", "0" * 64)

ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    1.5,
    1 << 31,
    1 << 53,
    1 << 64,
    10**400,
    1e308,
    "",
    "x" * 600,
    "name\x1b[2J\n",
    "\u2028\u202e\x9b",
    "0" * 32,
    "0" * 64,
    "00000000-0000-0000-0000-00000000000a\n",
    [],
    [[]],
    {},
    {"type": "hello"},
)


class Bytes:
    """The input, taken piece by piece; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, count: int) -> int:
        """A number from 0 to count - 1; from two bytes."""
        taken = self._data[self._at : self._at + 2]
        self._at += 2
        return int.from_bytes(taken, "big") % count

    def rest(self) -> bytes:
        """All that is left."""
        taken, self._at = self._data[self._at :], len(self._data)
        return taken


# ------------------------------------------------------------- building what is nearly right


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    """Fields with their types and bounds."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def value(info: Any, source: Bytes) -> Any:
    """A JSON value of a field's type; now and then another."""
    if source.below(16) == 1:
        return ODD[source.below(len(ODD))]
    inspect = msgspec.inspect
    match info:
        case inspect.Metadata():
            return value(info.type, source)
        case inspect.BoolType():
            return source.below(2) == 1
        case inspect.IntType():
            low = info.ge or 0
            high = info.le if info.le is not None else (info.lt or (1 << 53)) - 1
            edges = (low, high, low + 1, high - 1, low - 1, high + 1, 7)
            return edges[source.below(len(edges))]
        case inspect.FloatType():
            return (0.0, 0.5, 1.0, -0.1, 1e12, 1e300)[source.below(6)]
        case inspect.StrType():
            return text(info.pattern or "", source)
        case inspect.ListType():
            made = [value(info.item_type, source) for _ in range(source.below(4))]
            return made * 10_000 if source.below(256) == 255 else made
        case inspect.DictType():
            return {text("", source): value(info.value_type, source)}
        case inspect.StructType():
            if info.array_like:
                return [value(field.type, source) for field in fields_of(info.cls)]
            return structure(info.cls, source)
        case _:
            return None


def text(pattern: str, source: Bytes) -> str:
    """Text that fits one of the patterns of messages.py, or does not."""
    fitting = ("0" * 32, "f" * 64, "00000000-0000-0000-0000-00000000000a", "name", "")
    if source.below(4):
        for candidate in fitting:
            if re.search(pattern, candidate):
                return candidate
    count = 1 + source.below(40)
    return "".join(chr(source.below(0x3000)) for _ in range(count))


def structure(kind: type[msgspec.Struct], source: Bytes) -> dict[str, Any]:
    """A message or body as a dict, perhaps with a field too many or too few."""
    made: dict[str, Any] = {}
    if kind.__struct_config__.tag is not None:
        made["type"] = kind.__struct_config__.tag
    for field in fields_of(kind):
        if source.below(64) != 1:
            made[field.encode_name] = value(field.type, source)
    if source.below(16) == 1:
        made[text("", source)] = ODD[source.below(len(ODD))]
    return made


def as_json(made: Any, source: Bytes) -> bytes:
    """Encoded, perhaps cut short or with bytes changed."""
    encoded = bytearray(json.dumps(made, ensure_ascii=source.below(2) == 1), "utf-8", "replace")
    for _ in range(source.below(32) // 28):
        encoded[source.below(len(encoded))] = source.below(256)
    if source.below(64) == 1:
        return b'{"deep":' + (b"[" if source.below(2) else b'{"x":') * 50_000
    if source.below(32) == 1:
        del encoded[source.below(len(encoded)) :]
    return bytes(encoded)


# -------------------------------------------------------------------------------- targets


def check_refusal(error: InfiniswapError) -> None:
    """The text goes to logs, and to whoever reads them."""
    said = str(error)
    assert said.isprintable(), f"a refusal that breaks log lines: {said!r}"
    assert len(said) < 1000, f"a refusal of {len(said)} characters"


def check_message(message: Any, decode: Callable[[bytes], Any]) -> None:
    """Accepted: so it must be within bounds when it is said again."""
    encoded = m.encode(message)
    assert decode(encoded) == message
    for name in ("device_name", "host_name", "donor_name", "reason", "detail", "error"):
        said = getattr(message, name, "")
        sorts = {*map(unicodedata.category, said), *map(unicodedata.bidirectional, said)}
        assert not sorts & FORGING, f"a name that forges log lines: {said!r}"


def decoded(data: bytes, decode: Callable[[bytes], Any]) -> None:
    """One message, from bytes and, as it comes from a WebSocket, from text."""
    results: list[Any] = []
    forms: list[Any] = [data]
    with contextlib.suppress(UnicodeDecodeError):
        forms.append(data.decode())
    for form in forms:
        try:
            message = decode(form)
        except ProtocolMismatchError as error:
            check_refusal(error)
            results.append(None)
        else:
            check_message(message, decode)
            results.append(message)
    assert all(result == results[0] for result in results)


def raw_to_donor(source: Bytes) -> None:
    decoded(source.rest(), m.decode_to_donor)


def raw_to_consumer(source: Bytes) -> None:
    decoded(source.rest(), m.decode_to_consumer)


def made_to_donor(source: Bytes) -> None:
    kind = TO_DONOR[source.below(len(TO_DONOR))]
    decoded(as_json(structure(kind, source), source), m.decode_to_donor)


def made_to_consumer(source: Bytes) -> None:
    kind = TO_CONSUMER[source.below(len(TO_CONSUMER))]
    decoded(as_json(structure(kind, source), source), m.decode_to_consumer)


def http_body(source: Bytes) -> None:
    kind = HTTP_BODIES[source.below(len(HTTP_BODIES))]
    body = source.rest() if source.below(2) else as_json(structure(kind, source), source)
    try:
        message = m.decode_body(body, kind)
    except ProtocolMismatchError as error:
        check_refusal(error)
    else:
        check_message(message, lambda again: m.decode_body(again, kind))


def http_header(source: Bytes) -> None:
    nonces = auth.Nonces(KEY, used_max=4)
    header = source.rest().decode("utf-8", "surrogateescape")
    if header[:1] == "!":  # what a fuzzer would not find by itself
        header = f"{auth.HTTP_SCHEME} {header[1:65]}:{header[65:]}"
    given = auth.parse_http_authorization(header)
    if given is not None:
        assert (len(given[0]), len(given[1])) == (64, 64)
        assert not auth.proofs_equal(given[1], auth.http_proof(KEY, REQUEST))
        assert not nonces.is_good(given[0], 0.0)


class _Request:
    """As much of a request as a device looks at for its body."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


def device_body(source: Bytes) -> None:
    kind = DEVICE_BODIES[source.below(len(DEVICE_BODIES))]
    body = source.rest() if source.below(2) else as_json(structure(kind, source), source)
    reading = control_socket._body(_Request(body), kind)  # type: ignore[arg-type]
    try:
        reading.send(None)
    except StopIteration as done:
        message = done.value
    except UsageError as error:
        check_refusal(error)
        return
    else:
        raise AssertionError("decoding a body waits")
    assert type(message) is kind


TARGETS: Final = (
    raw_to_donor,
    raw_to_consumer,
    made_to_donor,
    made_to_consumer,
    http_body,
    http_header,
    device_body,
)


def one_input(data: bytes) -> None:
    """What libFuzzer calls."""
    source = Bytes(data[1:])
    TARGETS[(data[0] if data else 0) % len(TARGETS)](source)


# --------------------------------------------------------------------------------- driving


def with_hypothesis(seconds: float) -> int:
    """Returns how many inputs were tried. Each round starts from nothing, so that it can end."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    end_s = time.monotonic() + seconds
    count = 0

    @settings(
        max_examples=2000,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(target=st.integers(0, len(TARGETS) - 1), data=st.binary(max_size=2000))
    def one_round(target: int, data: bytes) -> None:
        nonlocal count
        if time.monotonic() < end_s:
            count += 1
            one_input(bytes([target]) + data)

    while time.monotonic() < end_s:
        one_round()
    return count


def main() -> int:
    """Returns the exit code; a finding ends with a traceback."""
    if HAVE_ATHERIS and "--seconds" not in sys.argv:
        # Most decoding is in C: what the builders do is what tells inputs apart.
        module = sys.modules[__name__]
        for name in ("value", "text", "structure", "as_json", "decoded"):
            setattr(module, name, atheris.instrument_func(getattr(module, name)))
        for target in TARGETS:
            atheris.instrument_func(target)
        atheris.Setup(sys.argv, atheris.instrument_func(one_input))
        atheris.Fuzz()
        return 0
    if len(sys.argv) != 3 or sys.argv[1] != "--seconds":
        print("usage: fuzz_control.py --seconds N", file=sys.stderr)
        return 2
    print(f"stat::number_of_executed_units: {with_hypothesis(float(sys.argv[2]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
