# SPDX-License-Identifier: Apache-2.0
"""Waiting for blocked signals, and for descriptors beside them."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Collection, Mapping
from typing import Final

from infiniswap.errors import from_oserror

_SIGSET_BYTES: Final = 128
"""sigset_t of both glibc and musl."""


def open_signalfd(numbers: Collection[int]) -> int:
    """A descriptor (signalfd(2)) that is readable while one of these blocked signals is pending.

    Raises:
        SystemCallError: the kernel's refusal.
    """
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (ctypes.c_ulong * (8 * _SIGSET_BYTES // word_bits))()
    for number in numbers:
        words[(number - 1) // word_bits] |= 1 << (number - 1) % word_bits
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.signalfd(-1, ctypes.byref(words), os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        code = ctypes.get_errno()
        error = OSError(code, os.strerror(code))
        raise from_oserror("cannot make a signalfd", error)
    return fd


def poll(wanted: Mapping[int, int], wait_s: float) -> dict[int, int]:
    """Events by descriptor; empty after `wait_s` seconds. See poll(2)."""
    poller = select.poll()
    for fd, events in wanted.items():
        poller.register(fd, events)
    return dict(poller.poll(wait_s * 1000))


def take_pending(numbers: Collection[int]) -> signal.struct_siginfo | None:
    """One of these blocked signals, None when none is pending; does not wait.

    `signal.sigtimedwait` must not be asked to wait: interrupted after its time is up, as by SIGSTOP
    and SIGCONT, it returns what it had on the stack (CPython 3.11, signal_sigtimedwait_impl). With
    no time to wait the kernel never reports an interruption.
    """
    return signal.sigtimedwait(numbers, 0)
