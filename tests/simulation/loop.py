# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop for several simulated hosts: virtual time, and somebody else's choice of
which host runs its next callback.

A callback belongs to the host in whose context it was made. One host's callbacks run in the order
that asyncio promises; which host is next, and whether time moves on before it is, the scheduler
draws. Nothing here waits, opens a file or starts a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import zlib
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Call = Callable[[*Ts], object]


class Host:
    """A process on a machine of its own.

    Attributes:
        frozen: its callbacks do not run, though they may become ready.
        dead: it was killed; what it still does goes nowhere.
        skew_s: what its clock shows beyond the world's.
    """

    def __init__(self, loop: SimLoop, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.tasks: dict[int, SimTask] = {}
        self.frozen = False
        self.dead = False
        self.skew_s = 0.0
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_HOST.set, self)

    def time(self) -> float:
        return self._loop.now_s + self.skew_s

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        return self._context.copy().run(call, *args)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> SimTask:
        task: SimTask = self.run(lambda: self._loop.create_task(work, name=name))
        return task

    def open_tasks(self) -> list[SimTask]:
        """Those that have not ended, oldest first."""
        self.tasks = {number: task for number, task in self.tasks.items() if not task.done()}
        return list(self.tasks.values())

    def has_ready(self) -> bool:
        """Whether a callback may run now."""
        while self.ready and self.ready[0].cancelled():
            self.ready.popleft()
        return bool(self.ready) and not self.frozen

    def next_s(self) -> float:
        """World time of the next timer; infinite without one."""
        while self.timers and self.timers[0][2].cancelled():
            heapq.heappop(self.timers)
        return self.timers[0][0] - self.skew_s if self.timers else float("inf")


_HOST: contextvars.ContextVar[Host] = contextvars.ContextVar("host")


class _Numbered:
    """Hashed by its number: the order of sets must not depend on addresses."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimFuture(_Numbered, asyncio.Future[Any]): ...


class SimTask(_Numbered, asyncio.Task[Any]): ...


class SimLoop(asyncio.AbstractEventLoop):
    """See the module. The methods of AbstractEventLoop that are missing are not simulated.

    Args:
        rng: how long the executor takes.
        failed: told what an exception handler would be told.
    """

    def __init__(self, rng: Random, failed: Callable[[str, BaseException | None], None]) -> None:
        self.now_s = 1000.0
        self.trace = 0
        self.hosts: list[Host] = []
        self._rng = rng
        self._failed = failed
        self._numbers = 0
        self._hosts_made = 0
        self._readers: dict[object, tuple[Host, Callable[..., Any], tuple[Any, ...]]] = {}
        self.world = self.host("world")

    def host(self, name: str) -> Host:
        self._hosts_made += 1
        host = Host(self, name, self._hosts_made)
        self.hosts.append(host)
        return host

    def note(self, text: str) -> None:
        """Adds to the trace, which two runs of one seed must have in common."""
        self.trace = zlib.crc32(f"{self.now_s!r} {text}".encode(), self.trace)

    # ------------------------------------------------------------- for the scheduler

    def run_one(self, host: Host) -> None:
        self.trace = zlib.crc32(b"%d %d" % (host.number, len(host.ready)), self.trace)
        handle = host.ready.popleft()
        if not handle.cancelled():
            handle._run()

    def next_s(self) -> float:
        """When the next timer of a host that runs is due."""
        return min(host.next_s() for host in self.hosts if not host.frozen)

    def advance(self, until_s: float) -> None:
        """Moves time on and makes due timers ready."""
        self.now_s = max(self.now_s, until_s)
        for host in self.hosts:
            self.wake(host)

    def wake(self, host: Host) -> None:
        """Makes the due timers of a host ready."""
        if host.frozen:
            return
        due_s = host.time() + 1e-9
        while host.timers and host.timers[0][0] <= due_s:
            handle = heapq.heappop(host.timers)[2]
            if not handle.cancelled():
                host.ready.append(handle)

    def readable(self, fd: int) -> None:
        """A file descriptor that somebody waits for has become readable."""
        if fd in self._readers:
            host, callback, args = self._readers[fd]
            host.run(self.call_soon, callback, *args)

    # ---------------------------------------------------------------- what asyncio uses

    def time(self) -> float:
        return _HOST.get(self.world).time()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _host_of(self, context: Context | None) -> Host:
        return _HOST.get(self.world) if context is None else context.get(_HOST, self.world)

    def call_soon(
        self, callback: Call[*Ts], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """To the end of its host's queue."""
        handle = asyncio.Handle(callback, args, self, context)
        self._host_of(context).ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Call[*Ts], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """By its host's clock."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._host_of(context).timers, (when, self._numbers, handle))
        return handle

    def call_later(
        self, delay: float, callback: Call[*Ts], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """By its host's clock."""
        when_s = self._host_of(context).time() + delay
        return self.call_at(when_s, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they come up."""

    def create_future(self) -> SimFuture:
        future = SimFuture(loop=self)
        self._numbers += 1
        future.number = self._numbers
        return future

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> SimTask:
        host = self._host_of(context)
        task: SimTask = SimTask.__new__(SimTask)
        self._numbers += 1
        task.number = self._numbers  # before __init__, which hashes it
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]
        host.tasks[task.number] = task
        if len(host.tasks) > 500:
            host.open_tasks()
        return task

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Runs it after a while, at once and whole; a cancelled one may run all the same."""
        future: asyncio.Future[T] = self.create_future()
        delay_s = self._rng.choice((0.0, 0.001, 0.001, 0.01, 0.1))
        self.call_later(delay_s, self._execute, future, functools.partial(func, *args))
        return future

    def _execute(self, future: asyncio.Future[T], func: Callable[[], T]) -> None:
        if future.cancelled() and self._rng.random() < 0.5:
            return  # it had not begun
        try:
            result = func()
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def add_reader(
        self, fd: FileDescriptorLike, callback: Callable[[*Ts], Any], *args: *Ts
    ) -> None:
        """The scheduler says when it is readable."""
        self._readers[fd] = (_HOST.get(self.world), callback, args)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def call_exception_handler(self, context: Any) -> None:
        """Nothing may ever come here."""
        self._failed(str(context.get("message")), context.get("exception"))

    # ----------------------------------------------------------------------- life

    def __enter__(self) -> SimLoop:
        events._set_running_loop(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        events._set_running_loop(None)

    def kill(self, host: Host) -> None:
        """Ends a host at once. Its connections must be cut already: then nothing that its tasks
        do while they unwind has an effect on anybody else."""
        host.dead = True
        host.frozen = False
        tasks = host.open_tasks()
        for _round in range(1000):
            for task in tasks:
                if not task.done():
                    task.cancel()
            while host.has_ready():
                self.run_one(host)
            tasks = host.open_tasks()
            if not tasks:
                break
            # What waits for a time-out while it unwinds gets it.
            host.skew_s = max(host.skew_s, min(host.next_s() + host.skew_s - self.now_s, 1e9))
            self.wake(host)
        else:
            self._failed(f"{host.name}: tasks that cannot be cancelled: {tasks}", None)
        host.ready.clear()
        host.timers.clear()
        host.frozen = True
        self.hosts.remove(host)
