# SPDX-License-Identifier: Apache-2.0
"""The daemon that lends memory: leases, the slab pool, eviction, and the memory it may use.

Only `infiniswap daemon` runs it (infiniswap.cli.daemon); devices reach it over the control API
alone. Begin with serve.py, which starts the parts, and requests.py, which answers devices.
"""
