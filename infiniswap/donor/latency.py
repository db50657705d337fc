# SPDX-License-Identifier: Apache-2.0
"""How the latency of a protected service is measured: by a command, by a query to Prometheus, or
from the kernel's pressure figures."""

from __future__ import annotations

import asyncio
import math
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

import aiohttp
import msgspec

from infiniswap.config import SloConfig
from infiniswap.control.text import clean_text
from infiniswap.errors import DeadlineError, SystemCallError
from infiniswap.own_code import check_program
from infiniswap.system.pressure import pressure_percent
from infiniswap.system.programs import ShortCommand

_ANSWER_BYTES_MAX: Final = 64 << 10
_SAID_LENGTH_MAX: Final = 160


class Latency(Protocol):
    """A way to measure it."""

    async def read(self) -> float:
        """The latency now, zero or more. Raises InfiniswapError: it cannot be measured."""

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""


def make_latency(slo: SloConfig, time_limit_s: float) -> Latency:
    """The one that is configured.

    Args:
        slo: names exactly one.
        time_limit_s: of a measurement, seconds.

    Raises:
        ConfigError: others can change the program.
    """
    if slo.command:
        return CommandLatency(shlex.split(slo.command), time_limit_s)
    if slo.query:
        return PrometheusLatency(slo.prometheus, slo.query, time_limit_s)
    return PressureLatency(slo.pressure)


class CommandLatency:
    """A command that prints one number.

    Args:
        argv: absolute path and arguments.
        time_limit_s: seconds after which it is killed.

    Raises:
        ConfigError: others can change the program.
    """

    def __init__(self, argv: list[str], time_limit_s: float) -> None:
        check_program(Path(argv[0]), "daemon.slo.command")
        self._name = argv[0]
        self._command = ShortCommand(argv, time_limit_s)
        self._thread = ThreadPoolExecutor(1, "slo")  # a command that hangs keeps no other from it

    async def read(self) -> float:
        """See Latency."""
        done = await asyncio.get_running_loop().run_in_executor(self._thread, self._command.run)
        if done.code:
            said = clean_text((done.stderr or done.stdout).strip())[:_SAID_LENGTH_MAX]
            end = f"ended with code {done.code}" if done.code > 0 else f"got signal {-done.code}"
            raise SystemCallError(f"`{self._name}` {end}{': ' if said else ''}{said}")
        return _number(done.stdout, f"`{self._name}` printed")

    async def close(self) -> None:
        """See Latency."""
        self._command.stop()
        await asyncio.to_thread(self._thread.shutdown)


class _Scalar(msgspec.Struct, tag="scalar", tag_field="resultType"):
    result: tuple[float, str]


class _Sample(msgspec.Struct):
    value: tuple[float, str]


class _Vector(msgspec.Struct, tag="vector", tag_field="resultType"):
    result: list[_Sample]


class _Answer(msgspec.Struct):
    """https://prometheus.io/docs/prometheus/latest/querying/api/, "Instant queries"."""

    status: Literal["success", "error"]
    data: _Scalar | _Vector | None = None
    error: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class PrometheusLatency:
    """An expression that a Prometheus server evaluates to one number.

    Args:
        url: of the server.
        query: the expression.
        time_limit_s: of an answer, seconds.
    """

    def __init__(self, url: str, query: str, time_limit_s: float) -> None:
        self._url = f"{url.rstrip('/')}/api/v1/query"
        self._query = query
        self._time_limit_s = time_limit_s
        self._http: aiohttp.ClientSession | None = None

    async def read(self) -> float:
        """See Latency."""
        try:
            async with asyncio.timeout(self._time_limit_s):
                answer = await self._ask()
        except TimeoutError:
            raise DeadlineError(
                f"no answer within {self._time_limit_s:g} s", where=self._url
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise SystemCallError(f"no answer: {error}", where=self._url) from error
        except msgspec.ValidationError as error:
            raise SystemCallError(
                f"the answer is no scalar and no vector: {error}", where=self._url
            ) from error
        except msgspec.DecodeError as error:
            raise SystemCallError(
                "the answer is not that of a Prometheus server", where=self._url
            ) from error
        if answer.status == "error" or answer.data is None:
            said = clean_text(answer.error)[:_SAID_LENGTH_MAX]
            raise SystemCallError(f"the query is refused: {said}", where=self._url)
        if isinstance(answer.data, _Scalar):
            return _number(answer.data.result[1], "the query gives")
        if len(answer.data.result) != 1:
            raise SystemCallError(
                f"the query gives {len(answer.data.result)} numbers, not one",
                where=self._url,
                mend="Wrap it in max(...), and add `or vector(0)` for times without requests.",
            )
        return _number(answer.data.result[0].value[1], "the query gives")

    async def _ask(self) -> _Answer:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        request = self._http.get(self._url, params={"query": self._query}, allow_redirects=False)
        async with request as response:
            body = await response.content.read(_ANSWER_BYTES_MAX + 1)
            while len(body) <= _ANSWER_BYTES_MAX and (more := await response.content.readany()):
                body += more
        if len(body) > _ANSWER_BYTES_MAX:
            raise SystemCallError("the answer is longer than 64 KiB", where=self._url)
        if response.status not in (200, 400, 422):
            raise SystemCallError(f"the server answers {response.status}", where=self._url)
        return msgspec.json.decode(body, type=_Answer)

    async def close(self) -> None:
        """See Latency."""
        if self._http is not None:
            await self._http.close()


class PressureLatency:
    """The pressure on a resource of this host, in percent.

    Args:
        resource: cpu, io or memory.
    """

    def __init__(self, resource: str) -> None:
        self._resource = resource

    async def read(self) -> float:
        """See Latency."""
        return await asyncio.to_thread(pressure_percent, self._resource)

    async def close(self) -> None:
        """See Latency."""


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 <= number < math.inf:
        shown = clean_text(text.strip())[:_SAID_LENGTH_MAX]
        raise SystemCallError(
            f"{what} {shown!r}, which is no latency",
            mend="It has to be one number, zero or more; a service without requests has 0.",
        )
    return number
