# SPDX-License-Identifier: Apache-2.0
"""A donor makes itself known on a broker, for as long as its daemon lives.

The announcement is retained; when the daemon vanishes, its will makes the broker remove it. The
announcement is repeated, because a broker may lose what it has retained, and listeners forget
donors they do not hear. With a broker that keeps no messages it is repeated more often. A fault of
the broker is a sentence in the log and in `degraded`; the donor goes on. Where our user may write
and not read, the announcement works and only the check of it does not, so the session stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from infiniswap import events
from infiniswap.config import MqttConfig
from infiniswap.discovery import broker
from infiniswap.discovery.announcement import (
    REPEAT_S_UNKEPT,
    Announcement,
    MemoryTelemetry,
    NotOursError,
    Withdrawal,
    check_age,
    decode,
    donor_topic,
    encode,
    memory_topic,
)
from infiniswap.discovery.attempts import Attempts
from infiniswap.discovery.directory import conflict
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from aiomqtt import Client, Message

log = logging.getLogger(__name__)

_RETRY_S_MAX: Final = 60.0
ECHO_S_MAX: Final = 10.0
_AGAIN_S_MIN: Final = 5.0
_WITHDRAW_S_MAX: Final = 2.0
_OTHERS_MAX: Final = 16
_CLEARED_MAX: Final = 64
_FORMER_MAX: Final = 16


class _OtherKeyError(Exception):
    """Another announcement key counts: a new session has the broker keep a will under that one."""


class Announcer:
    """Announces one donor. Everything runs on the event loop.

    Args:
        config: the broker.
        keys: announcement keys that are accepted now, the first one for our own; empty: nothing is
            signed.
        make: the announcement for this moment, given this host's address on the way to the
            broker and a session.
        memory: figures for telemetry.
        rng: source of randomness.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        config: MqttConfig,
        keys: Callable[[], Sequence[bytes]],
        make: Callable[[str, str], Awaitable[Announcement]],
        memory: Callable[[], MemoryTelemetry],
        rng: Random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._keys = keys
        self._wall = wall
        self._sequence = 0
        self._will_key: bytes | None = None  # with which the will of this session was signed
        self._make = make
        self._memory = memory
        self._attempts = Attempts(
            config, rng, retry_s_max=_RETRY_S_MAX, meanwhile="this donor is not announced"
        )
        self._others: dict[str, tuple[HostPort, float]] = {}  # by session, and when last heard
        self._conflict = ""
        self._again = asyncio.Event()
        self._echoed = asyncio.Event()
        self._cleared = 0
        self._retains = True
        self._unseen = ""
        self._refusal = ""  # the broker's reason
        self._former: deque[str] = deque(maxlen=_FORMER_MAX)  # sessions that nothing has removed

    @property
    def problem(self) -> str:
        """Why the donor is not announced, in a sentence; empty when it is."""
        return self._attempts.problem

    def degraded(self) -> list[str]:
        """Faults that an administrator should know of, in sentences."""
        now_s = asyncio.get_running_loop().time()
        live_s = 3.0 * self._config.announce_s
        self._others = {k: v for k, v in self._others.items() if now_s - v[1] < live_s}
        if not self._others:
            self._conflict = ""
        return [text for text in (self.problem, self._unseen, self._conflict) if text]

    async def run(self) -> None:
        """Runs until cancelled, and withdraws the announcement then."""
        await self._attempts.keep(self._announced)

    async def _announced(self) -> None:
        self._retains = True
        try:
            await self._one_session()
        except broker.BrokerError as error:
            if not may_not_retain(error, self._attempts.versions.now):
                raise
            self._retains = False
            await self._one_session()

    async def _one_session(self) -> None:
        context = await asyncio.to_thread(broker.tls_context, self._config)
        local = await broker.knock(self._config, context)
        session = secrets.token_hex(8)
        announcement = await self._make(local, session)
        topic = donor_topic(announcement.cluster, announcement.donor_id, session)
        self._cleared = 0
        self._unseen = self._refusal = ""
        self._will_key = self._key()
        async with broker.connected(
            self._config,
            context,
            f"isw{session}",
            self._attempts.versions.now,
            will=broker.Will(topic, self._withdrawal(announcement), self._retains),
            refused=self._refused,
        ) as client:
            try:
                await self._serve(client, announcement, topic, local)
            except _OtherKeyError:
                # Withdrawn only by the next session, which has the same address: who knows this
                # donor has it all the time.
                return
            except asyncio.CancelledError:
                client.timeout = _WITHDRAW_S_MAX
                with contextlib.suppress(Exception):
                    # To those who listen now; and nothing stays for those who come later. Signed
                    # with the key of now, as listeners may no longer accept an earlier one.
                    await client.publish(topic, self._withdrawal(announcement), qos=1)
                    if self._retains:
                        await client.publish(topic, b"", qos=1, retain=True)
                raise
            finally:
                self._former.append(session)

    def _refused(self, reason: str) -> None:
        self._refusal = reason

    def _withdrawal(self, announcement: Announcement) -> bytes:
        said = Withdrawal(
            cluster=announcement.cluster,
            donor_id=announcement.donor_id,
            session=announcement.session,
        )
        return encode(said, self._key())

    def _key(self) -> bytes | None:
        keys = self._keys()
        return keys[0] if keys else None

    def _signed(self, announcement: Announcement) -> bytes:
        """The time makes the sequence rise over restarts as well."""
        time_s = max(0.0, self._wall())
        self._sequence = max(self._sequence + 1, round(time_s * 1e6))
        now = structs.replace(announcement, time_s=time_s, sequence=self._sequence)
        return encode(now, self._key())

    async def _serve(
        self, client: Client, announcement: Announcement, topic: str, local: str
    ) -> None:
        mine = donor_topic(announcement.cluster, announcement.donor_id, "+")
        # A refusal is found out like a silent broker, by what does not come back.
        await client.subscribe(mine, qos=1)
        try:
            async with asyncio.TaskGroup() as tasks:
                repeat = self._repeat(client, announcement, topic, local)
                tasks.create_task(repeat, name="announce")
                tasks.create_task(self._listen(client, announcement, topic), name="announced")
                tasks.create_task(self._check(announcement), name="announcement echo")
                if self._config.telemetry_s:
                    tasks.create_task(self._telemetry(client, announcement), name="telemetry")
        except ExceptionGroup as group:
            first = group.exceptions[0]
            raise first from first.__cause__

    async def _repeat(
        self, client: Client, announcement: Announcement, topic: str, local: str
    ) -> None:
        while True:
            if self._key() != self._will_key:
                raise _OtherKeyError
            self._again.clear()
            signed = self._signed(announcement)
            await client.publish(topic, signed, qos=1, retain=self._retains)
            _heed_cancellation()
            if self._refusal:
                raise broker.not_taken(self._config, self._refusal)
            await self._remove_former(client, announcement)
            every_s = self._config.announce_s
            if not self._retains:  # who comes later hears nothing else
                every_s = min(REPEAT_S_UNKEPT, every_s)
            await asyncio.sleep(min(_AGAIN_S_MIN, every_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, every_s - _AGAIN_S_MIN)):
                    await self._again.wait()
            # An RDMA device may have come or gone.
            announcement = await self._make(local, announcement.session)

    async def _remove_former(self, client: Client, announcement: Announcement) -> None:
        """Removes what earlier sessions of this process have left; after an announcement, so that
        nobody is without one. The echo shows them as well, but only to who may read."""
        while self._former:
            former = structs.replace(announcement, session=self._former[0])
            topic = donor_topic(former.cluster, former.donor_id, former.session)
            await client.publish(topic, self._withdrawal(former), qos=1)
            if self._retains:
                await client.publish(topic, b"", qos=1, retain=True)
            _heed_cancellation()
            self._former.popleft()

    async def _check(self, announcement: Announcement) -> None:
        """A broker may accept a message that its access rules let nobody read, without a word."""
        self._echoed.clear()
        try:
            async with asyncio.timeout(ECHO_S_MAX):
                await self._echoed.wait()
        except TimeoutError:
            self._go_on_unseen()
            await self._echoed.wait()
            self._unseen = ""
        self._attempts.good()
        log.info(
            "announced as %s at %s, in the cluster %s%s",
            ", ".join(announcement.addresses),
            broker.where(self._config),
            announcement.cluster,
            ""
            if self._retains
            else "; the broker keeps no messages, so this is repeated more often",
        )
        if announcement.address.is_loopback and not broker.address_of(self._config).is_loopback:
            log.warning(
                "the announced address %s is one that only this host can reach: set "
                "daemon.listen or mqtt.advertise",
                announcement.address,
            )

    def _go_on_unseen(self) -> None:
        """A new session would see no more; whoever may read has the announcement."""
        self._attempts.good()
        error = broker.not_seen(self._config, self._attempts.versions.now)
        self._unseen = f"this donor cannot see whether it is announced: {broker.sentence(error)}"
        if self._attempts.is_due(self._unseen):
            log.warning("%s", self._unseen)

    async def _telemetry(self, client: Client, announcement: Announcement) -> None:
        topic = memory_topic(announcement.cluster, announcement.donor_id)
        while True:
            await client.publish(topic, msgspec.json.encode(self._memory()))
            _heed_cancellation()
            await asyncio.sleep(self._config.telemetry_s)

    async def _listen(self, client: Client, announcement: Announcement, topic: str) -> None:
        async for message in client.messages:
            await self._heard(client, announcement, topic, message)

    async def _heard(
        self, client: Client, announcement: Announcement, topic: str, message: Message
    ) -> None:
        """A message under our identity: our echo, an earlier session's, or another daemon's."""
        payload = message.payload
        if str(message.topic) == topic:
            self._heard_own(topic, payload, announcement.cluster)
            return
        if not payload:
            return
        try:
            other = decode(str(message.topic), payload, self._keys(), announcement.cluster)
            if isinstance(other, Announcement) and self._keys() and not message.retain:
                check_age(other, self._wall())
        except NotOursError as error:
            text = f"a message under this donor's identity does not count: {error}"
            self._attempts.ignored(text, error)
            return
        if isinstance(other, Withdrawal) or other.addresses == announcement.addresses:
            # Nobody else is at our address: it is an earlier session of ours, whose will was lost.
            if message.retain and self._cleared < _CLEARED_MAX:
                self._cleared += 1
                await client.publish(str(message.topic), b"", qos=1, retain=True)
                _heed_cancellation()
        elif not message.retain:  # a retained one may be ours, under an earlier address
            self._conflicts(announcement, other)

    def _heard_own(self, topic: str, payload: bytes, cluster: str) -> None:
        if not payload:
            self._again.set()  # somebody has removed what the broker kept, and we are here
            return
        self._echoed.set()
        with contextlib.suppress(NotOursError):
            if isinstance(decode(topic, payload, self._keys(), cluster), Withdrawal):
                raise broker.BrokerError(
                    "somebody has sent the withdrawal of this donor, which is there",
                    where=broker.where(self._config),
                    mend="The donor announces itself again. If this repeats, give the broker TLS "
                    "(mqtt.tls) and other passwords.",
                )

    def _conflicts(self, announcement: Announcement, other: Announcement) -> None:
        now_s = asyncio.get_running_loop().time()
        if other.session not in self._others:
            if len(self._others) >= _OTHERS_MAX:
                return
            self._again.set()  # so that the other one hears of us, too
        self._others[other.session] = (other.address, now_s)
        everybody = {announcement.address, *(address for address, _ in self._others.values())}
        self._conflict = conflict(announcement.donor_id, list(everybody))
        if self._attempts.is_due(self._conflict):
            log.warning("%s", self._conflict, extra=events.about(events.IDENTITY_TWICE))


def may_not_retain(error: broker.BrokerError, version: str) -> bool:
    """Whether another attempt should do without retained messages. In MQTT 3.1.1 a broker that does
    not keep any can only close the connection."""
    return error.is_retain or (error.is_protocol and version == "3.1.1")


def _heed_cancellation() -> None:
    """For tasks of the group. The library waits with asyncio.wait_for, which before Python 3.12
    forgets a cancellation that comes together with its result, and a group cancels once."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
