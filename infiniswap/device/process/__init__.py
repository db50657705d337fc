# SPDX-License-Identifier: Apache-2.0
"""The device process itself: starts everything in order, serves, stops in the reverse order.

`service` owns every part, `serve` is its life, `server` its control API. Only
infiniswap.device.__main__ enters, and `cleanup` and `cli` for the name of a run's cgroup.
"""
