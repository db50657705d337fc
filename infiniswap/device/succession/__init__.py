# SPDX-License-Identifier: Apache-2.0
"""How a device's process hands over to the next one.

`hand_over` is what a process keeps for its successor, `standby` what that one prepares and takes
over; `holder` speaks with the parent process (csrc/holder). Only `process` enters.
"""
