# SPDX-License-Identifier: Apache-2.0
"""`infiniswap plan`: how long a job takes at each memory limit, from a few runs of it.

`watch` follows the runs and notes which pages are used when, `misses` makes a curve of page-ins
from that, `prediction` adds the time that they cost, `trials` chooses limits to try, `history`
keeps what earlier plans have measured on this host, `process` looks at a running program, `report`
shows the result. Only commands enter.
"""
