# SPDX-License-Identifier: Apache-2.0
"""Signals that end a program which cleans up behind itself: they wait while it makes something."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(SystemExit):
    """A signal asked for the end; the exit code is 128 + its number, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interrupts:
    """Context manager, main thread only: the first signal raises Interrupted. Later ones do
    nothing, because by then everything is being removed."""

    def __init__(self) -> None:
        self._held = 0
        self._pending: int | None = None
        self._raised = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        for number in _NUMBERS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._raised or self._pending is not None:
            return
        if self._held:
            self._pending = number
            return
        self._raised = True
        raise Interrupted(number)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Within the block nothing is raised: what it makes is on record when it ends."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held and self._pending is not None and not self._raised:
            self._raised = True
            raise Interrupted(self._pending)
