# SPDX-License-Identifier: Apache-2.0
"""The donor's daemon: leases, the slab pool and the memory it may use."""
