# SPDX-License-Identifier: Apache-2.0
"""A device's side of each donor: session, lease, data connections, and the way back after a loss.

`link` is one donor; `transport` chooses RDMA or TCP for it. Only `slabs` and `process` enter.
"""
