# SPDX-License-Identifier: Apache-2.0
"""The front end far as the package sees it: what its clients tell of themselves."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import time

import pytest

from infiniswap.engine.binding import ffi
from infiniswap.engine.native import NativeEngine
from infiniswap.engine.protocol import EngineConfig, FarTold, FrontendConfig, FrontendInfo
from infiniswap.errors import EngineError
from infiniswap.units import MIB

pytestmark = pytest.mark.requires_native

_FAR_BYTES = 8 * MIB
CONFIG = EngineConfig(
    size_bytes=4 * MIB + _FAR_BYTES,
    slab_bytes=4 * MIB,
    staging_pages=64,
    requests_max=8,
    far_bytes=_FAR_BYTES,
    no_backup=True,
)
_MAGIC, _VERSION = 0x52414657, 1


def test_counts_have_the_names_and_order_of_the_header() -> None:
    names = tuple(name for name, _ in ffi.typeof("struct isw_far_told").fields)
    assert names == tuple(field.name for field in dataclasses.fields(FarTold))


def test_a_process_without_an_agent_is_counted() -> None:
    table = os.memfd_create("table")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with NativeEngine(CONFIG, None) as engine, ours, theirs:
        frontend = engine.frontend("far", FrontendConfig(table_fd=table))
        os.close(table)
        frontend.serve(theirs.fileno())
        assert frontend.info() == FrontendInfo(_FAR_BYTES, frontend.info().requests_max)
        ours.send(struct.pack("=IIII16x", _MAGIC, _VERSION, 0, 2))  # ISWF_OFF_PERMISSION
        end_s = time.monotonic() + 60
        while frontend.info().far == FarTold():
            assert time.monotonic() < end_s
            time.sleep(0.001)
        assert frontend.info().far == FarTold(off_permission=1)
        assert frontend.info().connections == 0


def test_a_table_of_another_device_is_refused() -> None:
    table = os.memfd_create("table")
    os.write(table, b"something else")
    with NativeEngine(CONFIG, None) as engine, pytest.raises(EngineError, match="another device"):
        engine.frontend("far", FrontendConfig(table_fd=table))
    os.close(table)
