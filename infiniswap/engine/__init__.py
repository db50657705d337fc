# SPDX-License-Identifier: Apache-2.0
"""The binding to the C library behind typed protocols."""
