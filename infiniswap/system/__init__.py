# SPDX-License-Identifier: Apache-2.0
"""What the kernel offers: /proc, /sys, cgroups, swap areas, loop devices, mounts, namespaces.

Nothing here knows of donors or devices. Functions may block unless they say otherwise, so an event
loop calls them through `asyncio.to_thread`. Paths of /proc and /sys are parameters for tests.
"""
