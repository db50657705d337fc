# SPDX-License-Identifier: Apache-2.0
"""[daemon.slo] with a whole donor: commands, a Prometheus server, and pressure figures, which may
hang, fail or lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from support.donors.donor_world import WAIT_S, Handler, refusal, until, world

from infiniswap.control.client import Identity
from infiniswap.donor.latency import CommandLatency, Latency, PressureLatency, PrometheusLatency
from infiniswap.errors import ConfigError, InfiniswapError

A = Identity("00000000-0000-0000-0000-0000000000aa", "swap0", "host-a")
SETTLE_S = 2.0
PRESSURE = Path("/proc/pressure/cpu")


class Prometheus:
    """A server that answers every query with `body`."""

    def __init__(self) -> None:
        self.body = ""
        self.status = 200
        self.queries: list[str] = []
        self.hangs = asyncio.Event()
        self.hangs.set()

    def says(self, *values: str) -> None:
        samples = ",".join(f'{{"metric":{{}},"value":[1.5,"{value}"]}}' for value in values)
        self.body = f'{{"status":"success","data":{{"resultType":"vector","result":[{samples}]}}}}'

    async def answer(self, request: web.Request) -> web.Response:
        self.queries.append(request.query["query"])
        await self.hangs.wait()
        return web.Response(text=self.body, status=self.status, content_type="application/json")


@contextlib.asynccontextmanager
async def prometheus() -> AsyncIterator[tuple[Prometheus, str]]:
    """It, and its address."""
    server = Prometheus()
    application = web.Application()
    application.router.add_get("/below/api/v1/query", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield server, f"http://127.0.0.1:{port}/below/"
    finally:
        server.hangs.set()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def read_by(latency: Latency) -> AsyncIterator[Latency]:
    try:
        yield latency
    finally:
        await latency.close()


async def error_of(latency: Latency) -> str:
    with pytest.raises(InfiniswapError) as caught:
        await latency.read()
    return str(caught.value)


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "latency"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# ------------------------------------------------------------------------ the donor


async def test_in_danger_nothing_more_is_lent_and_the_most_active_slab_goes_back_first() -> None:
    async with prometheus() as (server, url):
        server.says("0.1")
        async with world(
            daemon__slo__query="p99", daemon__slo__prometheus=url, daemon__slo__bound=1.0,
            daemon__slo__settle_s=SETTLE_S,
        ) as w, await w.session(handler := Handler(), A) as session:  # fmt: skip
            harvester, evictor = w.donor.harvester, w.donor.service.evictor
            evictor.config = replace(evictor.config, activity_s=WAIT_S)  # on any machine
            await until(lambda: not harvester.is_held)
            lease = await session.lease(64)
            for slab in range(6):
                await session.map(lease.lease, slab)
            handler.rates = {0: 1.0, 1: 900.0, 2: 3.0, 3: 2.0, 4: 500.0, 5: 4.0}
            server.says("1000")
            await until(lambda: harvester.is_held)
            assert await refusal(session.map(lease.lease, 6)) == "no_memory"
            answer = await session.memory()
            assert not answer.can_map
            assert "protects a service of its host" in answer.no_room
            await until(lambda: w.donor.service.counters["slo_returned"] == 1)
            assert [slot for _, slot, _ in handler.evicted] == [1]
            # What came back is the host's: nothing is kept ready while the service is in danger.
            await until(lambda: not w.store.stats()["slabs_dirty"])
        assert set(server.queries) == {"p99"}


async def test_nothing_is_lent_before_the_first_measurement() -> None:
    async with prometheus() as (server, url):
        server.hangs.clear()
        server.says("0.1")
        async with world(
            daemon__slo__query="x", daemon__slo__prometheus=url, daemon__slo__bound=1.0,
            daemon__slo__settle_s=60.0,
        ) as w, await w.session(None, A) as session:  # fmt: skip
            lease = await session.lease(64)
            assert await refusal(session.map(lease.lease, 0)) == "no_memory"
            assert "has not measured" in (await session.memory()).no_room
            server.hangs.set()
            await until(lambda: not w.donor.harvester.is_held)
            await session.map(lease.lease, 0)


async def test_a_command_that_fails_is_an_alarm_until_it_works(tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = script(tmp_path, f"cat {said}")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[daemon.slo]\ncommand = "{program}"\nbound = 1\nsettle_s = 10\n')
    async with world(path=settings) as w, await w.session(None, A) as session:
        lease = await session.lease(64)
        await until(lambda: bool(w.donor.service.status().degraded))
        (alarm,) = w.donor.service.status().degraded
        assert "cannot measure the service that it protects" in alarm
        assert "No such file" in alarm
        assert await refusal(session.map(lease.lease, 1)) == "no_memory"
        values = w.donor.service.figures().values
        assert values["infiniswap_donor_slo_blind"] == {(): 1}
        assert values["infiniswap_donor_slo_held"] == {(): 1}
        said.write_text("0.25")
        await until(lambda: not w.donor.harvester.is_held)
        assert not w.donor.service.status().degraded
        values = w.donor.service.figures().values
        assert values["infiniswap_donor_slo_ratio"] == {(): 0.25}
        await session.map(lease.lease, 1)


async def test_a_daemon_without_a_service_to_protect_is_as_before() -> None:
    async with world() as w, await w.session(None, A) as session:
        lease = await session.lease(64)
        await session.map(lease.lease, 0)
        assert w.donor.service.guard is None
        assert w.donor.service.figures().values["infiniswap_donor_slo_held"] == {(): 0}


# ----------------------------------------------------------------------- a command


async def test_a_command_is_killed_in_time_with_its_children(tmp_path: Path) -> None:
    left = tmp_path / "left"
    program = script(
        tmp_path, f"sleep 600 & echo $! > {left}.1\n(sleep 600 & echo $! > {left}.2)\nwait"
    )
    async with read_by(CommandLatency([program], 0.5)) as latency:
        assert "did not end within 0.5 s" in await error_of(latency)
    first, second = (int((tmp_path / f"left.{number}").read_text()) for number in (1, 2))
    await until(lambda: not _runs(first) and not _runs(second))


async def test_children_that_a_command_leaves_behind_hold_up_nothing(tmp_path: Path) -> None:
    left = tmp_path / "left"
    program = script(tmp_path, f"sleep 600 & echo $! > {left}\necho 3.5")
    async with read_by(CommandLatency([program], 30.0)) as latency:
        assert await latency.read() == 3.5
    pid = int(left.read_text())
    await until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_closing_ends_a_command_that_hangs(tmp_path: Path) -> None:
    latency = CommandLatency([script(tmp_path, "sleep 600")], 300.0)
    reading = asyncio.create_task(latency.read())
    await asyncio.sleep(0.1)
    await latency.close()
    with pytest.raises(InfiniswapError):
        await reading


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo no >&2; exit 3", "ended with code 3: no"),
        ("kill -9 $$", "got signal 9"),
        ("echo fast", "'fast', which is no latency"),
        ("echo nan", "no latency"),
        ("echo -1", "no latency"),
        ("echo inf", "no latency"),
        ("true", "'', which is no latency"),
        ("yes", "printed more than 4096 bytes"),
    ],
)
async def test_a_command_that_prints_no_latency(tmp_path: Path, text: str, said: str) -> None:
    async with read_by(CommandLatency([script(tmp_path, text)], 30.0)) as latency:
        assert said in await error_of(latency)


async def test_a_command_that_is_not_there() -> None:
    async with read_by(CommandLatency(["/nowhere/latency"], 1.0)) as latency:
        assert "No such file" in await error_of(latency)


async def test_a_command_gets_arguments_no_rights_and_a_fresh_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINISWAP_DAEMON_POOL", "1G")
    program = script(
        tmp_path,
        f'[ -z "$INFINISWAP_DAEMON_POOL" ] && [ $(pwd) = / ] && grep CapEff /proc/self/status > '
        f"{tmp_path}/rights && echo $1",
    )
    async with read_by(CommandLatency([program, "7"], 30.0)) as latency:
        assert await latency.read() == 7.0
    assert int((tmp_path / "rights").read_text().split()[1], 16) == 0


def test_a_program_that_others_can_change_is_refused(tmp_path: Path) -> None:
    program = script(tmp_path, "echo 1")
    CommandLatency([program], 1.0)
    os.chmod(program, os.stat(program).st_mode | stat.S_IWOTH)
    with pytest.raises(ConfigError, match="others can change the program"):
        CommandLatency([program], 1.0)


# -------------------------------------------------------------------- a Prometheus


async def test_a_server_that_gives_a_scalar_or_a_vector() -> None:
    async with prometheus() as (server, url), read_by(PrometheusLatency(url, "q", 30.0)) as latency:
        server.says("0.125")
        assert await latency.read() == 0.125
        server.body = '{"status":"success","data":{"resultType":"scalar","result":[1.5,"2"]}}'
        assert await latency.read() == 2.0


async def test_a_server_that_gives_no_latency() -> None:
    async with prometheus() as (server, url), read_by(PrometheusLatency(url, "q", 30.0)) as latency:
        server.says("NaN")
        assert "'NaN', which is no latency" in await error_of(latency)
        server.says()
        assert "gives 0 numbers, not one" in await error_of(latency)
        server.says("1", "2")
        assert "gives 2 numbers, not one" in await error_of(latency)
        server.body = '{"status":"success","data":{"resultType":"matrix","result":[]}}'
        assert "no scalar and no vector" in await error_of(latency)
        server.body = "<html>"
        assert "not that of a Prometheus" in await error_of(latency)
        server.body = '{"status":"success","error":"' + "x" * (65 << 10) + '"}'
        assert "longer than 64 KiB" in await error_of(latency)
        server.status = 400
        server.body = '{"status":"error","errorType":"bad_data","error":"unexpected \\u001b["}'
        said = await error_of(latency)
        assert "the query is refused: unexpected" in said
        assert "\x1b" not in said
        server.status = 302
        assert "the server answers 302" in await error_of(latency)


async def test_a_server_that_hangs_or_is_away() -> None:
    async with prometheus() as (server, url):
        server.hangs.clear()
        async with read_by(PrometheusLatency(url, "q", 0.1)) as latency:
            assert "no answer within 0.1 s" in await error_of(latency)
    async with read_by(PrometheusLatency(url, "q", 30.0)) as latency:
        assert "no answer" in await error_of(latency)


# ------------------------------------------------------------------------ pressure


@pytest.mark.parametrize("has_pressure", [PRESSURE.exists()])
async def test_pressure_is_the_kernels_or_an_error(has_pressure: bool) -> None:
    async with read_by(PressureLatency("cpu")) as latency:
        if has_pressure:
            assert 0.0 <= await latency.read() <= 100.0
        else:
            assert "no pressure figures" in await error_of(latency)
