# SPDX-License-Identifier: Apache-2.0
"""A connection to an MQTT broker, and the reason when there is none.

Only `connected` loads the MQTT library, so a process that talks to no broker never has it.

Each attempt first knocks: it opens an asyncio connection, with TLS where it is on, and closes it
again. That can be cancelled (the library connects in a thread, which cannot), finds most faults of
an address or a certificate in words, and tells which address of this host leads to the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from infiniswap.config import MqttConfig
from infiniswap.errors import ConfigError, InfiniswapError, NoDonorError
from infiniswap.secret import read_password
from infiniswap.units import HostPort

if TYPE_CHECKING:
    from aiomqtt import Client, Message

CONNECT_S_MAX: Final = 5.0
QUEUE_MAX: Final = 256
"""Messages that may wait to be looked at; more are dropped."""
PACKET_BYTES_MAX: Final = 16 * 1024
"""Largest packet that a broker may send. Only MQTT 5 lets a client say so."""

_PORT: Final = 1883
_PORT_TLS: Final = 8883
_UNSUPPORTED_PROTOCOL: Final = {1, 132}
_WRONG_PASSWORD: Final = {4, 134}
_NOT_AUTHORIZED: Final = {5, 135}
_UNSPECIFIED: Final = {7, 128}
_NOT_RETAINED: Final = {154}
_REFUSALS: Final = {2, 133, 138, 140, 144, 149, 153, 155, 156, 157}
"""Of MQTT 3.1.1 (table 3.1) and 5 (2.4): those that another attempt does not end."""


class BrokerError(NoDonorError):
    """The broker cannot be used. It ends nothing.

    Attributes:
        is_protocol: the broker does not speak the version of MQTT that was tried, or says nothing.
        is_retain: it keeps no retained messages, and so takes none.
        missing: "read" or "write", the right below infiniswap/ that our user lacks; "" if another
            fault than that.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        mend: str = "",
        is_protocol: bool = False,
        is_retain: bool = False,
        missing: str = "",
    ) -> None:
        super().__init__(what, where=where, mend=mend)
        self.is_protocol = is_protocol
        self.is_retain = is_retain
        self.missing = missing


class Versions:
    """The version of MQTT to speak; `auto` begins with 5 and alternates after each refusal."""

    def __init__(self, protocol: str) -> None:
        self._choices = ("5", "3.1.1") if protocol == "auto" else (protocol,)
        self.now = self._choices[0]

    def failed(self) -> None:
        """The broker does not speak it."""
        self.now = self._choices[-1] if self.now == self._choices[0] else self._choices[0]


def address_of(config: MqttConfig) -> HostPort:
    """The broker's address, with its port."""
    assert config.broker is not None, "checked by infiniswap.config"
    port = config.broker.port or (_PORT_TLS if config.tls == "on" else _PORT)
    return HostPort(config.broker.host, port)


def where(config: MqttConfig) -> str:
    """The broker, for messages."""
    return f"broker {address_of(config)}{' (TLS)' if config.tls == 'on' else ''}"


def tls_context(config: MqttConfig) -> ssl.SSLContext | None:
    """How the broker proves itself; None without TLS. Blocking.

    Raises:
        ConfigError: a file cannot be used.
    """
    if config.tls == "off":
        return None
    path: Any = config.ca_file
    key = "mqtt.ca_file"
    try:
        context = ssl.create_default_context(cafile=path)
        if config.cert_file is not None:
            key, path = "mqtt.cert_file and mqtt.key_file", config.cert_file
            context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{key}: cannot be used: {_reason(error)}",
            where=str(path),
            mend="Give files in PEM form that this user may read.",
        ) from error
    return context


async def knock(config: MqttConfig, context: ssl.SSLContext | None) -> str:
    """Whether somebody is there; returns this host's address on the way to the broker.

    Raises:
        BrokerError: nobody, or nobody who is to be trusted.
    """
    address = address_of(config)
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise _not_reached(config, error) from error
    try:
        return str(writer.get_extra_info("sockname")[0])
    finally:
        writer.transport.abort()


def _not_reached(config: MqttConfig, error: Exception) -> BrokerError:
    reason, mend = _reason(error), "The next attempt follows on its own; see mqtt.broker."
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"its certificate is not to be trusted: {error.verify_message}"
        mend = (
            "Name the authority that signed it in mqtt.ca_file, and in mqtt.broker the host as "
            "the certificate calls it."
        )
    elif isinstance(error, ssl.SSLError | ConnectionResetError) and config.tls == "on":
        reason = f"no TLS connection: {reason}"
        mend = 'That port may be one without TLS (mqtt.tls = "off", or another port).'
    elif isinstance(error, TimeoutError):
        reason = f"no answer within {CONNECT_S_MAX:g} s"
    elif isinstance(error, socket.gaierror | UnicodeError):
        reason = f"the name cannot be resolved ({reason})"
    return BrokerError(reason, where=where(config), mend=mend)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError | socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Will:
    """A message of last resort; `retain`: the broker keeps it."""

    topic: str
    payload: bytes
    retain: bool


@contextlib.asynccontextmanager
async def connected(
    config: MqttConfig,
    context: ssl.SSLContext | None,
    identifier: str,
    protocol: str,
    will: Will | None = None,
    sink: Callable[[Message], None] | None = None,
    refused: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Client]:
    """A connection with a session of its own, as long as the block lasts.

    Args:
        config: the broker.
        context: of TLS.
        identifier: for the broker; nobody else's, as brokers end the older of two.
        protocol: "5" or "3.1.1".
        will: a message that the broker sends when we vanish.
        sink: called with each message as it comes, so that in a flood none waits and none is
            dropped; None: they are read from the client.
        refused: called with the broker's reason when it refuses a message of ours, before
            `publish` returns. MQTT 3.1.1 has no such answer.

    Raises:
        ConfigError: the password cannot be read.
        BrokerError: there is no connection, or it was lost.
    """
    import aiomqtt
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

    is_5 = protocol == "5"
    properties = None
    if is_5:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = PACKET_BYTES_MAX
    password = None if config.password_file is None else read_password(config.password_file)
    address = address_of(config)
    client = _telling(refused)(
        address.host,
        address.port,
        username=config.username or None,
        password=password,
        identifier=identifier,
        protocol=aiomqtt.ProtocolVersion.V5 if is_5 else aiomqtt.ProtocolVersion.V311,
        will=aiomqtt.Will(will.topic, will.payload, 1, will.retain) if will else None,
        clean_session=None if is_5 else True,
        timeout=CONNECT_S_MAX,
        keepalive=config.keepalive_s,
        max_queued_incoming_messages=QUEUE_MAX,
        max_queued_outgoing_messages=64,
        properties=properties,
        tls_context=context,
        queue_type=None if sink is None else cast(Any, functools.partial(_Sink, sink)),
        logger=_silent(),
    )
    try:
        async with contextlib.AsyncExitStack() as stack:
            # The library leaves a connection open that is answered too late. With a slow broker
            # each attempt would leave another one.
            stack.push_async_exit(client)
            yield await client.__aenter__()
    except aiomqtt.MqttError as error:
        raise _explained(config, error) from error
    except (OSError, ValueError) as error:  # the library's, of a broker that talks nonsense
        raise BrokerError(
            f"the connection was lost: {_reason(error)}",
            where=where(config),
            mend="The next attempt follows on its own.",
        ) from error


def _telling(refused: Callable[[str], None]) -> type[Client]:
    """A client that tells of refused messages: the library drops the broker's answer to them."""
    import aiomqtt

    class Telling(aiomqtt.Client):
        def _on_publish(self, *args: Any) -> None:
            if args[3].is_failure:
                refused(str(args[3]).lower())
            super()._on_publish(*args)

    return Telling


class _Sink(asyncio.Queue[Any]):
    """A queue of messages for the library that is always empty: each goes straight to the sink."""

    def __init__(self, sink: Callable[[Message], None], maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self._sink = sink

    def put_nowait(self, item: Message) -> None:
        self._sink(item)


def _silent() -> Any:
    """A logger for the library, whose own lines name neither broker nor remedy."""
    import logging

    logger = logging.getLogger("infiniswap.discovery.mqtt")
    logger.setLevel(logging.CRITICAL)
    return logger


def _explained(config: MqttConfig, error: Exception) -> BrokerError:
    code = getattr(error, "rc", None)
    number = getattr(code, "value", code)
    place = where(config)
    if number in _UNSUPPORTED_PROTOCOL:
        return BrokerError(
            "it does not speak this version of MQTT",
            where=place,
            mend='Set mqtt.protocol = "3.1.1", or leave it at "auto".',
            is_protocol=True,
        )
    if number in _WRONG_PASSWORD or number in _NOT_AUTHORIZED:
        user = f"user {config.username!r}" if config.username else "us without a user name"
        return BrokerError(
            f"it refuses {user}: {str(code).lower()}",
            where=place,
            mend="Correct mqtt.username and mqtt.password_file, or the broker's users.",
        )
    if str(error) == "Operation timed out":
        return BrokerError(
            f"no answer in MQTT within {CONNECT_S_MAX:g} s",
            where=place,
            mend="Another kind of server, one that expects TLS (mqtt.tls) or a certificate of ours "
            "(mqtt.cert_file), or a slow broker.",
            is_protocol=True,
        )
    reason = str(code).lower() if code is not None else str(error)
    if number in _NOT_RETAINED:
        return BrokerError(
            "it keeps no retained messages",
            where=place,
            mend="Allow them there (Mosquitto: retain_available), or announce without.",
            is_retain=True,
        )
    if number in _REFUSALS:
        return BrokerError(
            f"it refuses this host: {reason}",
            where=place,
            mend="Change the settings of the broker, or those under [mqtt]; its log says more.",
        )
    return BrokerError(
        "the connection was lost" + (f": {reason}" if number not in _UNSPECIFIED else ""),
        where=place,
        mend="The next attempt follows on its own.",
    )


def refused(config: MqttConfig, codes: Any) -> BrokerError | None:
    """The refusal in a broker's answer to a subscription; None: it was granted."""
    numbers = [int(getattr(code, "value", code)) for code in codes]
    if all(number < 128 for number in numbers):
        return None
    return BrokerError(
        "it refuses the subscription to what donors announce",
        where=where(config),
        mend="Let this user read infiniswap/# (the broker's access control list).",
        missing="read",
    )


def not_taken(config: MqttConfig, reason: str) -> BrokerError:
    """The broker has refused an announcement."""
    return BrokerError(
        f"it refuses the announcement ({reason})",
        where=where(config),
        mend="Let this user write infiniswap/# (the broker's access control list).",
        missing="write",
    )


def not_seen(config: MqttConfig, version: str) -> BrokerError:
    """Nothing has come back of what we have announced.

    Args:
        config: the broker.
        version: of MQTT that is spoken. Only 5 tells of messages that are refused.
    """
    rights = "read infiniswap/# as well" if version == "5" else "read and write infiniswap/#"
    return BrokerError(
        "what is announced does not come back",
        where=where(config),
        mend=f"Let this user {rights} (the broker's access control list).",
        missing="read",
    )


def sentence(error: Exception) -> str:
    """An error in one sentence for a log or a status, without a full stop."""
    text = str(error) if isinstance(error, InfiniswapError) else f"{type(error).__name__}: {error}"
    return text.rstrip(".")
