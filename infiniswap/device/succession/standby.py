# SPDX-License-Identifier: Apache-2.0
"""What a standby prepares for its turn, and what it takes over then: the predecessor's state file
and its front end. Each function blocks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from infiniswap.device.frontends.attach import Attachment
from infiniswap.device.spec.spec import DeviceSpec
from infiniswap.engine.protocol import Engine
from infiniswap.errors import EngineError, InfiniswapError, NotFoundError

_HOPELESS = frozenset({errno.ENODATA, errno.EBADMSG, errno.EPROTONOSUPPORT, errno.ESTALE})
_WARM_UP_S_MAX = 30.0


class HopelessError(InfiniswapError):
    """No process can take this device over: it is lost, as if there had been no standby."""


def check_state(fd: int, spec: DeviceSpec) -> None:
    """Checks that this code can go on with a state file, and changes nothing.

    Raises:
        EngineError: damaged, of another version or boot, or of another device.
    """
    from infiniswap.engine.native_engine import read_state

    info = read_state(fd)
    if (info.size_bytes, info.slab_bytes) != (spec.engine_bytes, spec.config.device.slab_bytes):
        raise EngineError("the state file is of a device of another size", code=errno.EBADMSG)


def take_over_state(engine: Engine, backup: str | None) -> None:
    """Makes the predecessor's state the engine's own.

    Raises:
        HopelessError: it cannot be used.
        ConflictError: the predecessor's last writes have not ended yet.
    """
    try:
        engine.take_over(backup)
    except EngineError as error:
        if error.code in _HOPELESS:
            raise HopelessError(
                f"the state of the device cannot be used: {error.what}", mend=error.mend
            ) from error
        raise


def prepare_front_end(
    attachment: Attachment, engine: Engine, note: bytes, *, look_again_s: float = 1.0
) -> Attachment:
    """Makes the attachment's front end ready to take over; there is no event loop yet.

    Args:
        attachment: of a standby.
        engine: a standby, too.
        note: the predecessor's.
        look_again_s: pause before the second look, where the first found nothing.

    Raises:
        HopelessError: nothing is left of the predecessor's.
        InfiniswapError: this process could never take over.
    """
    try:
        attachment.kernel.prepare(engine, note)
    except NotFoundError:
        # A wrong answer would end the device, and what was not seen for a moment may be there.
        time.sleep(look_again_s)
        try:
            attachment.kernel.prepare(engine, note)
        except NotFoundError as error:
            raise HopelessError(str(error)) from error
    return attachment


def take_over_front_end(attachment: Attachment, descriptors: Mapping[str, int]) -> None:
    """Takes over front end, link and swap area as they are.

    Raises:
        HopelessError: nothing of them is left.
        InfiniswapError: the step that failed.
    """
    try:
        attachment.take_over_device(descriptors)
    except NotFoundError as error:
        raise HopelessError(str(error)) from error


def warm_up(executor: ThreadPoolExecutor, threads: int) -> None:
    """Makes an executor start all its threads now."""
    barrier = threading.Barrier(threads + 1)
    for _ in range(threads):
        executor.submit(barrier.wait, _WARM_UP_S_MAX)
    barrier.wait(_WARM_UP_S_MAX)
