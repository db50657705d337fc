# SPDX-License-Identifier: Apache-2.0
"""What the paper measured: Gu, Lee, Zhang, Chowdhury, Shin, "Efficient Memory Disaggregation with
Infiniswap", NSDI 2017. Other machines, other jobs: a mark to reach, not a side of a comparison."""

from __future__ import annotations

LOST_PER_EVICTION = 0.023
"""Of a job's throughput."""

LOST_WITH_DONOR = 0.345
"""Of a job's throughput when one of six donors fails, on average."""

LOST_WITH_DONOR_MAX = 0.583
"""At worst: the most active one at the job's peak."""

HOST_LOST = 0.02
"""Of the throughput of an application (Memcached) on a donor that takes its memory back."""

HOST_TAIL = 0.04
"""What its 99th percentile grows by."""

CACHE_LOST = 0.02
"""Of a host that reads its cached files again: this project's wish, not the paper's."""

MAP_MS = 54.0
"""To map a slab, median."""

EVICT_MS = 0.36
"""To evict one, median."""
