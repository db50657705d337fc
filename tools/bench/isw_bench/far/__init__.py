# SPDX-License-Identifier: Apache-2.0
"""The area `far` of `make bench`: jobs with far memory beside no limit, a swap file and swap by
Infiniswap. `rows` says what is compared, `jobs` has the jobs that no other suite has, and `area`
runs them with the cells of `isw_bench.apps`.
"""
