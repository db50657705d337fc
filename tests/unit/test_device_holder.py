# SPDX-License-Identifier: Apache-2.0
"""What a device process and its holder say to each other, and what a successor finds."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.devices.holder_pair import Pair, said

from infiniswap.device.process.runs import Runs, cgroup_name
from infiniswap.device.succession.holder import Holder, HolderGoneError, read_all
from infiniswap.errors import ConflictError, SystemCallError
from infiniswap.system.cgroup import RUN_PREFIX


def test_descriptors_travel_with_their_names(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    holder.keep_bytes("spec", b"what the device is")
    text, (fd,) = said(theirs)
    assert text == "keep spec"
    assert read_all(fd) == b"what the device is"
    socket.send_fds(theirs, [b"prepare spec"], [fd])
    os.close(fd)
    prepared = holder.wait_prepared()
    assert read_all(prepared["spec"]) == b"what the device is"
    os.close(prepared["spec"])


def test_a_turn_says_why_and_when(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    fd = theirs.fileno()
    socket.send_fds(theirs, [b"take-over 3 1234567 crashed lock,fuse"], [fd, fd])
    turn = holder.wait_turn()
    assert (turn.count, turn.died_ns, turn.reason) == (3, 1_234_567, "crashed")
    assert list(turn.descriptors) == ["lock", "fuse"]
    for fd in turn.descriptors.values():
        os.close(fd)


@pytest.mark.parametrize("text", ["take-over 1 2 killed a,b", "prepare -", "nonsense"])
def test_what_does_not_fit_is_an_error(holder_pair: Pair, text: str) -> None:
    holder, theirs = holder_pair
    theirs.send(text.encode())
    with pytest.raises(SystemCallError, match="holder"):
        holder.wait_turn()


def test_the_end_of_the_holder_is_the_end_of_waiting(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    theirs.close()
    with pytest.raises(HolderGoneError):
        holder.wait_turn()


def test_without_a_holder_nothing_issaid() -> None:
    holder = Holder()
    holder.serving()
    holder.keep("lock", 0)
    assert not holder.present
    assert holder.degraded == ""


async def _renewal(holder: Holder, gone: Callable[[], None] = lambda: None) -> asyncio.Task[None]:
    holder.listen(gone)
    renewal = asyncio.create_task(holder.renew())
    await asyncio.sleep(0)
    return renewal


async def test_a_restart_waits_for_the_new_standby(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    renewal = await _renewal(holder)
    assert said(theirs)[0] == "renew"
    with pytest.raises(ConflictError, match="under way"):
        await holder.renew()
    theirs.send(b"standby ready")
    theirs.send(b"renewed")
    await renewal
    assert holder.standby == "ready"
    assert holder.degraded == ""
    holder.close()


async def test_a_restart_names_the_interpreter_of_other_code(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    holder.listen(lambda: None)
    renewal = asyncio.create_task(holder.renew("/usr/lib/infiniswap/2/bin/python3"))
    await asyncio.sleep(0)
    assert said(theirs)[0] == "renew /usr/lib/infiniswap/2/bin/python3"
    theirs.send(b"renewed")
    await renewal
    holder.close()


async def test_what_the_new_code_cannot_do_is_told(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    renewal = await _renewal(holder)
    theirs.send(b"standby none it has died")
    theirs.send(b"refused the state file has version 2")
    with pytest.raises(ConflictError, match="cannot be restarted: the state file has version 2"):
        await renewal
    assert holder.degraded.startswith("standby: ")
    holder.close()


async def test_a_holder_that_dies_is_noticed(holder_pair: Pair) -> None:
    holder, theirs = holder_pair
    gone = asyncio.Event()
    renewal = await _renewal(holder, gone.set)
    theirs.close()
    await asyncio.wait_for(gone.wait(), 10)
    with pytest.raises(ConflictError):
        await renewal
    assert holder.degraded.startswith("holder: ")
    holder.serving()  # no error: there is nobody to tell


# ----------------------------------------------------------------------- what is found


Two = tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]


@pytest.fixture
def two_processes() -> Iterator[Two]:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    with start() as first, start() as second:
        yield first, second


async def test_a_successor_knows_the_runs(tmp_path: Path, two_processes: Two) -> None:
    living, ended = two_processes
    with ThreadPoolExecutor(1) as executor:
        before = Runs(executor, lambda: None, lambda: (), tmp_path / "runs")
        before.join(living.pid)
        before.join(ended.pid)
        name = cgroup_name(living.pid).removeprefix(RUN_PREFIX)
        # Its process dies, and with that one of the runs.
        await before.close()
        ended.kill()
        ended.wait()
        changed = asyncio.Event()
        after = Runs(executor, changed.set, lambda: (), tmp_path / "runs")
        after.watch_again()
        assert after.pids() == [living.pid]
        async with asyncio.timeout(30):
            await changed.wait()  # cleaned up after the one that has ended
        assert [entry.name for entry in (tmp_path / "runs").iterdir()] == [name]
        after.leave(living.pid)
        assert list((tmp_path / "runs").iterdir()) == []
        await after.close()


async def test_rings_are_held_or_it_is_told(
    holder_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    holder, theirs = holder_pair
    holder.hold_rings((7, 9))
    assert [said(theirs)[0], said(theirs)[0]] == ["ring 7", "ring 9"]
    gone = asyncio.Event()
    holder.listen(gone.set)
    theirs.send(b"unheld Operation not permitted")
    theirs.close()
    await asyncio.wait_for(gone.wait(), 10)
    assert "could not copy the rings of this process (Operation not permitted)" in caplog.text
