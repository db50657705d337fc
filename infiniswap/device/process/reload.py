# SPDX-License-Identifier: Apache-2.0
"""A device's configuration, read again while it runs (SIGHUP, `infiniswap device reload`).

The flags that it was started with are still in force. Its engine, its front end and where it lies
wait for a stop and a start. A file with a mistake changes nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from infiniswap import config as configuration
from infiniswap.config_changes import Outcome, merged
from infiniswap.device.spec.spec import DeviceSpec, completed
from infiniswap.errors import ConfigError, InfiniswapError


def plan(spec: DeviceSpec) -> tuple[DeviceSpec, Outcome]:
    """The device as it should be now. Blocking: reads the configuration.

    Args:
        spec: the device as it is.

    Returns:
        The device with the new values that it can take over, and what came of the reading.
    """
    path = None if spec.config_file is None else Path(spec.config_file)
    try:
        wanted = configuration.load(path, spec.flags)
        wanted.keys()
        wanted.second_keys()
    except InfiniswapError as error:
        return spec, Outcome(error=error)
    running = spec.config
    if (running.cluster.ca_file is None) != (wanted.cluster.ca_file is None) and (
        wanted.cluster.trust_file is not None
    ):
        # From a secret to certificates, or back: everything waits for a stop and a start.
        return spec, Outcome.between(running, running, wanted, "device")
    if running.cluster.discovery != "mqtt":
        running = dataclasses.replace(running, mqtt=wanted.mqtt)  # it listens to no broker
    wanted = completed(wanted, running)
    try:
        config = merged(running, wanted, "device")
    except ConfigError:
        config = running
    outcome = Outcome.between(running, config, wanted, "device")
    return msgspec.structs.replace(spec, config=config), outcome
