# SPDX-License-Identifier: Apache-2.0
"""The stepped engine (csrc/sim): every order of events, chosen by the test.

`lib` has the functions and constants of isw.h and of isw_sim.h. It is a library of its own, beside
the product's; as neither keeps anything of its own, each works on the other's handles.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

from infiniswap.engine.binding import check, ffi
from infiniswap.engine.native_engine import NativeEngine, engine_config
from infiniswap.engine.protocol import EngineConfig

_isw_sim: Final[Any] = importlib.import_module("_isw_sim")
lib: Final[Any] = _isw_sim.lib


@dataclass(frozen=True, slots=True)
class SimDone:
    """A completed request of a SimEngine. `data` is what a successful READ returned."""

    id: int
    op: int
    offset: int
    length: int
    error: int
    data: bytes


class SimEngine(NativeEngine):
    """An engine without threads, with donors and backup simulated in memory.

    One thread at a time. `step` runs one handler, the very one that a thread would run; see
    csrc/sim/isw_sim.h.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, None)
        self._sim_scratch = ffi.new("uint8_t[]", config.request_bytes_max)

    def close(self) -> None:
        """See NativeEngine."""
        if self._handle is not None and not self._handle.closed:
            self.send_held_back()
        super().close()

    def send_held_back(self) -> None:
        """As threads would do it while somebody waits for the end of what is sent to a donor."""
        self.step(lib.ISW_STEP_UNPLUG)
        while self.step(lib.ISW_STEP_BACKUP_SLOW):
            pass

    def _create(self, config: EngineConfig, backup_path: str | None) -> Any:
        error = ffi.new("struct isw_error *")
        out = ffi.new("isw_engine **")
        result = lib.isw_sim_create(engine_config(config), out, error)
        check(result, "cannot create the simulated engine", error)
        return out[0]

    def submit(self, op: int, offset: int, length: int, data: bytes | None = None) -> int:
        """Submits a request (ISW_SIM_*); returns its number."""
        if data is not None and len(data) < length:
            raise ValueError(f"{len(data)} bytes of data for a request of {length}")
        number = ffi.new("uint64_t *")
        buffer = ffi.NULL if data is None else ffi.from_buffer(data)
        with self._use() as engine:
            result = lib.isw_sim_submit(engine, op, offset, length, buffer, number)
        check(result, "cannot submit")
        return int(number[0])

    def reap(self) -> SimDone | None:
        """Takes one completed request; None when there is none."""
        done = _isw_sim.ffi.new("struct isw_sim_request *")
        scratch = self._sim_scratch
        with self._use() as engine:
            result = lib.isw_sim_reap(engine, done, scratch, len(scratch))
        if check(result, "cannot reap") == 0:
            return None
        is_read = (done.op & 0xFF) == lib.ISW_SIM_READ and done.error == 0
        data = bytes(ffi.buffer(scratch, done.length)) if is_read else b""
        return SimDone(done.id, done.op, done.offset, done.length, done.error, data)

    def remote(self, queues: int, slots: int) -> int:
        """Adds a simulated donor; returns its remote number."""
        out = ffi.new("uint32_t *")
        with self._use() as engine:
            check(lib.isw_sim_remote(engine, queues, slots, out), "cannot add a remote")
        return int(out[0])

    def sim_reconnect(self, remote: int) -> None:
        """After REMOTE_DOWN: new connections, the donor's bytes kept."""
        with self._use() as engine:
            check(lib.isw_sim_remote_reconnect(engine, remote), "cannot reconnect")

    def slot(self, remote: int, slot: int, memory: Any) -> None:
        """Lays a donor's slot into memory outside, which the caller keeps; None: it is empty."""
        pointer = ffi.NULL if memory is None else memory
        with self._use() as engine:
            check(lib.isw_sim_slot(engine, remote, slot, pointer), "cannot lay out the slot")

    def fence(self, remote: int) -> None:
        """The donor closes its end: nothing more takes effect there; a step DOWN tells us."""
        with self._use() as engine:
            check(lib.isw_sim_fence(engine, remote), "cannot fence")

    def pending(self, remote: int) -> int:
        """Transfers under way to a donor."""
        with self._use() as engine:
            return check(lib.isw_sim_pending(engine, remote), "no such remote")

    def step(self, kind: int, remote: int = 0, n: int = 0) -> bool:
        """Runs one step (ISW_STEP_*); False when nothing of that kind was pending."""
        with self._use() as engine:
            return check(lib.isw_engine_step(engine, kind, remote, n), "bad step") > 0
