# SPDX-License-Identifier: Apache-2.0
"""The consumer's side: one process per device, and what commands need to talk to it.

Its rooms, each of which imports only those before it: `spec` (what a device is), `donors` (sessions
and leases), `slabs` (which one goes where), `frontends` (to the kernel), `succession` (the next
process), `process` (all of them together); for commands `control` (start it, ask it), `cleanup` and
`jobs` (what `run` starts). All may use `api` and `member_api`, the messages to a device.
"""
