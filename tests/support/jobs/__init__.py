# SPDX-License-Identifier: Apache-2.0
"""Jobs that page, faults that befall them, and `infiniswap run` as users start it."""
