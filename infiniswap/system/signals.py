# SPDX-License-Identifier: Apache-2.0
"""Waiting for blocked signals, and for descriptors beside them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Final

from infiniswap.errors import from_oserror

STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
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


@contextlib.asynccontextmanager
async def stop_signals(stop: Callable[[signal.Signals, int], None]) -> AsyncIterator[None]:
    """Calls `stop` on the event loop with each SIGTERM and SIGINT, and the pid of who sent it (0:
    not known). They are blocked meanwhile: of a handled one Python does not say who that is."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:  # for one that comes while a thread starts a program
        loop.add_signal_handler(number, stop, number, 0)
    descriptor = open_signalfd(STOP_SIGNALS)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def take() -> None:
        info = take_pending(STOP_SIGNALS)
        if info is not None:
            stop(signal.Signals(info.si_signo), info.si_pid)

    loop.add_reader(descriptor, take)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def for_a_program() -> Iterator[None]:
    """While this is open, a program that this thread starts does not inherit that `stop_signals`
    blocks its signals: it could not be ended by them."""
    defaults = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) not in defaults]
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
