# SPDX-License-Identifier: Apache-2.0
"""The device process, started by launch.py.

    python -m infiniswap.device SPEC_FD READY_FD foreground|background

In the background it writes to a log of its own from the moment on at which it has its lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import msgspec

from infiniswap.device.api import Ready
from infiniswap.device.serve import prepare_process, serve
from infiniswap.device.spec import decode_spec
from infiniswap.errors import InfiniswapError


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    spec_fd, ready_fd, in_background = int(argv[1]), int(argv[2]), argv[3] == "background"
    with os.fdopen(spec_fd, "rb") as file:
        spec = decode_spec(file.read(), "spec of the starter")
    prepare_process()

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
        return asyncio.run(serve(spec, tell, own_log=in_background))
    except InfiniswapError as error:
        tell(Ready(ok=False, error=str(error), exit_code=error.exit_code))
        return error.exit_code
    finally:
        if ready_fd >= 0:
            os.close(ready_fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
