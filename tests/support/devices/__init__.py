# SPDX-License-Identifier: Apache-2.0
"""Devices that a test drives, and clusters of daemons and devices."""
