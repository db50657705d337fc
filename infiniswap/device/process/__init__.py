# SPDX-License-Identifier: Apache-2.0
"""The device process itself: it starts all parts in order, serves, and stops in the reverse order.

`life` runs it, `service` is what may be asked of it, and `control_socket`, `member_socket` and
`metrics_port` are where. It has `parts`, begun by `start` or `take_over`. Only
infiniswap.device.__main__ enters, and `cleanup` and `cli` for the name of a run's cgroup.
"""
