# SPDX-License-Identifier: Apache-2.0
"""What the metrics port of a device shows and asks for: its certificate and the metrics token.

Loaded before the port is needed: a successor must not wait for a file.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from infiniswap.config import Config
from infiniswap.control.own_certificate import DEVICE, kept_certificate
from infiniswap.control.pki import Credentials
from infiniswap.control.tls import ServerTls
from infiniswap.errors import InfiniswapError
from infiniswap.secret import check_metrics_listen

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """In force at one moment.

    Attributes:
        tls: what the port shows.
        token: opens the metrics; None: only certificates do.
    """

    tls: ServerTls
    token: bytes | None


class MetricsAccess:
    """What cannot be used changes nothing: the last good values stay in force.

    Attributes:
        now: in force; None: nothing yet that can be used.
        failure: why the files as they are now are not in force; None: they are.
        on_change: given what the port shows from now on.
    """

    def __init__(self) -> None:
        self.now: Access | None = None
        self.failure: InfiniswapError | None = None
        self.on_change: Callable[[ServerTls], None] = lambda tls: None

    def read(self, config: Config, credentials: Credentials | None) -> bool:
        """Reads the files. Blocking; never raises.

        Args:
            config: names them.
            credentials: this host's certificate; None: the cluster has a secret.

        Returns:
            Whether another certificate or token is in force.
        """
        try:
            found = _load(config, credentials)
        except InfiniswapError as error:
            is_new, self.failure = str(error) != str(self.failure), error
            if is_new:
                log.warning("%s", self.degraded()[0])
            return False
        former, self.now, self.failure = self.now, found, None
        return former is None or (former.token, former.tls.certificate) != (
            found.token,
            found.tls.certificate,
        )

    def show(self) -> None:
        """On the event loop, after `read`: the port shows what is in force."""
        if self.now is not None:
            self.on_change(self.now.tls)

    def degraded(self) -> list[str]:
        """Sentences for the status."""
        if self.failure is None:
            return []
        if self.now is None:
            return [f"the device serves no metrics at its port: {self.failure}"]
        return [f"the metrics port keeps the former certificate and token: {self.failure}"]


def _load(config: Config, credentials: Credentials | None) -> Access:
    # The first page must not wait for these modules either.
    importlib.import_module("infiniswap.control.exposition")
    token = config.metrics_token()
    check_metrics_listen(config.device.metrics_listen, token, config.cluster.ca_file)
    if credentials is None:
        return Access(kept_certificate(config.device.backup_dir, DEVICE), token)
    assert credentials.server is not None, "it was loaded for a consumer"
    return Access(credentials.server, token)
