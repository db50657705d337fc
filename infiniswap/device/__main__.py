# SPDX-License-Identifier: Apache-2.0
"""The device process, started by launch.py or by the holder.

    python -m infiniswap.device foreground|background active|standby
    python -m infiniswap.device foreground|background alone SPEC_FD READY_FD

`active` is the first process of a device with a holder, `standby` one that waits for its turn;
their descriptors have fixed numbers (csrc/holder/holder.h). `alone` is a device's only process.

A process in the background writes to the device's log as soon as it holds the device's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import traceback
from typing import NoReturn

import msgspec

from infiniswap import logs
from infiniswap.device.api import Ready
from infiniswap.device.process.life import prepare_process, serve, settle, succeed
from infiniswap.device.process.service import DeviceService
from infiniswap.device.spec.spec import DeviceSpec, decode_spec
from infiniswap.device.succession.hand_over import read_kept
from infiniswap.device.succession.holder import (
    KEY,
    READY_FD,
    SOCKET_FD,
    SPEC,
    SPEC_FD,
    STATE,
    UNSAID,
    Holder,
    HolderGoneError,
    read_all,
)
from infiniswap.device.succession.standby import HopelessError
from infiniswap.errors import InfiniswapError, SystemCallError

log = logging.getLogger("infiniswap.device")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    in_background, role = argv[1] == "background", argv[2]
    prepare_process(own_log=in_background)
    if role == "standby":
        os.close(SPEC_FD)  # of the first process; the holder has a newer one
        return _stand_by(Holder(SOCKET_FD))
    if role == "active":
        holder = Holder(SOCKET_FD)
        spec = decode_spec(read_all(SPEC_FD), "spec of the starter")
        os.ftruncate(SPEC_FD, 0)  # frees memory that is not locked; the holder has it open, too
        os.close(SPEC_FD)
        code = _start(spec, READY_FD, in_background=in_background, holder=holder)
        holder.ended(code)
        return code
    with os.fdopen(int(argv[3]), "rb") as file:
        spec = decode_spec(file.read(), "spec of the starter")
    return _start(spec, int(argv[4]), in_background=in_background, holder=None)


def _start(spec: DeviceSpec, ready_fd: int, *, in_background: bool, holder: Holder | None) -> int:
    def tell(ready: Ready) -> bool:
        nonlocal ready_fd
        told, fd = False, ready_fd
        ready_fd = -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the starter is gone
                told = os.write(fd, msgspec.json.encode(ready) + b"\n") > 0
            os.close(fd)
        return told

    try:
        return asyncio.run(serve(spec, tell, own_log=in_background, holder=holder))
    except InfiniswapError as error:
        tell(Ready(ok=False, error=str(error), exit_code=error.exit_code))
        return error.exit_code
    except Exception as error:
        # Told here, as the log with the traceback is deleted together with the run directory.
        tell(Ready(ok=False, error=_describe_bug(error), exit_code=InfiniswapError.exit_code))
        raise
    finally:
        if ready_fd >= 0:
            os.close(ready_fd)


def _describe_bug(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"the device process failed: {type(error).__name__}: {error} "
        f"({last.filename}, line {last.lineno}). This is a bug in Infiniswap: please report it."
    )


def _stand_by(holder: Holder) -> int:
    """Makes and locks everything that can be, waits for its turn, and takes over."""
    try:
        service = _prepare(holder)
        with asyncio.Runner() as runner:
            runner.get_loop()
            settle()
            holder.ready()
            turn = holder.wait_turn()
            known = set(sys.modules)
            try:
                code = runner.run(succeed(service, turn))
            except Exception as error:
                # Here: the runner's end would wait for threads that may wait for the device.
                _give_up(holder, error)
            if late := set(sys.modules) - known:
                log.info("loaded after the take-over: %s", " ".join(sorted(late)))
    except HolderGoneError:
        return 0  # the device has ended, or its holder
    except Exception as error:
        _give_up(holder, error)
    holder.ended(code)
    return code


def _give_up(holder: Holder, error: Exception) -> NoReturn:
    """Says why this process cannot stand by or take over, and ends it."""
    code = error.exit_code if isinstance(error, InfiniswapError) else 1
    log.error("%s", error, exc_info=None if isinstance(error, InfiniswapError) else error)
    if isinstance(error, HopelessError):
        holder.hopeless(str(error))
        logs.release()
    else:
        # Writing them could wait for the device, and so could the end of this process then.
        with contextlib.suppress(OSError):
            if lines := logs.held():
                holder.keep_bytes(UNSAID, lines)
        holder.refused(str(error) or type(error).__name__)
    _vanish(code)


def _prepare(holder: Holder) -> DeviceService:
    descriptors = holder.wait_prepared()
    try:
        if SPEC not in descriptors or STATE not in descriptors:
            raise SystemCallError("the device has left nothing to take over")
        left = read_kept(read_all(descriptors[SPEC]))
        service = DeviceService(left.spec, holder=holder)
        service.prepare(descriptors[STATE], descriptors.get(KEY, -1), left)
        return service
    finally:
        for fd in descriptors.values():
            os.close(fd)


def _vanish(code: int) -> NoReturn:
    """Ends the process without undoing anything: its successor goes on from here."""
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
