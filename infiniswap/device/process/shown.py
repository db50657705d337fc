# SPDX-License-Identifier: Apache-2.0
"""What a device shows donors: keys of the cluster secret, or this host's certificate."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Callable

import msgspec

from infiniswap.config import Config
from infiniswap.config_changes import SECRETS_CHANGED
from infiniswap.control.client import ClientConfig
from infiniswap.control.pki import LOOK_S, CertificateWatch, check_date
from infiniswap.control.roles import Role
from infiniswap.errors import ConfigError
from infiniswap.json_text import NotJsonError, decode_json
from infiniswap.keys import Keys
from infiniswap.secret import CertificateTexts

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True):
    """What a process shows and accepts, for its successor."""

    first: Keys | None
    second: Keys | None
    texts: CertificateTexts | None


class Shown:
    """Loaded once, before the device serves; what is loaded later takes its place as a whole.

    Args:
        config: names the files.
        connect_s: see ClientConfig.
        is_start: refuse a certificate that is out of date. A successor goes on with its backup.
        kept: by the predecessor (`kept`). A successor that finds files broken goes on with that,
            as somebody may replace them just now.

    Attributes:
        client: for connections to donors from now on.

    Raises:
        ConfigError: secret or certificate cannot be used.
    """

    def __init__(
        self, config: Config, connect_s: float, *, is_start: bool, kept: bytes = b""
    ) -> None:
        self._lock = threading.Lock()
        self._watch: CertificateWatch | None = None
        self._second: Keys | None = None
        self._failure = ""
        former = _read_kept(kept)
        files = config.certificates()
        if files is None:
            first, self._second = self._keys(config, former)
            self.client = ClientConfig(keys=first, connect_s=connect_s)
            return
        self._watch = CertificateWatch(
            files,
            config.cluster.name,
            Role.CONSUMER,
            former=None if former is None else former.texts,
        )
        if is_start:
            check_date(self._watch.now)
        self.client = ClientConfig(credentials=self._watch.now, connect_s=connect_s)

    def _keys(self, config: Config, former: _Kept | None) -> tuple[Keys | None, Keys | None]:
        try:
            return config.keys(), config.second_keys()
        except ConfigError as error:
            if former is None:
                raise
            self._failure = (
                "the files of the cluster secret cannot be used, so the device uses what it had "
                f"before: {error}"
            )
            return former.first, former.second

    def kept(self) -> bytes:
        """What a successor goes on with where it finds the files broken. It has keys."""
        texts = None if self._watch is None else self._watch.now.texts
        return msgspec.json.encode(_Kept(self.client.keys, self._second, texts))

    def read(self, config: Config) -> bool:
        """Reads the files again, as a reload does: their contents may have changed under the same
        names. Blocking.

        Returns:
            Whether `client`, or what is accepted of announcements, has changed.

        Raises:
            ConfigError: the secret cannot be used.
        """
        if self._watch is not None:
            return self.look(at_once=True)
        first, second = config.keys(), config.second_keys()
        self._failure = ""
        if (first, second) == (self.client.keys, self._second):
            return False
        self._second = second
        self.client = dataclasses.replace(self.client, keys=first)
        return True

    def look(self, *, at_once: bool = False) -> bool:
        """Reads the certificate again if its files have changed. Blocking; never raises.

        Returns:
            Whether `client` has changed.
        """
        if self._watch is None:
            return False
        with self._lock:
            if not self._watch.look(at_once=at_once):
                return False
            self.client = dataclasses.replace(self.client, credentials=self._watch.now)
        return True

    def degraded(self) -> list[str]:
        """Sentences for the status."""
        if self._watch is None:
            return [self._failure] if self._failure else []
        return self._watch.sentences()

    def news(self, *, has_changed: bool) -> tuple[str, ...]:
        """What a reload says of the files. `has_changed`: what `read` has returned."""
        if self._watch is not None:
            return self._watch.news(has_changed=has_changed)
        return (SECRETS_CHANGED,) if has_changed else ()

    @property
    def has_certificate(self) -> bool:
        """Whether there is a certificate to look after."""
        return self._watch is not None


def _read_kept(data: bytes) -> _Kept | None:
    """None: the predecessor's release has not kept it, or otherwise."""
    try:
        return decode_json(data, _Kept)
    except NotJsonError:
        return None


async def tend_certificate(
    shown: Shown,
    blocking: Callable[[Callable[[], bool]], Awaitable[bool]],
    renewed: Callable[[], Awaitable[None]],
) -> None:
    """Until cancelled: notices a certificate that somebody has renewed.

    Args:
        shown: of the device.
        blocking: runs a call that blocks outside of the event loop.
        renewed: called after each change.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await blocking(shown.look):
                await renewed()
        except Exception:
            log.exception("the certificate of this host cannot be looked after; it is tried again")
