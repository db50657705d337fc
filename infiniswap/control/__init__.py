# SPDX-License-Identifier: Apache-2.0
"""The control API between consumers and donors.

`messages` declares every message; `client` is the consumer's end, `server` and `service` the
donor's, `channel` what both ends share. The daemon, devices and commands use it.
"""
