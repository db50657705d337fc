# SPDX-License-Identifier: Apache-2.0
"""A device's side of each donor: session, lease, data connections, and the way back after a loss.

`link` is one donor; `transports` are the ways for its pages to travel. Only `slabs` and `process`
enter.
"""
