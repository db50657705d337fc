# SPDX-License-Identifier: Apache-2.0
"""How a device's process hands over to the next one: what it keeps, and what a successor finds.

`holder` speaks with the parent process (csrc/holder). Only `process` enters.
"""
