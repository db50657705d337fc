# SPDX-License-Identifier: Apache-2.0
"""The consumer's side: one process per device, and what commands need to talk to it.

`spec` says what a device is, `rundir` where it is recorded, `launch` starts its process,
`client` talks to it. In the process itself, `service` owns everything: `attach` connects the
engine to the kernel, `links` keeps the donors, `mapper` decides which slab goes where.
"""
