# SPDX-License-Identifier: Apache-2.0
"""Fakes for tests, shipped so that programs built on Infiniswap can use them too."""
