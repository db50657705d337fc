# SPDX-License-Identifier: Apache-2.0
"""Devices whose process has died: `leftovers` finds and clears what they left, `lost` tells a `run`
that its device is dead. Commands and `jobs` enter."""
